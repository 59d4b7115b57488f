"""Static buffers: memory with a fixed address that graphs read, outside their pools."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

Buffer = Callable[[Tensor], Tensor]  # returns static memory for a tensor like the argument


@dataclass(slots=True)
class StaticMemory:
    """Static tensors by purpose, outside all pools."""

    held: dict[tuple[Hashable, ...], Tensor] = field(default_factory=dict)
    # bytes of static memory that a library holds for its graphs, by purpose
    elsewhere: dict[Hashable, int] = field(default_factory=dict)

    def buffer(self, *purpose: Hashable) -> Buffer:
        """Return the buffer of a purpose; tensors of equal shape and type share its memory."""
        return partial(self._take, purpose)

    def _take(self, purpose: tuple[Hashable, ...], like: Tensor) -> Tensor:
        key = (*purpose, like.shape, like.dtype)
        if key not in self.held:
            self.held[key] = torch.empty_like(like, memory_format=torch.contiguous_format)
        return self.held[key]

    @property
    def bytes(self) -> int:
        """Bytes of all buffers, those of libraries included."""
        given = sum(tensor.nbytes for tensor in self.held.values())
        return given + sum(self.elsewhere.values())
