"""Partner of each rank: who holds a copy of its optimizer shard (`checkpoint.memory_every`), and
who repeats its computation (`train.replay_every`: `repeaters`).

A node has `per_node` consecutive ranks. Ranks are shifted by a whole node, so that the partner is
on another node and every rank holds the copy of exactly one other:

    8 ranks, 4 per node:  0 1 2 3 | 4 5 6 7  →  4 5 6 7 | 0 1 2 3

On one node the shift is one rank: the copy survives the death of a process, not of the node.
"""

from __future__ import annotations

from app.config import Run
from app.plan.layout import ParallelLayout


def shift_of(world_size: int, per_node: int) -> int | None:
    """Return how many ranks above a rank its partner is, modulo the world size.

    None: no shift works. A single rank has no partner; a last node with fewer ranks than the one
    other node cannot hold the copies of all of its ranks.
    """
    if world_size == 1:
        return None
    if world_size <= per_node:
        return 1
    return per_node if world_size >= 2 * per_node else None


def partners(world_size: int, per_node: int) -> tuple[int, ...] | None:
    """Return the partner of each rank, which is on another node if there are two; None: see
    `shift_of`.
    """
    shift = shift_of(world_size, per_node)
    if shift is None:
        return None
    return tuple((rank + shift) % world_size for rank in range(world_size))


def repeaters(run: Run, layout: ParallelLayout) -> tuple[int, ...] | None:
    """Return, for each rank, the one whose microbatches it can compute with the same bits: that of
    the nearest replica of data parallelism that holds the same weights, also of experts.

    None: there is no other replica, experts are spread over all, or each replica drops inputs of
    its own (`lora.dropout`).
    """
    if run.lora.dropout:
        return None
    experts = {tuple(group) for group in layout.groups("etp", "ep", expert=True)}
    for shift in range(1, layout.dp):
        other = [0] * layout.world_size
        for group in layout.groups("dp"):
            for place, rank in enumerate(group):
                other[rank] = group[(place + shift) % layout.dp]
        if all(tuple(other[rank] for rank in group) in experts for group in experts):
            return tuple(other)
    return None
