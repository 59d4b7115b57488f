"""Which part of a global parameter a rank holds: for checkpoints, initial weights and tests.

A cut is one range of rows or columns, where need be in a global shape with one dimension more (see
`app.plan.sharding.reshard`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from app.plan.layout import ParallelLayout
from app.plan.sharding.reshard import Block

EXPERTS = ".experts."  # in the names of what routed experts have
ROWS = ("wqkv", "embedding", "head")
COLUMNS = ("wo", "w_down")


@dataclass(frozen=True, slots=True)
class ShardCoords:
    """Where a rank is on the axes that cut parameters, as (index, ranks)."""

    tp: tuple[int, int] = (0, 1)
    ep: tuple[int, int] = (0, 1)
    etp: tuple[int, int] = (0, 1)

    @classmethod
    def of(cls, layout: ParallelLayout, rank: int) -> ShardCoords:
        """The place of global rank `rank`."""
        dense = layout.coords(rank)
        expert = layout.coords(rank, expert=True)
        return cls(
            (dense["tp"], layout.tp), (expert["ep"], layout.ep), (expert["etp"], layout.expert_tp)
        )

    def block(self, name: str, shape: Sequence[int]) -> Block:
        """The block of parameter `name` that has `shape` on this rank; its sizes have as many
        elements, in the same order.
        """
        leaf, (index, parts) = name.rsplit(".", 1)[-1], self.tp
        if EXPERTS in name:
            return self._expert_block(leaf, *shape)
        if leaf in ROWS:
            return Block.whole(shape[0] * parts, shape[1]).cut(0, parts, index)
        if leaf in COLUMNS:
            return Block.whole(shape[0], shape[1] * parts).cut(1, parts, index)
        if leaf == "w_up":  # the gate's rows, then the up projection's
            return Block.whole(2, shape[0] // 2 * parts, shape[1]).cut(1, parts, index)
        return Block.whole(*shape)

    def _expert_block(self, leaf: str, experts: int, rows: int, columns: int) -> Block:
        (share, ep), (part, etp) = self.ep, self.etp
        if leaf == "w_up":  # columns: the gate's, then the up projection's
            return (
                Block.whole(experts * ep, rows, 2, columns // 2 * etp)
                .cut(0, ep, share)
                .cut(3, etp, part)
            )
        return Block.whole(experts * ep, rows * etp, columns).cut(0, ep, share).cut(1, etp, part)

    def shares(self, name: str) -> bool:
        """Whether all tensor-parallel ranks hold parameter `name` whole, and use it on their own
        tokens or heads only.
        """
        leaf = name.rsplit(".", 1)[-1]
        return EXPERTS not in name and leaf not in (*ROWS, *COLUMNS, "w_up")
