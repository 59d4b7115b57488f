"""Block of a weight that a rank holds: for modules, the plan, checkpoints and initial weights.

A block is one range of rows or columns, if necessary of a global shape with one dimension more (see
`app.plan.sharding.reshard`). The weight's own record says which dimension each axis divides
(`app.plan.model`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from app.plan.layout import ParallelLayout
from app.plan.model.weight import Weight
from app.plan.sharding.reshard import Block


@dataclass(frozen=True, slots=True)
class ShardCoords:
    """Coordinates of a rank on the axes that divide weights, as (index, ranks)."""

    tp: tuple[int, int] = (0, 1)
    ep: tuple[int, int] = (0, 1)
    etp: tuple[int, int] = (0, 1)

    @classmethod
    def of(cls, layout: ParallelLayout, rank: int) -> ShardCoords:
        """Return the coordinates of global rank `rank`."""
        dense = layout.coords(rank)
        expert = layout.coords(rank, expert=True)
        return cls(
            (dense["tp"], layout.tp), (expert["ep"], layout.ep), (expert["etp"], layout.expert_tp)
        )

    def block(self, weight: Weight) -> Block:
        """Return this rank's block; its elements are those of its tensor, in the same order.

        Raises ValueError for a dimension that does not divide.
        """
        block = Block.whole(*weight.shape)
        for dim, index, parts in self._cuts(weight):
            block = block.cut(dim, parts, index)
        return block

    def shape(self, weight: Weight) -> tuple[int, ...]:
        """Return the shape of this rank's tensor."""
        sizes = list(weight.shape)
        for dim, _, parts in self._cuts(weight):
            sizes[dim] //= parts
        if weight.gate_up is not None:
            both = sizes.pop(weight.gate_up)
            sizes[weight.gate_up] *= both
        return tuple(sizes)

    def _cuts(self, weight: Weight) -> Iterator[tuple[int, int, int]]:
        """Yield (dimension, this rank's index, ranks) of every axis that divides the weight."""
        for dim, axis in ((weight.tp, self.tp), (weight.ep, self.ep), (weight.etp, self.etp)):
            if dim is not None:
                yield dim, *axis
