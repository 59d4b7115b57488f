"""Data-parallel replicas share a batch: each takes a part of its sequences.

They go through the same forwards, as long as each other's, since experts may lie on all of them.

Shapes: B sequences of a replica.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from app.engine.groups import Groups

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Replicas:
    """Those of a layout, as one of their ranks sees them."""

    groups: Groups
    each: int  # sequences of a replica: B

    @property
    def together(self) -> int:
        """Sequences of all replicas."""
        return self.each * self.groups.layout.dp

    @property
    def first(self) -> int:
        """Number of this replica's first sequence among all."""
        return self.each * self.groups.dp_rank

    def own(self, batch: Sequence[T]) -> Sequence[T]:
        """This replica's part of what all have."""
        assert len(batch) == self.together, "a batch is full"
        return batch[self.first : self.first + self.each]

    def gathered(self, own_B: Tensor) -> Tensor:
        """What all replicas have of each sequence, on every rank's CPU: `own_B` of their first
        ranks, in order. All ranks call it.
        """
        said_B = own_B.cpu()
        if self.groups.layout.dp == 1:
            if self.groups.host.size() > 1:
                dist.broadcast(said_B, src=0, group=self.groups.host)
            return said_B
        found = [torch.empty_like(said_B) for _ in range(self.groups.host.size())]
        dist.all_gather(found, said_B, group=self.groups.host)
        firsts = self.groups.layout.groups("dp")[0]  # of rank 0
        return torch.cat([found[rank] for rank in firsts])
