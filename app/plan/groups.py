"""The one table of process groups: who exchanges what with whom; pure arithmetic.

Communicators are created from it (`app.engine.groups`), and traffic, memory and pictures are
planned from it. A group is called by its axes: `dp_cp` joins the ranks that differ along dp and cp
only, `dp_control` those along dp, for control. Axes are those of the dense grid or of the experts'
(`app.plan.layout`). Every group of the table has a communicator of its own, so that what one
carries never queues behind another's.
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
    """What a group carries, and with that what its communicator takes."""

    host = "host"  # objects between processes, over gloo: no GPU memory
    control = "control"  # sums of a few numbers: NCCL with one channel
    stages = "stages"  # hidden states between pipeline ranks: NCCL with few channels
    data = "data"  # hidden states, gradients, parameters: NCCL with all channels

    @property
    def channels(self) -> int | None:
        """Of NCCL, at most; None: all that it takes by itself.

        A channel has a multiprocessor to itself, also while it waits for the other rank, which
        kernels of the computation then lack. What pipeline ranks send lies beside computation, and
        few channels carry it in time.
        """
        return {GroupKind.control: 1, GroupKind.stages: 4}.get(self)


class Way(Enum):
    """Where a rank's bytes go within its group."""

    ring = "ring"  # to the next rank
    all_to_all = "all_to_all"  # to every other rank alike
    neighbours = "neighbours"  # to the rank before and the rank behind


@dataclass(frozen=True, slots=True)
class Group:
    """A purpose for which ranks are joined, in as many groups as the other axes have places."""

    name: str  # in code, messages, tables, pictures and docs
    purpose: str  # what it is for
    axes: tuple[str, ...]  # its ranks differ along these only
    kind: GroupKind = GroupKind.data
    expert: bool = False  # axes of the experts' grid
    ends_only: bool = False  # only the first and last rank of each take part; others are alone

    def size(self, layout: ParallelLayout) -> int:
        """Ranks of each group; 1: nobody has anybody to exchange with."""
        sizes = layout.sizes(self.expert)
        together = prod(sizes[axis] for axis in self.axes)
        return min(together, 2) if self.ends_only else together

    def members(self, layout: ParallelLayout) -> list[list[int]]:
        """Global ranks of every group, in the order that all ranks agree on.

        A rank is in one of them at most, and in none only where `ends_only` leaves it alone.
        """
        if self.ends_only:
            return layout.embedding_groups()
        return layout.groups(*self.axes, expert=self.expert)

    def joins(self, layout: ParallelLayout, pp_rank: int) -> bool:
        """Whether the ranks of this pipeline rank share a group with others."""
        ends = pp_rank in (0, layout.pp - 1)
        return self.size(layout) > 1 and (ends or not self.ends_only)

    def used_by(self, model: ModelConfig) -> bool:
        """Whether this model has what the group exchanges. It is created also where it has not."""
        if self.expert:
            return model.moe is not None
        return model.tie_embeddings or not self.ends_only


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
    "embedding", "gradients of the two copies of tied embeddings", ("pp",), ends_only=True
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

# Not among them: a run that saves beside training creates it with its first saver.
CHECKPOINT = Group("checkpoint", "threads that save beside training", EVERYBODY, GroupKind.host)
