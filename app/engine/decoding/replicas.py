"""Split an inference batch over data-parallel replicas, each with a part of the sequences.

All run equally many forwards of equal width, since expert parallelism may span replicas.

Shapes: B sequences of a replica.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from app.engine.ranks.groups import Groups

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Replicas:
    """Replicas of a layout, seen from one rank."""

    groups: Groups
    each: int  # sequences per replica: B

    @property
    def together(self) -> int:
        """Sequences of all replicas."""
        return self.each * self.groups.layout.dp

    @property
    def first(self) -> int:
        """Index of this replica's first sequence among all."""
        return self.each * self.groups.dp_rank

    def own(self, batch: Sequence[T]) -> Sequence[T]:
        """Return this replica's part of a batch."""
        assert len(batch) == self.together, "a batch is full"
        return batch[self.first : self.first + self.each]

    def gathered(self, own_B: Tensor) -> Tensor:
        """Gather the values of all sequences, on every rank's CPU; all ranks call it.

        They are `own_B` of the first rank of each replica, in order.
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
