"""Create the process groups of a rank from the table in `app.plan.groups`."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from app.choices import CpComm
from app.engine.ranks.meeting import TIMEOUT
from app.model.layers.layer_groups import LayerGroups
from app.plan.groups import ETP, GROUPS, Group, GroupKind
from app.plan.layout import ParallelLayout
from app.plan.sharding.blocks import ShardCoords
from app.torch_versions import default_store

# torch's own timeout. The watchdog ends a hang long before, and knows which ranks may take long.
HOST_TIMEOUT = datetime.timedelta(hours=4)
USES = "graphfold_uses"  # key in the store of a world of one process: how many contexts share it


@dataclass(frozen=True, slots=True)
class Groups:
    """This rank's communicators and its position in them.

    Fields carry the names of `app.plan.groups.GROUPS`, which says what each is for.
    """

    layout: ParallelLayout
    rank: int  # global rank
    host: dist.ProcessGroup
    world: dist.ProcessGroup
    dp_control: dist.ProcessGroup
    tp_cp_control: dist.ProcessGroup
    tp_cp_dp_control: dist.ProcessGroup
    pp_control: dist.ProcessGroup
    tp: dist.ProcessGroup
    cp: dist.ProcessGroup
    pp: dist.ProcessGroup
    dp_cp: dist.ProcessGroup
    etp_ep: dist.ProcessGroup
    edp: dist.ProcessGroup
    embedding: dist.ProcessGroup

    @property
    def dp_rank(self) -> int:
        """This rank's index along dp: its data-parallel replica."""
        return self.layout.coords(self.rank)["dp"]

    @property
    def pp_rank(self) -> int:
        """This rank's index along pp."""
        return self.layout.coords(self.rank)["pp"]

    @property
    def cp_rank(self) -> int:
        """This rank's index along cp: which part of every sequence it has."""
        return self.layout.coords(self.rank)["cp"]

    @property
    def coords(self) -> ShardCoords:
        """Position of this rank on the axes that shard parameters."""
        return ShardCoords.of(self.layout, self.rank)

    @property
    def etp(self) -> tuple[int, ...]:
        """Ranks within `etp_ep` that hold parts of this rank's experts, by index along etp."""
        members = dist.get_process_group_ranks(self.etp_ep)
        coords = [self.layout.coords(member, expert=True) for member in members]
        mine = self.layout.coords(self.rank, expert=True)["ep"]
        peers = (place for place, each in enumerate(coords) if each["ep"] == mine)
        return tuple(sorted(peers, key=lambda place: coords[place]["etp"]))

    def layer_groups(self, cp_comm_type: CpComm) -> LayerGroups:
        """Return the groups that this rank computes its layers with."""
        (ep_rank, ep), (etp_rank, etp) = self.coords.ep, self.coords.etp
        return LayerGroups(
            tp=self.tp,
            cp=self.cp,
            cp_comm_type=cp_comm_type,
            tp_cp_control=self.tp_cp_control,
            tp_cp_dp_control=self.tp_cp_dp_control,
            etp_ep=self.etp_ep,
            ep=ep,
            ep_rank=ep_rank,
            etp=etp,
            etp_rank=etp_rank,
        )

    def named(self) -> dict[str, dist.ProcessGroup]:
        """This rank's communicators by name."""
        return {name: getattr(self, name) for name in GROUPS}

    def barrier(self) -> None:
        """Wait for all ranks of the run, over gloo; no-op for one rank."""
        if self.host.size() > 1:
            dist.barrier(self.host)


def create_groups(layout: ParallelLayout, rank: int) -> Groups:
    """Create the groups that `rank` is in: one per entry of the table, in its order.

    All ranks must call it, each with an initialised default group. Destroyed groups cannot be
    created again under that default group: torch would find their keys in its store. With the
    "fake" backend this is a dry run of one rank that sends nothing.
    """
    alone = host_group([rank])  # stands for every group that has no second rank
    created = {
        name: _create(group, layout, rank) if group.size(layout) > 1 else alone
        for name, group in GROUPS.items()
    }
    return Groups(layout=layout, rank=rank, **created)


def create_etp(groups: Groups) -> dist.ProcessGroup | None:
    """Create this rank's group of the parts of its experts, as every rank must; None if whole."""
    if ETP.size(groups.layout) == 1:
        return None
    return _create(ETP, groups.layout, groups.rank)


def _create(group: Group, layout: ParallelLayout, rank: int) -> dist.ProcessGroup:
    ranks = next((ranks for ranks in group.members(layout) if rank in ranks), None)
    if ranks is None:
        # torch names a group by its ranks and by how many groups the rank already has. A rank in
        # none of these creates one of its own, or the names of later groups would differ by rank.
        return host_group([rank])
    if group.kind is GroupKind.host:
        return host_group(ranks)
    return _device_group(ranks, group.kind.channels)


def host_group(ranks: list[int]) -> dist.ProcessGroup:
    """Create a gloo group of these ranks; each of them must do so as its next group."""
    # Also for one rank: an NCCL communicator would take 390 MiB of GPU memory to send nothing.
    # A world of another backend is a dry run: nothing of it can be reached over gloo.
    backend = "gloo" if dist.get_backend() in ("gloo", "nccl") else None
    return _new_group(ranks, backend=backend)


def _new_group(
    ranks: list[int],
    backend: str | None = None,
    options: dist.ProcessGroupNCCL.Options | None = None,
    device: torch.device | None = None,
) -> dist.ProcessGroup:
    group = dist.new_group(
        ranks,
        timeout=HOST_TIMEOUT,
        backend=backend,
        pg_options=options,
        use_local_synchronization=True,
        device_id=device,
    )
    assert isinstance(group, dist.ProcessGroup), "this rank is one of them"
    return group


def _device_group(ranks: list[int], channels: int | None) -> dist.ProcessGroup:
    if dist.get_backend() != "nccl":
        return _new_group(ranks)
    options = None
    if channels is not None:
        # A communicator with few channels takes fewer SMs and less GPU memory.
        options = dist.ProcessGroupNCCL.Options()
        options.config.min_ctas, options.config.max_ctas = 1, channels
        options._timeout = HOST_TIMEOUT  # torch warns if it differs from the group's own
    # With a device NCCL connects the group now; otherwise at first use, and once more for every
    # pair of ranks whose sends are not batched. If the default group also had a device, NCCL would
    # split this group off it, which needs all ranks of the world.
    device = torch.device("cuda", torch.cuda.current_device())
    return _new_group(ranks, options=options, device=device)


@contextmanager
def process_world(
    rank: int, world_size: int, device: torch.device, store: dist.Store | None = None
) -> Iterator[None]:
    """Initialise the default process group, gloo on CPU and NCCL on GPU, within the block.

    A single process uses a store in memory, and within a program that has such a world already
    shares it. Several use `store`, or with None the address that their launcher put into the
    environment. Raises RuntimeError for one process within a world of several.
    """
    if world_size == 1:
        with _world_of_one():
            yield
        return
    backend = "nccl" if device.type == "cuda" else "gloo"
    # no device_id: NCCL then never connects the default group, which nothing uses
    dist.init_process_group(
        backend,
        rank=rank,
        world_size=world_size,
        timeout=TIMEOUT,
        store=store,
    )
    try:
        yield
    except BaseException:
        if backend == "gloo":  # destroying NCCL's would wait for work that others never finish
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


@contextmanager
def _world_of_one() -> Iterator[None]:
    """Have a default process group of this process alone within the block: a new one, or that of a
    loaded model or of the caller, who may leave in any order.
    """
    if not dist.is_initialized():
        # gloo: NCCL's communicator would take GPU memory to send nothing
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        default_store().set(USES, "0")
    elif dist.get_world_size() > 1:
        ranks = dist.get_world_size()
        raise RuntimeError(f"torch.distributed connects this process with {ranks - 1} others")
    store = default_store()
    ours = store.check([USES])
    if ours:
        store.add(USES, 1)
    try:
        yield
    finally:
        if ours and store.add(USES, -1) == 0:
            dist.destroy_process_group()
