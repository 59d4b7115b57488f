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
WHOLE, STALE, ON_ITS_WAY = "whole", "stale", "on its way"


def recorded(gather: ParamGather, shard: AdamShard) -> None:
    """Work that a recording is made of."""
    with gather.in_graph(updates=False):
        gather.start(shard)
        gather.make_whole(shard)


def recorded_update(gather: ParamGather, shard: AdamShard) -> None:
    """Do the same with an update at the end of the graph: none of its gathers starts there."""
    with gather.in_graph(updates=True):
        gather.start(shard)
        gather.make_whole(shard)
        gather.settle(shard)
        gather.updated(shard)


EVENTS: dict[str, Callable[[ParamGather, AdamShard], None]] = {
    "settle": ParamGather.settle,
    "updated": ParamGather.updated,
    "start": ParamGather.start,
    "make_whole": ParamGather.make_whole,
    "gate": lambda gather, shard: gather.gate([shard.buffer.specs[0].param])(),
    "recorded": recorded,
    "recorded update": recorded_update,
}
BUG = "bug"
# state, whether gathers start at the update -> events that lead there
WAYS: dict[tuple[str, bool], list[str]] = {
    (WHOLE, True): [],
    (WHOLE, False): [],
    (STALE, False): ["updated"],
    (ON_ITS_WAY, True): ["updated"],
    (ON_ITS_WAY, False): ["updated", "start"],
}
# state, whether gathers start at the update, event -> state after it, all-gathers it starts
TABLE = {
    **{(WHOLE, early, "start"): (WHOLE, 0) for early in (True, False)},
    **{(WHOLE, early, "recorded"): (WHOLE, 1) for early in (True, False)},
    **{(state, False, "recorded update"): (STALE, 1) for state in (WHOLE, STALE)},
    (ON_ITS_WAY, False, "recorded update"): BUG,
    **{(ON_ITS_WAY, early, "start"): (ON_ITS_WAY, 0) for early in (True, False)},
    **{(ON_ITS_WAY, early, "recorded"): BUG for early in (True, False)},
    (STALE, False, "start"): (ON_ITS_WAY, 1),
    (STALE, False, "recorded"): (WHOLE, 1),
    (ON_ITS_WAY, False, "settle"): (WHOLE, 0),
    (ON_ITS_WAY, False, "updated"): BUG,
    (ON_ITS_WAY, False, "make_whole"): (WHOLE, 0),
    (WHOLE, True, "settle"): (WHOLE, 0),
    (WHOLE, False, "settle"): (WHOLE, 0),
    (STALE, False, "settle"): (STALE, 0),
    (ON_ITS_WAY, True, "settle"): (WHOLE, 0),
    (WHOLE, True, "updated"): (ON_ITS_WAY, 1),
    (WHOLE, True, "make_whole"): (WHOLE, 0),
    (WHOLE, False, "updated"): (STALE, 0),
    (WHOLE, False, "make_whole"): (WHOLE, 0),
    (STALE, False, "updated"): (STALE, 0),
    (STALE, False, "make_whole"): (WHOLE, 1),
    (ON_ITS_WAY, True, "updated"): BUG,
    (ON_ITS_WAY, True, "make_whole"): (WHOLE, 0),
}


def cells() -> list[tuple[str, bool, str]]:
    """States, whether gathers start at the update, and events that there are in them."""
    return [
        (state, early, event)
        for (state, early), event in itertools.product(WAYS, EVENTS)
        if not (early and event == "recorded update")
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
    return ON_ITS_WAY if shard in gather._on_its_way else WHOLE


def outcomes(rank: int) -> dict[tuple[str, bool, str], Any]:
    """Apply every event in every state, and check parameters that count as gathered."""
    found: dict[tuple[str, bool, str], Any] = {}
    gathered: list[int] = []
    all_gather = param_gather.all_gather
    # this process is about to end
    param_gather.all_gather = lambda *given, **options: (
        gathered.append(0) or all_gather(*given, **options)
    )
    for state, at_update, event in cells():
        way = WAYS[state, at_update]
        shard = shard_of()
        gather = ParamGather([shard], at_update)
        shard.own_params.fill_(rank + 1)
        for before in way:
            EVENTS[before](gather, shard)
        assert state_of(gather, shard) == state
        gathered.clear()
        changes = event == "updated" and state != ON_ITS_WAY
        if changes:
            shard.own_params.fill_(rank + 11)
        try:
            EVENTS[event](gather, shard)
            found[state, at_update, event] = state_of(gather, shard), len(gathered)
        except AssertionError:
            found[state, at_update, event] = BUG
        gather.make_whole(shard)
        if way or changes:
            first = 11 if changes else 1
            values = shard.params.view(dist.get_world_size(), -1)
            for other, part in enumerate(values):
                assert set(part.tolist()) == {first + other}
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_every_event_in_every_state(world: int, monkeypatch: pytest.MonkeyPatch):
    if world == 1:  # nothing is on its way over a single rank
        for early in (True, False):
            monkeypatch.delitem(WAYS, (ON_ITS_WAY, early))
    for found in run_distributed(outcomes, world):
        assert list(found) == cells()
        for (state, at_update, event), outcome in found.items():
            expected = TABLE[state, at_update, "make_whole" if event == "gate" else event]
            if world == 1 and expected == (ON_ITS_WAY, 1):
                expected = (WHOLE, 1)
            assert outcome == expected, (state, at_update, event)


def unwaited(rank: int) -> list[str]:
    gather = ParamGather([shard := shard_of()], at_update=False)
    with (
        pytest.raises(AssertionError, match="must wait for the all-gathers"),
        gather.in_graph(False),
    ):
        gather.start(shard)
    gather.make_whole(shard)
    states = []
    for updates in (False, True):
        with gather.in_graph(updates):  # a replay: its kernels gather, and nothing here does
            pass
        states.append(state_of(gather, shard))
    return states


def test_what_a_recording_starts_it_waits_for():
    assert run_distributed(unwaited, 2) == [[WHOLE, STALE]] * 2
