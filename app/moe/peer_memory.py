"""Symmetric memory: buffers that all GPUs of a node can read and write over NVLink.

Shapes: P ranks of the group.
"""

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
    """Shape and dtype of a buffer that a rank keeps for others to read or write."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    parted: bool  # the first dimension has one part per rank, which that rank writes

    @property
    def bytes(self) -> int:
        """Bytes of the values."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def space(self) -> int:
        """Bytes including the padding to the alignment."""
        return -(-self.bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class Buffer:
    """Buffer that every rank of the group has, with the addresses of the others'."""

    own: Tensor
    addresses_P: Tensor  # int64, on the device: each rank's buffer, or this rank's part of it


class PeerMemory:
    """One buffer per layout, equal on all P ranks of the group. Creating it is collective.

    Needs GPUs with peer access. All ranks call the same barriers, from one stream or from streams
    that wait for each other.
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
        """Make what ranks have written before visible to all ranks after it."""
        self._handle.barrier(channel=0)
