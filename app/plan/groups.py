"""The table of process groups: ranks, purpose and communicator of each; pure arithmetic.

`app.engine.ranks.groups` creates communicators from it; traffic, memory and pictures are planned
from it. A group is named by its axes: `dp_cp` joins the ranks that differ along dp and cp only,
`dp_control` those along dp, for control messages. Axes are those of the dense or the expert grid
(`app.plan.layout`). Every group has a communicator of its own, so that no collective queues behind
one for another purpose.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from math import prod
from types import MappingProxyType

from app.config import ModelConfig
from app.plan.layout import ParallelLayout


class GroupKind(Enum):
    """Payload of a group, which sets the resources of its communicator."""

    host = "host"  # objects between processes, over gloo: no GPU memory
    control = "control"  # all-reduces of a few numbers: NCCL with one channel
    stages = "stages"  # hidden states between pipeline ranks: NCCL with few channels
    data = "data"  # hidden states, gradients, parameters: NCCL with all channels

    @property
    def channels(self) -> int | None:
        """NCCL's channels at most; None leaves the number to NCCL.

        A channel occupies a multiprocessor, even while it waits for the other rank, and takes it
        from compute kernels. Sends between pipeline ranks overlap with compute, and few channels
        carry them in time.
        """
        return {GroupKind.control: 1, GroupKind.stages: 4}.get(self)


class Way(Enum):
    """Communication pattern of a group."""

    ring = "ring"  # to the next rank
    all_to_all = "all_to_all"  # to every other rank, equal parts
    neighbours = "neighbours"  # to the previous and the next rank


@dataclass(frozen=True, slots=True)
class Group:
    """A purpose for which ranks form groups, one group per combination of the other axes."""

    name: str  # in code, messages, tables, pictures and docs
    purpose: str  # what it is for
    axes: tuple[str, ...]  # its ranks differ along these only
    kind: GroupKind = GroupKind.data
    expert: bool = False  # axes of the experts' grid
    ends_only: bool = False  # only the first and last rank of each group take part

    def size(self, layout: ParallelLayout) -> int:
        """Return the ranks of each group; a group of one sends nothing."""
        sizes = layout.sizes(self.expert)
        together = prod(sizes[axis] for axis in self.axes)
        return min(together, 2) if self.ends_only else together

    def members(self, layout: ParallelLayout) -> list[list[int]]:
        """Return the global ranks of every group, in the same order on all ranks.

        A rank is in one of them at most, and in none only if `ends_only` leaves it out.
        """
        if self.ends_only:
            return layout.embedding_groups()
        return layout.groups(*self.axes, expert=self.expert)

    def joins(self, layout: ParallelLayout, pp_rank: int) -> bool:
        """Return whether the ranks of this pipeline rank share a group with others."""
        ends = pp_rank in (0, layout.pp - 1)
        return self.size(layout) > 1 and (ends or not self.ends_only)

    def used_by(self, model: ModelConfig) -> bool:
        """Return whether this model sends anything in the group, which is created in any case."""
        if self.expert:
            return model.moe is not None
        return model.copies_embedding or not self.ends_only


EVERYBODY = ("tp", "cp", "dp", "pp")

HOST = Group(
    "host", "agreement between processes: folders, files, errors", EVERYBODY, GroupKind.host
)
WORLD = Group("world", "norms, flags, losses", EVERYBODY, GroupKind.control)
DP_CONTROL = Group(
    "dp_control", "counts of ranks that see different sequences", ("dp",), GroupKind.control
)
TP_CP_CONTROL = Group(
    "tp_cp_control", "counts of ranks with parts of the same sequences", ("tp", "cp"),
    GroupKind.control,
)  # fmt: skip
TP_CP_DP_CONTROL = Group(
    "tp_cp_dp_control", "counts over all tokens of the same layers", ("tp", "cp", "dp"),
    GroupKind.control,
)  # fmt: skip
PP_CONTROL = Group(
    "pp_control", "small facts about all stages of a pipeline", ("pp",), GroupKind.control
)
TP = Group("tp", "hidden states between parts of a matrix, and replicated parameters", ("tp",))
CP = Group("cp", "keys and values, or heads, of the parts of a sequence", ("cp",))
PP = Group(
    "pp", "hidden states and their gradients between pipeline ranks", ("pp",), GroupKind.stages
)
DP_CP = Group("dp_cp", "gradients and parameters of dense layers", ("dp", "cp"))
ETP_EP = Group(
    "etp_ep", "tokens to experts and back, and to all parts of each", ("etp", "ep"), expert=True
)
EDP = Group("edp", "gradients and parameters of experts", ("edp",), expert=True)
EMBEDDING = Group(
    "embedding", "gradients of the two copies of the embedding", ("pp",), ends_only=True
)

# By name, in the order in which every rank creates them.
GROUPS: Mapping[str, Group] = MappingProxyType(
    {
        group.name: group
        for group in (
            HOST, WORLD, DP_CONTROL, TP_CP_CONTROL, TP_CP_DP_CONTROL, PP_CONTROL,
            TP, CP, PP, DP_CP, ETP_EP, EDP, EMBEDDING,
        )
    }
)  # fmt: skip

# Not in GROUPS: a run creates it whose experts have adapters and are divided over etp.
ETP = Group("etp", "gradients of adapters that all parts of an expert share", ("etp",), expert=True)
# Not in GROUPS: the first asynchronous saver of a run creates it.
CHECKPOINT = Group("checkpoint", "threads that save beside training", EVERYBODY, GroupKind.host)
