"""Training that keeps experts' rows for backward in pages: with equal bits, eager and captured."""

from __future__ import annotations

from typing import Any

import pytest

from app.choices import Recompute, StaticCapacity, StaticOverflow
from app.config import CudaGraphConfig, RecomputeConfig, Run
from app.engine.step.shortage import RowShortage
from app.moe.dispatch.paged_buffer import PagedBuffer
from app.plan.parts.paged_buffer import with_paged_buffer
from tests.cases import chosen
from tests.distributed import run_distributed
from tests.processes.captured import CHOICES, EAGER, same, several
from tests.processes.static import (
    EP2,
    LAYOUTS,
    NEVER,
    STEPS,
    short_run,
    steps_of,
    steps_with_all_rows,
    with_static,
)
from tests.runs import make_run

ACT = RecomputeConfig(phases=(Recompute.experts_act,))
CASES: dict[str, dict[str, Any]] = {
    **{
        name: LAYOUTS[name]
        for name in (
            "ep2",
            "pp2 ep2",
            "pp2 vpp2 ep2",
            "zero bubble ep2",
            "experts recomputed",
            "layers recomputed",
            "ep2 etp2",
        )
    },
    "activations recomputed": {"parallel": EP2, "recompute": ACT},
    "activations recomputed, all graphs": {"parallel": EP2, "recompute": ACT},
}
WHOLE, PARTS = ("full iteration",), ("partial", "moe", "layer", "full iteration")
GRAPHS = {
    "ep2": PARTS,
    "pp2 ep2": PARTS,
    "activations recomputed": ("partial", "full iteration"),
    "activations recomputed, all graphs": PARTS,
    "experts recomputed": ("layer", "full iteration"),
    "pp2 vpp2 ep2": ("layer", "full iteration"),
}
ENOUGH = 1.9  # of two ranks all rows are twice the mean


def in_pages(rank: int, runs: dict[str, Run]) -> dict[str, dict[str, Any]]:
    """Return the results of `several`; no step may be rerun, and every page must be freed."""
    pools, clear = list[PagedBuffer](), PagedBuffer.clear

    def cleared(pool: PagedBuffer) -> None:
        if pools.count(pool) > 1:  # a step has been taken
            assert (pool.needed() > 0) == (pool.planned.pages > 1) and not pool.lacks()
            head, tail, in_use, _ = pool.state.tolist()
            assert in_use == 0 and tail - head == pool.planned.pages
        pools.append(pool)
        clear(pool)

    PagedBuffer.clear = cleared
    RowShortage.again = None
    return several(rank, runs)


def run_with(layout: str, paged_buffer: float | None, graph: CudaGraphConfig = EAGER) -> Run:
    run = make_run(with_static(), cuda_graph=graph, **CASES[layout])
    return with_paged_buffer(run, paged_buffer)


@pytest.mark.parametrize("layout", chosen(list(CASES), ["activations recomputed"]))
def test_rows_from_pages_equal_originals(layout: str):
    names = GRAPHS.get(layout, WHOLE)
    runs = {name: run_with(layout, ENOUGH, CHOICES[name]) for name in names}
    runs |= {"eager": run_with(layout, ENOUGH), "as they are": run_with(layout, None)}
    for results in run_distributed(in_pages, runs["eager"].world_size, runs):
        kept = results.pop("as they are")
        for name, result in results.items():
            assert same(result, kept), name


@pytest.mark.full
@pytest.mark.parametrize(
    "graph", chosen(["full iteration", "partial", "eager"], ["full iteration"])
)
def test_step_without_enough_pages_is_rerun(graph: str):
    """Results equal those without a page pool; no other step is rerun, and the pool has grown."""
    run = short_run(CHOICES.get(graph, EAGER), StaticCapacity.worst)
    exact = steps_with_all_rows()
    short = with_paged_buffer(run, 1.0)
    found = run_distributed(steps_of, 2, short, NEVER)
    grown = run_distributed(steps_of, 2, short, 2)
    for ours, more, wanted in zip(found, grown, exact, strict=True):
        for each in (ours, more):
            assert each["seen"] == wanted["seen"] and each["validated"] == wanted["validated"]
        assert all(ours["again"]) and more["again"][:2] == [1, 1]
        assert sum(more["again"]) < STEPS


@pytest.mark.full
def test_or_the_run_ends():
    run = short_run(EAGER, StaticCapacity.worst, on_overflow=StaticOverflow.stop, paged_buffer=1.0)
    needed = r"model\.moe\.static\.paged_buffer=1.0: 2 steps in a row needed"
    with pytest.raises(Exception, match=needed):
        run_distributed(steps_of, 2, run, 2)
