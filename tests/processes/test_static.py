"""Static dispatcher on several ranks: captured training equals eager, and other dispatchers."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch

from app.choices import (
    Score,
    StaticCapacity,
    StaticOverflow,
    StaticTransport,
)
from app.config import (
    ParallelConfig,
)
from app.config.experts import StaticConfig
from app.engine.dispatchers import build_peer_transport
from app.errors import ConfigError
from app.plan.parts.dispatcher import run_dispatcher, with_rows
from app.rules import check
from tests.cases import chosen
from tests.distributed import run_distributed
from tests.processes.captured import (
    CHOICES,
    EAGER,
    FULL_ITERATIONS,
    broken,
    local,
    same,
    several,
    trained,
)
from tests.processes.static import (
    FACTOR,
    GRAPHS,
    LAYOUTS,
    NEVER,
    SPLITS,
    STEPS,
    TOKENS,
    WHOLE,
    run_of,
    short_run,
    steps_of,
    steps_with_all_rows,
)


@pytest.mark.parametrize("layout", chosen(list(LAYOUTS), ["pp2 ep2"]))
def test_experts_on_several_ranks_are_captured(layout: str):
    names = GRAPHS.get(layout, WHOLE)
    runs = {name: run_of(layout, CHOICES[name]) for name in names} | {"eager": run_of(layout)}
    for results in run_distributed(several, runs["eager"].world_size, runs):
        eager = results.pop("eager")
        for name, result in results.items():
            assert same(result, eager), name
            assert result["facts"].count == (1 if name in FULL_ITERATIONS else result["planned"]), (
                name
            )


@pytest.mark.full
def test_two_microbatches_in_one_slot_give_wrong_numbers():
    eager = run_distributed(trained, 4, run_of("pp2 ep2"))
    wrong = run_distributed(broken, 4, run_of("pp2 ep2", local("layer")), True)
    assert not same(wrong[0], eager[0])


@pytest.mark.full
@pytest.mark.parametrize("options", [{"shared_overlap": True}, {"capacity_factor": 1.0}], ids=str)
def test_with_what_else_an_moe_layer_may_have(options: dict[str, Any]):
    runs = {name: run_of("ep2", CHOICES[name], **options) for name in WHOLE}
    runs["eager"] = run_of("ep2", **options)
    for results in run_distributed(several, 2, runs):
        eager = results.pop("eager")
        assert all(same(result, eager) for result in results.values())


@pytest.mark.full
@pytest.mark.parametrize("graph", [*FULL_ITERATIONS, "partial", "eager"])
def test_step_without_enough_rows_is_rerun(graph: str):
    """Results are bit-identical to those with memory for all rows, and no other step is rerun.

    So are random numbers, counts of tokens, and validations.
    """
    chosen_graph = CHOICES.get(graph, EAGER)
    worst = steps_with_all_rows()
    found = run_distributed(steps_of, 2, short_run(chosen_graph, StaticCapacity.factor), NEVER)
    needed = [max(rows) for rows in zip(*(each["needed"] for each in worst), strict=True)]
    lacked = [int(rows > found[0]["rows"]) for rows in needed]
    assert 0 < sum(lacked) < STEPS, needed
    for ours, exact in zip(found, worst, strict=True):
        assert ours["again"] == lacked and exact["again"] == [None] * STEPS
        assert ours["seen"] == exact["seen"] and ours["validated"] == exact["validated"]
        for param, other in zip(ours["params"], exact["params"], strict=True):
            assert (param == other).all()


AGAIN: dict[str, dict[str, Any]] = {
    "pp2 ep2": {"parallel": ParallelConfig(pp=2, ep=2, dp=2)},
    "zero bubble": {"parallel": ParallelConfig(pp=2, ep=2, dp=2), "schedule": SPLITS},
    "etp2": {"parallel": ParallelConfig(tp=2, etp=2, ep=2, dp=2)},
}


@pytest.mark.full
@pytest.mark.parametrize("layout", AGAIN)
def test_all_ranks_rerun_a_step(layout: str):
    """Also those whose own experts lack nothing, and stages of a pipeline."""
    runs = [
        check(dataclasses.replace(short_run(graph, capacity), **AGAIN[layout]))
        for graph, capacity in ((EAGER, StaticCapacity.worst), (CHOICES["full iteration"], FACTOR))
    ]
    worst, found = (run_distributed(steps_of, 4, run, 2) for run in runs)
    for ours, exact in zip(found, worst, strict=True):
        assert sum(ours["again"]) > 0
        assert ours["seen"] == exact["seen"] and ours["validated"] == exact["validated"]


@pytest.mark.full
def test_skewed_routers_overflow_in_every_step():
    """Two experts of eight get all tokens, four times the mean, all of them on one rank."""
    runs = []
    for graph, capacity in ((EAGER, StaticCapacity.worst), (CHOICES["full iteration"], FACTOR)):
        run = short_run(graph, capacity)
        moe = dataclasses.replace(run.model.moe, score=Score.sigmoid, bias_update_rate=1e-3)
        model = dataclasses.replace(run.model, moe=moe)
        runs.append(dataclasses.replace(run, model=model))
    worst, found = (run_distributed(steps_of, 2, run, NEVER, 2) for run in runs)
    assert [max(each["needed"]) for each in worst] == [2 * 2 * TOKENS, 0]
    for ours, exact in zip(found, worst, strict=True):
        assert ours["again"] == [1] * STEPS
        assert ours["seen"] == exact["seen"] and ours["validated"] == exact["validated"]


@pytest.mark.full
def test_after_two_such_steps_there_is_memory_for_more(capfd: pytest.CaptureFixture[str]):
    """Graphs are captured anew, training and validation, and compute what they did; one line says
    so.
    """
    run = short_run(CHOICES["full iteration"], StaticCapacity.factor)
    short = with_rows(run, 1.0)  # what a rank needs is above the mean in every step
    worst = steps_with_all_rows()
    found = run_distributed(steps_of, 2, short, 2)
    for ours, exact in zip(found, worst, strict=True):
        assert ours["seen"] == exact["seen"] and ours["validated"] == exact["validated"]
        assert ours["again"][:2] == [1, 1] and sum(ours["again"]) < STEPS
        assert 1024 < ours["rows"] < 2048, "of those that all tokens could need"
    (line,) = [each for each in capfd.readouterr().err.splitlines() if "from now on" in each]
    begin = r"train\.py: model\.moe\.static\.factor=1\.0: 2 steps in a row needed up to"
    assert re.fullmatch(begin + r" 1\.\d+ times the mean; from now on .* for 1\.\d+ times", line)


def test_peer_transport_needs_gpus():
    run = run_of("ep2", static=StaticConfig(transport=StaticTransport.peer))
    planned = run_dispatcher(run)
    with pytest.raises(ConfigError, match=r"transport=peer: needs GPUs.* mean collective\?"):
        build_peer_transport(run, planned, None, device=torch.device("cpu"))


def test_or_the_run_ends():
    run = short_run(EAGER, StaticCapacity.factor, on_overflow=StaticOverflow.stop)
    with pytest.raises(Exception, match=r"model\.moe\.static\.factor=1.0: 2 steps in a row needed"):
        run_distributed(steps_of, 2, with_rows(run, 1.0), 2)
