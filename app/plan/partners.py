"""Partner of each rank: who holds a copy of its optimizer shard (`checkpoint.memory_every`).

A node has `per_node` consecutive ranks. Ranks are shifted by a whole node, so that the partner is
on another node and every rank holds the copy of exactly one other:

    8 ranks, 4 per node:  0 1 2 3 | 4 5 6 7  →  4 5 6 7 | 0 1 2 3

On one node the shift is one rank: the copy survives the death of a process, not of the node.
"""

from __future__ import annotations


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
