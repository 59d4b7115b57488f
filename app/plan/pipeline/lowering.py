"""Lowering of compute lists to full action lists: passes over the lists, each list -> list.

A pass only inserts, so the compute order of `schedule` survives and `signed_order` of both lists is
equal. Another way of moving tensors is another lowering of the same lists, never a branch in the
executor.
"""

from __future__ import annotations

from collections.abc import Sequence

from app.plan.actions import (
    Action,
    Backward,
    BackwardWeight,
    Compute,
    Exchange,
    Forward,
    Free,
    GatherParams,
    ReduceGrads,
    Wait,
)
from app.plan.pipeline.exchanges import add_exchanges, add_frees


def add_reductions(actions: Sequence[Action]) -> list[Action]:
    """Insert ReduceGrads of a chunk after the backward that completes its gradients.

    That is the chunk's last Backward (BackwardWeight if split). An exchange at that place goes
    first: another rank waits.
    """
    last = {
        action.chunk: place
        for place, action in enumerate(actions)
        if isinstance(action, Backward | BackwardWeight)
    }
    completes = {place: chunk for chunk, place in last.items()}
    lowered: list[Action] = []
    due: list[int] = []
    for place, action in enumerate(actions):
        if not isinstance(action, Exchange):
            lowered += map(ReduceGrads, due)
            due = []
        lowered.append(action)
        if place in completes:
            due.append(completes[place])
    return [*lowered, *map(ReduceGrads, due)]


def add_gathers(actions: Sequence[Action]) -> list[Action]:
    """Insert GatherParams of a chunk before its first Forward and the waits that precede it."""
    gathered: set[int] = set()
    lowered: list[Action] = []
    for action in actions:
        if isinstance(action, Forward) and action.chunk not in gathered:
            gathered.add(action.chunk)
            place = len(lowered)
            while place and isinstance(lowered[place - 1], Wait | Free):
                place -= 1
            lowered.insert(place, GatherParams(action.chunk))
        lowered.append(action)
    return lowered


def lower(actions: Sequence[Action]) -> list[Action]:
    """Add freeing, reducing and gathering to one rank's actions."""
    return add_gathers(add_reductions(add_frees(actions)))


def lower_all(
    schedule: Sequence[Sequence[Compute]],
    overlap: bool = True,
    v_shape: bool = False,
) -> list[list[Action]]:
    """Return all actions of every pipeline rank in a step; schedule[rank] is from build_schedule.

    overlap: exchanges run beside compute; otherwise each is waited for at once. v_shape: placement
    of stages on ranks, see Pipeline.

    Raises ValueError if the lists wait for each other in a circle. `check` proves the result.
    """
    exchanged = add_exchanges(schedule, overlap, v_shape)
    return [lower(actions) for actions in exchanged]
