"""Layouts that are compared: each, typed, is what its row says, and no other is quicker."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections import Counter
from itertools import product
from pathlib import Path

import pytest

from app.advice import layouts
from app.advice.layout_rows import LayoutComparison, LayoutRow
from app.advice.layouts import compare_layouts
from app.advice.moves import with_values
from app.advice.shapes import (
    Shape,
    graph_modes,
    micro_batches,
    recompute_ladder,
    schedules,
    shapes,
)
from app.advice.trials import Trials
from app.choices import Recompute
from app.config import Run
from app.errors import ConfigError
from app.plan.cost.flops import parameter_count
from app.plan.formatting import gib
from app.plan.stages import parse_layout, spelled_layout
from app.planner.plan import Plan
from app.rules import check
from tests.cases import chosen
from tests.config import load

ROOT = Path(__file__).parent.parent.parent
H200 = ("+experiment=small", "hardware=h200", "train.micro_batch=1", "train.seq_len=2048")
LLAMA = (*H200, "model=llama3_8b", "model.num_layers=4", "train.global_batch=16")
QWEN = (
    *H200,
    "model=qwen3_30b_a3b",
    "model.num_layers=3",
    "model.moe.aux_loss_coeff=0.001",
    "train.global_batch=16",
    "parallel.world_size=4",
    "parallel.ep=4",
)
FOUR = ("parallel.world_size=4",)
NODES_OF_TWO = ("parallel.gpus_per_node=2",)


def compared(*typed: str, slower: float | None = None) -> tuple[Run, LayoutComparison]:
    run = load(*typed)
    return run, compare_layouts(Plan(run), slower_gb_s=slower)


@pytest.mark.full
@pytest.mark.parametrize(
    ("typed", "trials"),
    [
        ((*LLAMA, *FOUR, *NODES_OF_TWO), 40),
        ((*LLAMA, *FOUR, *NODES_OF_TWO), 80),
        ((*LLAMA, "parallel.dp=4", "hardware.gpu_memory_gib=40"), 80),
        ((*QWEN, *NODES_OF_TWO), 80),
        ((*LLAMA, *FOUR, "hardware=auto"), 80),
    ],
    ids=["few nodes", "nodes", "tight", "experts", "no profile"],
)
def test_a_row_is_what_its_overrides_give(
    typed: tuple[str, ...], trials: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(layouts, "MOST_TRIALS", trials)
    run, found = compared(*typed, slower=10)
    assert len(found.rows) > 3 and [row.own for row in found.rows].count(True) == 1
    assert [row.cost.seconds for row in found.rows] == sorted(r.cost.seconds for r in found.rows)
    for row in found.rows:
        words = [word for each in row.overrides for word in shlex.split(each)]
        again = Plan(load(*typed, *words))
        assert again.run.world_size == run.world_size
        assert again.busiest.total == row.memory and again.fits == row.fits
        assert again.step_seconds == pytest.approx(row.cost.seconds)
        assert Shape.of(again.run) == Shape(row.tp, row.cp, row.pp, row.ep, shape_of(row).etp)
        slow = Plan(load(*typed, *words, "hardware.network_gb_s=10"))
        assert slow.step_seconds == pytest.approx(row.slower.seconds)
        assert row.slower.seconds >= row.cost.seconds
        assert (row.overrides == ()) == row.own
    # one row per shape and speed of the network, and the run's own besides
    others = Counter(shape_of(row) for row in found.rows if not row.own)
    assert max(others.values()) <= 2


def shape_of(row: LayoutRow) -> Shape:
    return Shape(row.tp, row.cp, row.pp, row.ep, row.etp if row.dispatcher else None)


@pytest.mark.full
@pytest.mark.parametrize("typed", [(*LLAMA, *FOUR), (*QWEN, *NODES_OF_TWO)], ids=["dense", "moe"])
def test_none_of_all_that_fit_is_quicker(typed: tuple[str, ...], monkeypatch: pytest.MonkeyPatch):
    """Against all shapes with all companions, each planned by itself."""
    typed = (*typed, "hardware.gpu_memory_gib=36")
    monkeypatch.setattr(layouts, "MOST_TRIALS", 10_000)
    run, found = compared(*typed)
    assert found.complete and found.fastest is not None
    limit, best = found.gpu_memory, dict[Shape, float]()
    trials = Trials(limit)
    for shape in shapes(run):
        for size, order in product(micro_batches(run, shape), schedules(run, shape.pp)):
            values = shape.values(run) | order | {"train.micro_batch": size}
            for mode, kept in product(graph_modes(with_values(run, values)), recompute_ladder(run)):
                try:
                    other = check(with_values(run, values | mode | kept))
                except ConfigError:
                    continue
                if trials.memory(other) <= limit:
                    seconds = trials.seconds(other)
                    best[shape] = min(seconds, best.get(shape, seconds))
    assert len(best) > 5
    rows = {shape_of(row): row for row in reversed(found.rows) if row.fits}
    for shape, seconds in sorted(best.items(), key=lambda item: item[1])[: layouts.ROWS]:
        row = rows[shape]
        uneven = any(word.startswith("parallel.layout=") for word in row.overrides)
        assert row.cost.seconds <= seconds * (1 + 1e-6)
        assert uneven or row.cost.seconds == pytest.approx(seconds, rel=1e-6)


@pytest.mark.full
def test_layers_of_two_kinds_leave_no_certainty(monkeypatch: pytest.MonkeyPatch):
    """Dense layers first: the rank with most microbatches keeps least of each, so that what fits
    may be passed over.
    """
    monkeypatch.setattr(layouts, "MOST_TRIALS", 10_000)
    small = ("model.hidden_size=512", "model.vocab_size=512", "model.num_layers=4")
    assert compared(*QWEN, *small)[1].complete
    assert not compared(*QWEN, *small, "model.moe.first_k_dense=2")[1].complete


def test_no_rank_has_less_than_the_bound():
    run = load(*QWEN)
    count = parameter_count(run.model)
    for shape in shapes(run):
        try:
            other = check(with_values(run, shape.values(run) | next(schedules(run, shape.pp))))
        except ConfigError:
            continue
        kept = max(rank.kept for rank in Plan(other).memory)
        bound = shape.state_bytes(run, count)
        assert 0.5 * kept < bound < kept + 2**30


@pytest.mark.full
@pytest.mark.parametrize("trials", chosen([80, layouts.MOST_TRIALS], [80]))
def test_a_slower_network_turns_the_order(trials: int, monkeypatch: pytest.MonkeyPatch):
    """Experts over nodes are quicker on a fast network than on a slow one, beside what is not."""
    monkeypatch.setattr(layouts, "MOST_TRIALS", trials)
    _, found = compared(*QWEN, *NODES_OF_TWO, slower=1)
    assert found.fastest is not None and found.fastest_slower is not None
    one_node = [row for row in found.rows if row.tp * row.cp * row.pp * row.ep == 1]
    across = [row for row in found.rows if row.ep == 4]
    assert across and all(row.slower.seconds > 1.5 * row.cost.seconds for row in across)
    assert all(row.slower.seconds < 20 * row.cost.seconds for row in one_node)
    assert found.fastest_slower.slower.seconds == min(r.slower.seconds for r in found.rows)


def test_what_fits_nowhere_leaves_the_run_alone():
    run, found = compared(*LLAMA, *FOUR, "hardware.gpu_memory_gib=4")
    assert found.fastest is None and found.fastest_slower is None
    (row,) = found.rows
    assert row.own and not row.fits and row.memory > found.gpu_memory
    assert row.cost.gpu_hours == pytest.approx(
        Plan(run).step_seconds * run.train.steps * run.world_size / 3600
    )


def test_a_run_without_room_is_last_however_fast(monkeypatch: pytest.MonkeyPatch):
    """Nothing of the model is divided, which is faster and needs more memory."""
    monkeypatch.setattr(layouts, "MOST_TRIALS", 20)
    _, found = compared(*LLAMA, "parallel.dp=4", "hardware.gpu_memory_gib=21")
    *others, own = found.rows
    assert own.own and not own.fits and own.cost.seconds < others[0].cost.seconds
    assert others and all(row.fits and row.memory <= found.gpu_memory for row in others)
    assert found.fastest is others[0]


def test_hours_are_of_the_tokens_that_are_asked_for():
    run = load(*LLAMA)
    plan = Plan(run)
    step = run.train.global_batch * run.train.seq_len
    one, many = (compare_layouts(plan, tokens=n * step).rows[0].cost for n in (1, 100))
    assert many.gpu_hours == pytest.approx(100 * one.gpu_hours) and one.seconds == many.seconds
    assert many.days * 24 == pytest.approx(many.gpu_hours)  # on one GPU
    assert one.tokens_per_second * one.seconds == pytest.approx(step)


@pytest.mark.parametrize("sizes", [[1, 1], [2, 2, 2, 1], [9, 8], [6, 6, 5, 5]])
def test_stages_are_spelled(sizes: list[int]):
    stages = parse_layout(spelled_layout(sizes))
    assert [stage.count("t") for stage in stages] == sizes
    assert stages[0].startswith("E") and stages[-1].endswith("L")


@pytest.mark.parametrize("seq_len", [4096, 131_072])
def test_the_ladder_only_rises(seq_len: int):
    """Long sequences recompute attention's softmax last."""
    run = load(*QWEN, f"train.seq_len={seq_len}")
    trials = Trials(0)
    legal = [dataclasses.replace(run, recompute=with_values(run, rung).recompute)
             for rung in recompute_ladder(run)]  # fmt: skip
    memory = [trials.memory(each) for each in legal]
    seconds = [trials.seconds(each) for each in legal]
    assert memory == sorted(memory, reverse=True) and seconds == sorted(seconds)
    assert memory[0] > memory[-1] and seconds[0] < seconds[-1]
    first = next(each for each in legal if Recompute.attn_core in each.recompute.phases)
    assert (Recompute.moe in first.recompute.phases) is (seq_len == 131_072)


def test_the_page_shows_what_is_planned():
    """docs/planning.md: the run and the fastest layout that it shows, planned again.
    scripts/plan_docs.py puts in the whole table anew.
    """
    page = (ROOT / "docs/planning.md").read_text()
    block = page.partition("```console\n$ python -m app.cli.plan what=layouts ")[2]
    command, _, shown = block.partition("```")[0].partition("\n")
    own = [word for word in command.split() if not word.startswith(("tokens=", "slower="))]
    typed = shown.partition("Overrides of the fastest:\n")[2].partition("\n\n")[0].split()
    words = [word for each in typed for word in shlex.split(each)]
    for name, overrides in ((r" +1", (*own, *words)), (r"→ *(?:\d+|–)", own)):
        plan = Plan(load(*overrides))
        cells = re.search(rf"^{name} .*$", shown, re.M)[0].replace("!", " ").split()
        assert gib(plan.busiest.total) in cells
        assert f"{plan.step_seconds * 1e3:,.0f}" in cells
        slow = Plan(load(*overrides, "hardware.network_gb_s=25"))
        assert f"{slow.step_seconds * 1e3:,.0f}" in cells


def test_a_run_whose_update_is_in_its_graph_is_compared_too():
    typed = (*LLAMA, *FOUR, "cuda_graph=full_iteration", "cuda_graph.optimizer=true")
    _, found = compared(*typed)
    assert found.planned > 10 and len(found.rows) > 1
