"""Memory of GPUs of one node that each of them can read and write over NVLink."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

ALIGNMENT = 256  # bytes at which buffers begin


@dataclass(frozen=True, slots=True)
class Layout:
    """Values that a rank keeps for others to read, or for others to write to."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    parted: bool  # the first dimension has a part for each rank, which that rank writes

    @property
    def bytes(self) -> int:
        """Of the values."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def space(self) -> int:
        """Bytes with what is left free behind them."""
        return -(-self.bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory that every rank of the group has, and can reach on the others."""

    own: Tensor
    addresses_P: Tensor  # int64, on the device: of each rank's; or of this rank's part of each


class PeerMemory:
    """A buffer for each layout, equal on all P ranks of the group. Creating it is collective.

    Needs GPUs that reach each other's memory. All ranks come to the same barriers, from one stream
    or from streams that wait for each other.
    """

    def __init__(
        self, group: dist.ProcessGroup, layouts: Sequence[Layout], device: torch.device
    ) -> None:
        import torch.distributed._symmetric_memory as symmetric  # not in every build of torch

        self.rank = group.rank()
        total = sum(layout.space for layout in layouts)
        self._memory = symmetric.empty(total, dtype=torch.uint8, device=device)
        self._handle = symmetric.rendezvous(self._memory, group)
        bases = self._handle.buffer_ptrs
        assert bases[self.rank] == self._memory.data_ptr()
        self.buffers: list[Buffer] = []
        start = 0
        for layout in layouts:
            self.buffers.append(self._buffer(layout, bases, start))
            start += layout.space

    def _buffer(self, layout: Layout, bases: list[int], start: int) -> Buffer:
        own = self._memory[start : start + layout.bytes].view(layout.dtype).view(layout.shape)
        mine = self.rank * layout.bytes // layout.shape[0] if layout.parted else 0
        addresses = [base + start + mine for base in bases]
        return Buffer(own, torch.tensor(addresses, dtype=torch.int64, device=own.device))

    def barrier(self) -> None:
        """What ranks have written before it can be read behind it."""
        self._handle.barrier(channel=0)
