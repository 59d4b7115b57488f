"""Memory with a fixed place that graphs read, outside of their pools."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

Buffer = Callable[[Tensor], Tensor]  # gives memory for a tensor like this one


@dataclass(slots=True)
class StaticMemory:
    """Static tensors by what they are for; outside of all pools."""

    held: dict[tuple[Hashable, ...], Tensor] = field(default_factory=dict)
    # bytes of what others hold for graphs, by what it is for
    elsewhere: dict[Hashable, int] = field(default_factory=dict)

    def buffer(self, *purpose: Hashable) -> Buffer:
        """What gives memory for a purpose: the same for tensors of one shape and type."""
        return partial(self._take, purpose)

    def _take(self, purpose: tuple[Hashable, ...], like: Tensor) -> Tensor:
        key = (*purpose, like.shape, like.dtype)
        if key not in self.held:
            self.held[key] = torch.empty_like(like, memory_format=torch.contiguous_format)
        return self.held[key]

    @property
    def bytes(self) -> int:
        """Bytes of all buffers given out, and of those elsewhere."""
        given = sum(tensor.nbytes for tensor in self.held.values())
        return given + sum(self.elsewhere.values())
