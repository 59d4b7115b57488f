"""Memory of the host in blocks that stay, for tensors of any size."""

from __future__ import annotations

from bisect import bisect, insort
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor

ALIGNED = 512  # bytes
SMALLEST, LARGEST = 1 << 26, 1 << 30  # bytes of a block, unless a tensor has more

Part = tuple[int, int, int]  # of a block: its number, first byte, and the byte after the last


@dataclass(slots=True)
class HostMemory:
    """Blocks of host memory, pinned for a GPU, of which parts are taken and given back.

    Torch rounds a pinned allocation up to a power of two, so blocks are as large. The smallest
    free part that is large enough is taken, and what is given back joins its neighbors: a block is
    made only if no free part is large enough. None is freed, as graphs hold addresses.
    """

    device: torch.device  # whose copies it serves
    blocks: list[Tensor] = field(default_factory=list)  # uint8
    free: list[Part] = field(default_factory=list)  # sorted, with bytes in use between them
    pinned: int = 0  # bytes of all blocks
    used: int = 0  # bytes of the parts in use
    most: int = 0  # the largest number of them

    def take(self, size: int) -> Part:
        """Return a part of at least so many bytes; raises RuntimeError without memory."""
        size = -(-size // ALIGNED) * ALIGNED
        fit = min(
            (each for each in self.free if each[2] - each[1] >= size),
            key=lambda each: each[2] - each[1],
            default=None,
        )
        block, start, end = fit or self._more(size)
        self.free.remove((block, start, end))
        if start + size < end:
            insort(self.free, (block, start + size, end))
        self.used += size
        self.most = max(self.most, self.used)
        return block, start, start + size

    def give(self, part: Part) -> None:
        """Take a part back."""
        self.used -= part[2] - part[1]
        place = bisect(self.free, part)
        block, start, end = part
        if place < len(self.free) and self.free[place][0] == block:
            assert end <= self.free[place][1], "it was in use"
            if end == self.free[place][1]:
                end = self.free.pop(place)[2]
        if place and self.free[place - 1][0] == block:
            assert self.free[place - 1][2] <= start, "it was in use"
            if self.free[place - 1][2] == start:
                start = self.free.pop(place - 1)[1]
        insort(self.free, (block, start, end))

    def clear(self) -> None:
        """Take all parts back."""
        self.free = [(number, 0, len(block)) for number, block in enumerate(self.blocks)]
        self.used = 0

    def of(self, part: Part, like: Tensor) -> Tensor:
        """Return a part's memory as a flat tensor of this type and number of elements."""
        block, start, _ = part
        return self.blocks[block][start : start + like.nbytes].view(like.dtype)

    def block_for(self, size: int) -> int:
        """Return the bytes of the next block, which a part of this size makes necessary."""
        return 1 << (max(size, min(LARGEST, max(SMALLEST, self.pinned))) - 1).bit_length()

    def _more(self, size: int) -> Part:
        """Make a block of at least this size."""
        size = self.block_for(size)

        def allocate() -> Tensor:
            if self.device.type != "cuda":
                return torch.empty(size, dtype=torch.uint8)
            torch.cuda.set_device(self.device)
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)

        # A capture forbids its own thread to allocate, and would own the memory; meters of device
        # memory watch that thread too.
        with ThreadPoolExecutor(1) as other:
            self.blocks.append(other.submit(allocate).result())
        self.pinned += size
        made = len(self.blocks) - 1, 0, size
        self.free.append(made)
        return made
