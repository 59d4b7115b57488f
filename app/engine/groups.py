"""Process groups of a rank: the only side effect of a layout.

One communicator per purpose, so that a gradient reduction never queues in front of an exchange of tokens.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from app.choices import CpComm
from app.model.peers import Peers
from app.plan.blocks import Place
from app.plan.layout import ParallelLayout

TIMEOUT = datetime.timedelta(minutes=10)  # a collective that takes longer is taken for a hang
HOST_TIMEOUT = datetime.timedelta(hours=4)  # rank 0 may prepare a corpus or check a checkpoint while the others wait


@dataclass(frozen=True, slots=True)
class Groups:
    """This rank's communicators and its place in them."""

    layout: ParallelLayout
    rank: int  # global rank
    host: dist.ProcessGroup  # agreement between hosts, over gloo: folders, files, errors
    world: dist.ProcessGroup  # control: norms, flags, losses
    data: dist.ProcessGroup  # counts over the ranks that see different sequences
    tokens: dist.ProcessGroup  # counts over the ranks that have different tokens of the same layers
    microbatch: dist.ProcessGroup  # counts over those of them that have tokens of the same sequences
    tp: dist.ProcessGroup  # hidden states between the parts of a matrix, and what these ranks hold whole
    cp: dist.ProcessGroup  # keys and values, or heads, of the parts of a sequence
    dp: dist.ProcessGroup  # gradients and parameters of dense layers, over data- and context-parallel ranks
    edp: dist.ProcessGroup  # gradients and parameters of experts
    ep: dist.ProcessGroup  # exchange of tokens with experts, and with all parts of each
    pp: dist.ProcessGroup  # hidden states and their gradients between pipeline ranks
    stages: dist.ProcessGroup  # small facts about all stages of a pipeline
    embedding: dist.ProcessGroup | None  # first and last pipeline rank, for tied embeddings; None on those between

    @property
    def dp_rank(self) -> int:
        """Which data-parallel replica this rank belongs to."""
        return self.layout.coords(self.rank)["dp"]

    @property
    def pp_rank(self) -> int:
        """Which pipeline rank this is."""
        return self.layout.coords(self.rank)["pp"]

    @property
    def cp_rank(self) -> int:
        """Which part of every sequence this rank has."""
        return self.layout.coords(self.rank)["cp"]

    @property
    def place(self) -> Place:
        """Where this rank is on the axes that cut parameters."""
        return Place.of(self.layout, self.rank)

    def peers(self, cp_comm_type: CpComm) -> Peers:
        """The ranks that this one computes its layers with."""
        (ep_rank, ep), (etp_rank, etp) = self.place.ep, self.place.etp
        groups = self.tp, self.cp, cp_comm_type, self.microbatch, self.tokens, self.ep
        return Peers(*groups, ep=ep, ep_rank=ep_rank, etp=etp, etp_rank=etp_rank)

    def barrier(self) -> None:
        """Wait for every rank."""
        if self.host.size() > 1:
            dist.barrier(self.host)


def _control_options() -> dict[str, Any]:
    # Small sums need one channel: 24 MiB of GPU memory instead of 670, measured on an H200 with NCCL 2.28.
    if dist.get_backend() != "nccl":
        return {}
    options = dist.ProcessGroupNCCL.Options()
    options.config.min_ctas = options.config.max_ctas = 1
    return {"pg_options": options}


def create_groups(layout: ParallelLayout, rank: int) -> Groups:
    """Create every group of the layout; all ranks must call it, in the world of an initialised default group.

    In a world of the "fake" backend this is a dry run of one rank: nothing is sent to anybody.
    """
    control = _control_options()
    return Groups(
        layout=layout,
        rank=rank,
        host=dist.new_group(backend="fake" if dist.get_backend() == "fake" else "gloo", timeout=HOST_TIMEOUT),
        world=dist.new_group(timeout=TIMEOUT, **control),
        data=_own_group(layout.groups("dp"), rank, **control),
        tokens=_own_group(layout.groups("tp", "cp", "dp"), rank, **control),
        microbatch=_own_group(layout.groups("tp", "cp"), rank, **control),
        tp=_own_group(layout.groups("tp"), rank),
        cp=_own_group(layout.groups("cp"), rank),
        dp=_own_group(layout.groups("dp", "cp"), rank),
        edp=_own_group(layout.groups("edp", expert=True), rank),
        ep=_own_group(layout.groups("etp", "ep", expert=True), rank),
        pp=_own_group(layout.groups("pp"), rank),
        stages=_own_group(layout.groups("pp"), rank, **control),
        embedding=_own_group(layout.embedding_groups(), rank),
    )


def _own_group(groups: list[list[int]], rank: int, **options: Any) -> Any:
    # Every rank takes part in creating every group, in the same order. A group of one has nothing to send, and an NCCL
    # communicator would still take 390 MiB for it.
    alone = {} if dist.get_backend() == "fake" else {"backend": "gloo"}
    handles = [dist.new_group(ranks, timeout=TIMEOUT, **(options if len(ranks) > 1 else alone)) for ranks in groups]
    return next((handle for handle, ranks in zip(handles, groups, strict=True) if rank in ranks), None)


@contextmanager
def process_world(rank: int, world_size: int, device: torch.device, store: dist.Store | None = None) -> Iterator[None]:
    """The default process group, gloo on CPU and NCCL on GPU, for the length of the block.

    A single process meets itself in memory; several meet in `store`, for None at the address their launcher put into the
    environment.
    """
    backend = "nccl" if device.type == "cuda" and world_size > 1 else "gloo"  # one process has nothing to send
    options = {"device_id": device} if backend == "nccl" else {}
    if world_size == 1:
        options["store"] = dist.HashStore()
    elif store is not None:
        options["store"] = store
    dist.init_process_group(backend, rank=rank, world_size=world_size, timeout=TIMEOUT, **options)
    try:
        yield
    except BaseException:
        if backend == "gloo":  # destroying NCCL's would wait for what the other ranks never finish
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()
