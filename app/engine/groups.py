"""Process groups of a rank: the only side effect of a layout.

One communicator per purpose, so that a gradient reduction never queues in front of an exchange of tokens.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

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
    data: dist.ProcessGroup  # counts over the ranks that see different data
    dp: dist.ProcessGroup  # gradients and parameters of dense layers
    edp: dist.ProcessGroup  # gradients and parameters of experts
    ep: dist.ProcessGroup  # exchange of tokens with experts

    @property
    def dp_rank(self) -> int:
        """Which data-parallel replica this rank belongs to."""
        return self.layout.coords(self.rank)["dp"]

    @property
    def ep_rank(self) -> int:
        """Which share of the experts this rank holds."""
        return self.layout.coords(self.rank, expert=True)["ep"]

    def barrier(self) -> None:
        """Wait for every rank."""
        if self.host.size() > 1:
            dist.barrier(self.host)


def create_groups(layout: ParallelLayout, rank: int) -> Groups:
    """Create every group of the layout; all ranks must call it, in the world of an initialised default group."""
    return Groups(
        layout=layout,
        rank=rank,
        host=dist.new_group(backend="gloo", timeout=HOST_TIMEOUT),
        world=dist.new_group(timeout=TIMEOUT),
        data=_own_group(layout.groups("dp"), rank),
        dp=_own_group(layout.groups("dp"), rank),
        edp=_own_group(layout.groups("edp", expert=True), rank),
        ep=_own_group(layout.groups("ep", expert=True), rank),
    )


def _own_group(groups: list[list[int]], rank: int) -> dist.ProcessGroup:
    # Every rank takes part in creating every group, in the same order.
    handles = [dist.new_group(ranks, timeout=TIMEOUT) for ranks in groups]
    return next(handle for handle, ranks in zip(handles, groups, strict=True) if rank in ranks)


@contextmanager
def process_world(rank: int, world_size: int, device: torch.device) -> Iterator[None]:
    """The default process group, gloo on CPU and NCCL on GPU, for the length of the block.

    A single process meets itself in memory; several meet at the address their launcher put into the environment.
    """
    backend = "nccl" if device.type == "cuda" else "gloo"
    options = {"device_id": device} if device.type == "cuda" else {}
    if world_size == 1:
        options["store"] = dist.HashStore()
    dist.init_process_group(backend, rank=rank, world_size=world_size, timeout=TIMEOUT, **options)
    try:
        yield
    finally:
        dist.destroy_process_group()
