"""From what one rank computes to everything it does: passes over its list, each list -> list.

A pass only inserts, so the compute order of `schedule` survives and `signed_order` of both lists is equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from app.plan.schedule import Action, Backward, BackwardWeight, Forward, GatherParams, ReduceGrads

Pass = Callable[[Sequence[Action]], list[Action]]


def add_reductions(actions: Sequence[Action]) -> list[Action]:
    """ReduceGrads of a chunk right after the action that completes its gradients over all microbatches.

    That is the chunk's last Backward, or its last BackwardWeight where backward is split.
    """
    completes = {action.chunk: place for place, action in enumerate(actions) if isinstance(action, Backward | BackwardWeight)}
    lowered: list[Action] = []
    for place, action in enumerate(actions):
        lowered.append(action)
        if completes.get(action.chunk) == place:
            lowered.append(ReduceGrads(action.chunk))
    return lowered


def add_gathers(actions: Sequence[Action]) -> list[Action]:
    """GatherParams of a chunk right before its first Forward."""
    gathered: set[int] = set()
    lowered: list[Action] = []
    for action in actions:
        if isinstance(action, Forward) and action.chunk not in gathered:
            gathered.add(action.chunk)
            lowered.append(GatherParams(action.chunk))
        lowered.append(action)
    return lowered


PASSES: tuple[Pass, ...] = (add_reductions, add_gathers)


def lower(actions: Sequence[Action]) -> list[Action]:
    """One rank's compute actions with gradient reduction and parameter gathering added."""
    lowered = list(actions)
    for apply in PASSES:
        lowered = apply(lowered)
    return lowered
