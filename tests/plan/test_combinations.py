"""Planned combinations: shared plans equal plans alone, and the search asks for few times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from app.advice.combinations import PlannedCombination, front, plan_combinations
from app.advice.layouts import _Search, compare_layouts
from app.advice.moves import with_values
from app.advice.shapes import Shape
from app.advice.trials import Trials, busiest_seconds
from app.choices import Fp8Recipe
from app.cli.tuning.choose import next_combinations
from app.planner.plan import Plan
from tests.config import load
from tests.plan.test_compared_layouts import FOUR, LLAMA, QWEN

GIB = 2**30
SMALL = ("model.num_layers=2", "train.global_batch=8")
TOLERATED = 1.03  # times the fastest


def some(
    typed: Sequence[str], most: int, gib: float = 141, fp8: bool = False
) -> list[PlannedCombination]:
    recipes = tuple(Fp8Recipe) if fp8 else ()
    trials = Trials(int(gib * GIB))
    return plan_combinations(load(*typed), trials, recipes, most=most, most_s=1e9)


@pytest.fixture(scope="module")
def four() -> list[PlannedCombination]:
    return some((*LLAMA, *FOUR), 40)


@pytest.mark.parametrize("typed", [(*QWEN, *SMALL), (*LLAMA, *FOUR)], ids=["experts", "dense"])
def test_shared_plans_equal_plans_alone(typed: tuple[str, ...]):
    found = some(typed, 40)
    assert len({Shape.of(each.run) for each in found}) > 2
    trials = Trials(0)
    for each in found[::4]:
        shared, alone = trials.plan(each.run), Plan(each.run)
        assert shared.step_seconds == alone.step_seconds
        assert shared.memory == alone.memory


@pytest.mark.full
@pytest.mark.parametrize("name", ["qwen3_30b_a3b", "gpt_oss_20b", "deepseek_v2_lite", "llama3_8b"])
def test_shared_plans_of_experiments_equal_plans_alone(name: str):
    found = some([f"+experiment={name}"], 200, gib=79, fp8=True)
    trials = Trials(0)
    for each in found:
        shared, alone = trials.plan(each.run), Plan(each.run)
        assert (shared.step_seconds, shared.memory) == (alone.step_seconds, alone.memory)


def test_busiest_rank_bounds_the_step(four: list[PlannedCombination]):
    for each in four:
        plan = Plan(each.run)
        assert 0 < busiest_seconds(plan) <= plan.step_seconds


def test_combinations_are_typed_run_then_by_time():
    found = some(LLAMA, 200, fp8=True)
    assert found[0].overrides == () and found[0].key == "as typed"
    times = [each.seconds for each in found[1:]]
    assert times == sorted(times) and len({each.key for each in found}) == len(found)
    assert {"fp8", "graphs", "recompute"} <= {
        name for name in found[0].choices if len({each.choices[name] for each in found}) > 1
    }


def test_combinations_without_room_come_last():
    _, *others = some(LLAMA, 60, gib=39)
    order = [(not each.fits, each.seconds) for each in others]
    assert order == sorted(order) and {each.fits for each in others} == {True, False}
    fitting = max(each.seconds for each in others if each.fits)
    assert min(each.seconds for each in others if not each.fits) < fitting


def test_fp8_is_chosen_only_if_allowed():
    assert {each.choices["fp8"] for each in some(LLAMA, 40)} == {"none"}


def test_front_holds_what_nothing_beats(four: list[PlannedCombination]):
    best, found = front(four), four
    assert best and best[0].seconds == min(each.seconds for each in found if each.fits)
    for each in best:
        others = (other for other in found if other.fits and other is not each)
        assert not any(o.seconds <= each.seconds and o.memory < each.memory for o in others)


def test_layers_move_until_stages_take_equally_long():
    """The head of llama3_8b takes as long as several layers."""
    run = load(*LLAMA, *FOUR, "model.num_layers=16")
    search = _Search(run, Trials(141 * GIB))
    laid_out = list(islice(search.stages(run, Shape(1, 1, 4, 1, None), 1, 0), 2))
    even, moved = (Plan(each) for each in laid_out)
    assert even.run.parallel.layout is None and moved.run.parallel.layout is not None
    assert moved.step_seconds < even.step_seconds


@pytest.mark.full
@pytest.mark.parametrize("name", ["gpt_oss_20b", "qwen3_30b_a3b_16"])
def test_search_finds_uneven_stages(name: str):
    """Nearly as fast as the layout that the experiment has by hand: the search is bounded."""
    by_hand = Plan(load(f"+experiment={name}")).step_seconds
    best = compare_layouts(Plan(load(f"+experiment={name}", "parallel.layout=null"))).fastest
    assert best is not None and best.cost.seconds < 1.02 * by_hand
    assert any(word.startswith("parallel.layout=") for word in best.overrides)


def test_run_that_does_not_fit_is_not_ranked_first():
    run = load(*LLAMA, "hardware.gpu_memory_gib=38")
    fast = with_values(run, {"train.micro_batch": 8})
    rows = compare_layouts(Plan(fast)).rows
    (own,) = (row for row in rows if row.own)
    assert not own.fits and len(rows) > 1
    assert own.cost.seconds < rows[-2].cost.seconds and rows[-1] is own


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.full) for n in (1, 2))])
def test_search_finds_fastest_with_few_times(seed: int):
    """Each choice takes another time than planned, and each combination a little more."""
    space = some((*QWEN, *SMALL), 120)
    noise = np.random.default_rng(seed)
    choices = {pair for each in space for pair in each.choices.items()}
    wrong = {pair: noise.normal(0, 0.1) for pair in sorted(choices)}
    times = {
        each.key: each.seconds
        * float(np.exp(sum(map(wrong.get, each.choices.items())) + noise.normal(0, 0.01)))
        for each in space
    }
    seen: dict[str, float] = {}
    while following := next_combinations(space, seen, (), count=4):
        assert not {each.key for each in following} & set(seen)
        seen |= {each.key: times[each.key] for each in following}
    assert min(seen.values()) <= TOLERATED * min(times.values())
    assert len(seen) < len(space) / 2


def test_failed_and_unfit_are_not_asked_for_again(four: list[PlannedCombination]):
    limit = sorted(each.memory for each in four)[len(four) // 2]
    space = [replace(each, fits=each.memory <= limit) for each in four]
    failed: list[str] = []
    while following := next_combinations(space, {}, failed, count=8):
        failed += [each.key for each in following]
    assert sorted(failed) == sorted(each.key for each in space if each.fits)
