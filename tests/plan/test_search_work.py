"""Searches for layouts repeat no work: values are shared, ranks that decide nothing left out."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from app.advice.trials import Trials
from app.config import Run
from app.plan.cost import step_time, times
from app.plan.cost.part_times import PartTimes
from app.plan.memory import rank_memory
from app.plan.pipeline.known import work_left
from app.plan.schedule import build_schedule
from app.planner.plan import Plan
from tests.config import load

PIPELINE = (
    "+experiment=small", "model=llama3_8b", "hardware=h200", "model.num_layers=16",
    "parallel.world_size=8", "parallel.pp=8", "train.global_batch=32", "train.micro_batch=1",
    "train.seq_len=2048",
)  # fmt: skip


def counted(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[object]:
    """Count the calls of a function by its first argument."""
    calls: list[object] = []
    before: Callable[..., Any] = getattr(owner, name)

    def call(first: object, *others: Any, **named: Any) -> Any:
        calls.append(first)
        return before(first, *others, **named)

    monkeypatch.setattr(owner, name, call)
    return calls


def test_ranks_behind_one_without_room_are_not_planned(monkeypatch: pytest.MonkeyPatch):
    run = load(*PIPELINE)
    most = Trials(0).memory(run)
    assert Trials(most).fits(run) and not Trials(most - 1).fits(run)
    ranks = counted(monkeypatch, rank_memory._Rank, "parts")
    assert not Trials(most - 1).fits(run)
    assert [rank.rank for rank in ranks] == [0]  # the first has most microbatches in flight
    assert Trials(most).fits(run) and len(ranks) == 1 + 8


def test_equal_stages_and_ranks_are_timed_once(monkeypatch: pytest.MonkeyPatch):
    plan = Plan(load(*PIPELINE))
    tails = counted(monkeypatch, step_time, "_rank_tail")
    waits = counted(monkeypatch, PartTimes, "hosted")
    assert plan.step_seconds > 0
    assert len({id(each) for each in plan.stage_times}) == len(waits) == 3  # first, last, others
    assert len(tails) == 3
    middle = plan.stage_times[1:-1]
    assert all(each is middle[0] for each in middle)


def test_parts_of_other_schedules_are_not_traced_again(monkeypatch: pytest.MonkeyPatch):
    trials = Trials(10**12)
    trials.seconds(load(*PIPELINE))
    parts = counted(monkeypatch, times._Clock, "part")
    trials.seconds(load(*PIPELINE, "schedule=gpipe"))
    trials.seconds(load(*PIPELINE, "parallel.vpp=2"))
    assert parts == []
    trials.seconds(load(*PIPELINE, "recompute=full"))
    assert len(parts) == 3  # embedding, layer, head


@pytest.mark.parametrize("name", ["zero_bubble_h1", "zero_bubble_v"])
def test_work_after_last_weight_gradients_is_counted(name: str):
    chunks = 2 if name == "zero_bubble_v" else 1
    for actions in build_schedule(name, 4, 8, num_chunks=chunks):
        left = work_left(actions)
        assert set(left) == set(range(chunks))
        for chunk, work in left.items():
            place = max(
                place
                for place, action in enumerate(actions)
                if action.letter == "W" and action.chunk == chunk
            )
            assert work == Counter((each.letter, each.chunk) for each in actions[place + 1 :])
    assert all(work_left(actions) == {} for actions in build_schedule("1f1b", 4, 8))


def test_hashes_are_kept_but_not_pickled():
    run, same = load(*PIPELINE), load(*PIPELINE)
    assert run == same and hash(run) == hash(same) and "_hash" in run.__dict__
    assert Plan(run).stages is Plan(run).stages and run.derived
    again = pickle.loads(pickle.dumps(run))
    assert again == run and hash(again) == hash(run)
    assert "_hash" not in pickle.loads(pickle.dumps(run)).__dict__
    assert not pickle.loads(pickle.dumps(run)).derived
    other: Run = load(*PIPELINE, "train.micro_batch=2")
    assert other != run and hash(other) != hash(run)
