"""The table of `ParamGather`, cell by cell."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from app.optim import param_gather
from app.optim.adam import AdamShard
from app.optim.buffers import FlatBuffer, ParamSpec
from app.optim.param_gather import ParamGather
from app.plan.sharding.reshard import Block
from app.plan.shards import buffer_layout
from tests.distributed import run_distributed

SIZE = 8
GATHERED, STALE, IN_FLIGHT = "gathered", "stale", "in flight"


def recorded(gather: ParamGather, shard: AdamShard) -> None:
    """Work that a recording is made of."""
    with gather.in_graph(updates=False):
        gather.start(shard)
        gather.ensure_gathered(shard)


def recorded_update(gather: ParamGather, shard: AdamShard) -> None:
    """Do the same with an update at the end of the graph: none of its gathers starts there."""
    with gather.in_graph(updates=True):
        gather.start(shard)
        gather.ensure_gathered(shard)
        gather.wait(shard)
        gather.updated(shard)


EVENTS: dict[str, Callable[[ParamGather, AdamShard], None]] = {
    "wait": ParamGather.wait,
    "updated": ParamGather.updated,
    "start": ParamGather.start,
    "ensure_gathered": ParamGather.ensure_gathered,
    "gate": lambda gather, shard: gather.gate([shard.buffer.specs[0].param])(),
    "recorded": recorded,
    "recorded update": recorded_update,
}
BUG = "bug"
# state, whether gathers start at the update -> events that lead there
WAYS: dict[tuple[str, bool], list[str]] = {
    (GATHERED, True): [],
    (GATHERED, False): [],
    (STALE, False): ["updated"],
    (IN_FLIGHT, True): ["updated"],
    (IN_FLIGHT, False): ["updated", "start"],
}
# state, whether gathers start at the update, event -> state after it, all-gathers it starts
TABLE = {
    **{(GATHERED, early, "start"): (GATHERED, 0) for early in (True, False)},
    **{(GATHERED, early, "recorded"): (GATHERED, 1) for early in (True, False)},
    **{(state, False, "recorded update"): (STALE, 1) for state in (GATHERED, STALE)},
    (IN_FLIGHT, False, "recorded update"): BUG,
    **{(IN_FLIGHT, early, "start"): (IN_FLIGHT, 0) for early in (True, False)},
    **{(IN_FLIGHT, early, "recorded"): BUG for early in (True, False)},
    (STALE, False, "start"): (IN_FLIGHT, 1),
    (STALE, False, "recorded"): (GATHERED, 1),
    (IN_FLIGHT, False, "wait"): (GATHERED, 0),
    (IN_FLIGHT, False, "updated"): BUG,
    (IN_FLIGHT, False, "ensure_gathered"): (GATHERED, 0),
    (GATHERED, True, "wait"): (GATHERED, 0),
    (GATHERED, False, "wait"): (GATHERED, 0),
    (STALE, False, "wait"): (STALE, 0),
    (IN_FLIGHT, True, "wait"): (GATHERED, 0),
    (GATHERED, True, "updated"): (IN_FLIGHT, 1),
    (GATHERED, True, "ensure_gathered"): (GATHERED, 0),
    (GATHERED, False, "updated"): (STALE, 0),
    (GATHERED, False, "ensure_gathered"): (GATHERED, 0),
    (STALE, False, "updated"): (STALE, 0),
    (STALE, False, "ensure_gathered"): (GATHERED, 1),
    (IN_FLIGHT, True, "updated"): BUG,
    (IN_FLIGHT, True, "ensure_gathered"): (GATHERED, 0),
}


def cells(world: int) -> list[tuple[str, bool, str]]:
    """States, whether gathers start at the update, and events that there are in them.

    Nothing is in flight over a single rank.
    """
    return [
        (state, early, event)
        for (state, early), event in itertools.product(WAYS, EVENTS)
        if not (early and event == "recorded update") and not (world == 1 and state == IN_FLIGHT)
    ]


def shard_of() -> AdamShard:
    """A bucket with one parameter."""
    param = nn.Parameter(torch.zeros(SIZE))
    spec = ParamSpec("p", param, False, decay=False, block=Block.whole(SIZE))
    layout = buffer_layout([SIZE], dist.get_world_size())
    return AdamShard(FlatBuffer([spec], layout, torch.float32), 0, dist.group.WORLD)


def state_of(gather: ParamGather, shard: AdamShard) -> str:
    if shard in gather._stale:
        return STALE
    return IN_FLIGHT if shard in gather._in_flight else GATHERED


def outcomes(rank: int) -> dict[tuple[str, bool, str], Any]:
    """Apply every event in every state, and check parameters that count as gathered."""
    found: dict[tuple[str, bool, str], Any] = {}
    gathered: list[int] = []
    all_gather = param_gather.all_gather
    # this process is about to end
    param_gather.all_gather = lambda *given, **options: (
        gathered.append(0) or all_gather(*given, **options)
    )
    for state, at_update, event in cells(dist.get_world_size()):
        way = WAYS[state, at_update]
        shard = shard_of()
        gather = ParamGather([shard], at_update)
        shard.own_params.fill_(rank + 1)
        for before in way:
            EVENTS[before](gather, shard)
        assert state_of(gather, shard) == state
        gathered.clear()
        changes = event == "updated" and state != IN_FLIGHT
        if changes:
            shard.own_params.fill_(rank + 11)
        try:
            EVENTS[event](gather, shard)
            found[state, at_update, event] = state_of(gather, shard), len(gathered)
        except AssertionError:
            found[state, at_update, event] = BUG
        gather.ensure_gathered(shard)
        if way or changes:
            first = 11 if changes else 1
            values = shard.params.view(dist.get_world_size(), -1)
            for other, part in enumerate(values):
                assert set(part.tolist()) == {first + other}
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_every_event_in_every_state(world: int):
    for found in run_distributed(outcomes, world):
        assert list(found) == cells(world)
        for (state, at_update, event), outcome in found.items():
            expected = TABLE[state, at_update, "ensure_gathered" if event == "gate" else event]
            if world == 1 and expected == (IN_FLIGHT, 1):
                expected = (GATHERED, 1)
            assert outcome == expected, (state, at_update, event)


def unwaited(rank: int) -> list[str]:
    gather = ParamGather([shard := shard_of()], at_update=False)
    with (
        pytest.raises(AssertionError, match="must wait for the all-gathers"),
        gather.in_graph(False),
    ):
        gather.start(shard)
    gather.ensure_gathered(shard)
    states = []
    for updates in (False, True):
        with gather.in_graph(updates):  # a replay: its kernels gather, and nothing here does
            pass
        states.append(state_of(gather, shard))
    return states


def test_what_a_recording_starts_it_waits_for():
    assert run_distributed(unwaited, 2) == [[GATHERED, STALE]] * 2
