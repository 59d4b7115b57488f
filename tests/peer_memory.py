"""Symmetric memory without GPUs: processes map one file, and half of the ranks are as late as they
can be.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from torch import Tensor

from app.kernels.clones.meeting import Arrivals
from app.moe.clones import peer

SIZE = 1 << 20  # bytes of each rank
DONE = 1 << 30  # barriers to which a rank that has left will have come


@dataclass(frozen=True)
class Handle:
    """Stand-in for a rendezvous: every rank's memory, and a barrier after which odd ranks lag.

    Odd ranks wait until the even ones have done all their work up to the next barrier.
    """

    buffer_ptrs: list[int]
    rank: int
    arrivals_P: Tensor  # how often each rank has come to a barrier, shared

    def barrier(self, channel: int) -> None:
        """Wait for all ranks."""
        assert channel == 0
        self.late(dist.barrier)

    def late(self, meet: Callable[[], None]) -> None:
        """Run `meet`, which synchronizes all ranks, and then delay odd ranks."""
        self.arrivals_P[self.rank] += 1
        meet()
        while self.rank % 2 and self.arrivals_P[::2].min() <= self.arrivals_P[self.rank]:
            time.sleep(0.001)

    def leave(self) -> None:
        """Nobody waits for this rank any more."""
        self.arrivals_P[self.rank] = DONE


def share_memory(file: Path, rank: int, ranks: int) -> Handle:
    """Symmetric memory is taken from a `file` that all ranks map."""
    memory = map_shared(file, ranks * (SIZE + 8))
    own = memory[rank * SIZE : (rank + 1) * SIZE]
    bases = [memory.data_ptr() + r * SIZE for r in range(ranks)]
    handle = Handle(bases, rank, memory[ranks * SIZE :].view(torch.int64))

    def empty(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        assert size <= SIZE and dtype == torch.uint8 and device.type == "cpu"
        return own[:size]

    def rendezvous(tensor: Tensor, _group: dist.ProcessGroup) -> Handle:
        assert tensor.data_ptr() == own.data_ptr()
        return handle

    meet_if, all_gather_counts = peer.meet_if, peer.all_gather_counts

    def meet_late(needed_S: Tensor, arrivals: Arrivals) -> None:
        meet = partial(meet_if, needed_S, arrivals)
        handle.late(meet) if needed_S.any() else meet()

    def exchange_late(*given: Any) -> None:
        handle.late(partial(all_gather_counts, *given))

    symmetric.empty, symmetric.rendezvous = empty, rendezvous  # in this process, which ends soon
    peer.meet_if, peer.all_gather_counts = meet_late, exchange_late
    return handle


def map_shared(file: Path, size: int) -> Tensor:
    """Return `size` bytes of a file, zeros at first, that several processes read and write."""
    with file.open("ab") as opened:
        opened.truncate(size)  # another rank may have done it
    with file.open("r+b") as opened:
        return torch.frombuffer(mmap.mmap(opened.fileno(), size), dtype=torch.uint8)
