"""Layouts of runs whose launcher starts more or fewer ranks than were meant (parallel.elastic)."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.advice.elastic import told
from app.cli.options.arguments import Typed
from app.cli.options.compose import load_typed
from app.config import Run
from app.engine.files.run_folder import describe_run
from app.errors import ConfigError
from app.planner.plan import Plan
from app.version import Version
from tests.config import load

SMOKE = ("+experiment=smoke", "model=dense_tiny", "parallel.elastic=true")
MIXTRAL = ("+experiment=mixtral_8x7b", "parallel.world_size=64", "parallel.elastic=true")


def test_dp_follows_the_ranks():
    meant = load(*SMOKE, "parallel.dp=2", world_size=2)
    assert (meant.parallel.dp, meant.parallel.replaced, list(told(meant))) == (2, (), [])
    run = load(*SMOKE, "parallel.dp=2", world_size=1)
    assert (run.parallel.world_size, run.parallel.dp) == (1, 1)
    assert (run.num_microbatches, run.train.global_batch) == (2, meant.train.global_batch)
    assert list(told(run)) == [
        "1 rank now: parallel.dp=1 (was 2), 2 microbatches a step; dp follows their number"
    ]


def test_degrees_that_do_not_divide_are_searched():
    run = load(*SMOKE, "parallel.tp=2", "parallel.pp=2", world_size=3)
    assert (run.world_size, run.dp * run.model_ranks) == (3, 3)
    assert "parallel.tp=2" in run.parallel.replaced and "parallel.pp=2" in run.parallel.replaced
    (line,) = told(run)
    assert line.startswith("3 ranks now: ") and line.endswith("the fastest layout found for them")


def test_experts_move_together_where_ranks_are_too_few():
    words = ("+experiment=smoke", "parallel.elastic=true", "parallel.ep=2")
    assert load(*words, world_size=1).parallel.ep == 1
    assert load(*words, "parallel.dp=1", world_size=1).parallel.ep == 1
    with pytest.raises(ConfigError, match=r"^optim\.warmup_steps=999: must be below"):
        load(*words, "parallel.dp=2", "optim.warmup_steps=999", world_size=2)


@pytest.mark.full
def test_a_large_run_keeps_batch_graphs_and_experts():
    meant = load(*MIXTRAL, world_size=64)
    for ranks in (32, 48, 56):
        run = load(*MIXTRAL, world_size=ranks)
        assert run.world_size == run.dp * run.model_ranks == ranks and Plan(run).fits
        assert run.train.global_batch == meant.train.global_batch
        assert (run.cuda_graph, run.model, run.precision) == (
            meant.cuda_graph,
            meant.model,
            meant.precision,
        )


def test_no_layout_for_the_ranks_is_refused():
    said = r"elastic=true: finds no layout of 7 ranks; with its own degrees: train\.global_batch"
    with pytest.raises(ConfigError, match=said):
        load(*SMOKE, "parallel.dp=2", world_size=7)
    small = "hardware.gpu_memory_gib=0.5"
    with pytest.raises(ConfigError, match=r"it does not fit into 0\.50 GiB; start another"):
        load(*SMOKE, "parallel.dp=2", small, world_size=1)


def test_without_the_key_other_ranks_are_refused_with_its_name():
    for typed in ("parallel.dp=2", "parallel.world_size=2", "parallel.tp=2"):
        with pytest.raises(ConfigError, match=r"parallel\.elastic=true"):
            load("+experiment=smoke", typed, world_size=1)


def test_a_resumed_run_takes_back_what_was_replaced(tmp_path: Path):
    def saved(folder: str, *words: str, ranks: int) -> Run:
        run = load_typed(Typed.parse(words), ranks)
        describe_run(Plan(run), tmp_path / folder, Version.of())
        return run

    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    meant = ("parallel.tp=2", "parallel.pp=2", "schedule.name=1f1b")
    fewer = saved("a", *SMOKE, *meant, ranks=3)
    assert fewer.parallel.tp == 1 and fewer.train.micro_batch != 8
    again = saved("b", f"resume={tmp_path}/a", ranks=4)
    assert (again.parallel.tp, again.parallel.pp, again.dp) == (2, 2, 1)
    assert (again.parallel.layout, again.train.micro_batch) == (None, 8)
    assert again.parallel.replaced == ()
    assert load_typed(Typed.parse([f"resume={tmp_path}/a"]), 3).parallel == fewer.parallel
