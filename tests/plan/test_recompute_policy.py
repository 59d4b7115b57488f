"""The recomputation policy is the one value that says what backward recomputes."""

from __future__ import annotations

import re
from collections.abc import Iterable

import pytest

from app.choices import Recompute
from app.config import ModelConfig, RecomputeConfig, Run
from app.plan.actions import Forward
from app.plan.recompute import (
    NOTHING,
    RankRecompute,
    RecomputeChoice,
    recompute_policy,
    spared_microbatches,
)
from app.plan.schedule import build_schedule
from tests.oracle import oracle
from tests.training import ROOT

# Megatron-Core 0.16.1
GOLDEN = oracle("schedule")
FLAGGED = [trace for trace in GOLDEN["full_traces"] if "ckpt_flag" in trace]
WHOLE = RecomputeChoice(whole_layers=True)


def on_rank(choice: RecomputeConfig, actions: Iterable[object]) -> RankRecompute:
    return recompute_policy(Run(ModelConfig(), recompute=choice)).on_rank(actions)


def name_of(case: dict) -> str:
    return "-".join(f"{key}{case[key]}" for key in ("pp", "vpp", "M", "N"))


@pytest.mark.parametrize("trace", FLAGGED, ids=name_of)
def test_recomputes_in_full_what_the_golden_traces_flag(trace: dict):
    chunks, group = (trace["vpp"], trace["N"]) if trace["vpp"] else (1, None)
    actions = build_schedule(
        "interleaved" if group else "1f1b",
        trace["pp"],
        trace["M"],
        num_chunks=chunks,
        group_size=group,
    )[trace["rank"]]
    partial = trace["opts"]["partial_ckpt"]
    found = on_rank(RecomputeConfig(full=True, partial_microbatches=partial), actions)
    forwards = [(action.mb, action.chunk) for action in actions if isinstance(action, Forward)]
    assert [found.of(place).whole_layers for place in forwards] == [
        bool(flag) for flag in trace["ckpt_flag"]
    ]


def test_full_recompute_spares_part_of_every_window_in_flight():
    def full(name: str, pp: int, mbs: int, rank: int, partial: int) -> list[int]:
        choice = RecomputeConfig(full=True, partial_microbatches=partial)
        found = on_rank(choice, build_schedule(name, pp, mbs)[rank])
        return [mb for mb in range(mbs) if found.of((mb, 0)).whole_layers]

    assert full("gpipe", 4, 5, rank=0, partial=2) == [2, 3, 4]
    assert full("1f1b", 4, 5, rank=3, partial=1) == []
    assert full("zero_bubble_h1", 2, 4, rank=1, partial=1) == [1, 3]
    assert full("1f1b", 4, 8, rank=1, partial=0) == list(range(8))
    assert spared_microbatches([], 1) == frozenset()


def test_the_policy_says_parts_or_whole_layers():
    actions = build_schedule("gpipe", 2, 3)[0]
    parts = frozenset({Recompute.norm, Recompute.moe})
    some = on_rank(RecomputeConfig(phases=tuple(parts)), actions)
    assert {some.of((mb, 0)) for mb in range(3)} == {RecomputeChoice(parts)}
    both = on_rank(RecomputeConfig(True, tuple(parts), partial_microbatches=1), actions)
    assert [both.of((mb, 0)) for mb in range(3)] == [RecomputeChoice(parts), WHOLE, WHOLE]
    assert (both.policy.usual, both.policy.spared) == (WHOLE, RecomputeChoice(parts))
    assert on_rank(RecomputeConfig(), actions).of((0, 0)) == NOTHING


def test_plan_and_engine_take_the_policy():
    """Rules, advice and the command line look at the keys, as at those of every section."""
    read = re.compile(r"\brun\.recompute\b")
    readers = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "app").rglob("*.py")
        if read.search(path.read_text())
    }
    keys = {path for path in readers if path.startswith(("app/rules/", "app/advice/"))}
    assert readers - keys == {"app/plan/recompute.py"}
