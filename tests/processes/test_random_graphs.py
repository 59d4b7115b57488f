"""Drawn runs with graphs, or with recomputation, are bit for bit those without, on the stand-in.

On three or four ranks, also with capacities, noise and fewer bits: test_option_pairs.py has fewer
ranks and all options. A case that fails prints its command line.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from app.choices import GraphImpl
from app.config import CudaGraphConfig, RecomputeConfig, Run
from app.rules import check
from tests.distributed import run_distributed
from tests.graphed_callables import install
from tests.processes.captured import same, several
from tests.processes.recompute import steps
from tests.random_runs import Drawn, random_run

pytestmark = pytest.mark.full


def drawn_run(seed: int, fits: Callable[[Run], bool], graphs: bool = False) -> Drawn:
    """The first of a seed's runs on more than two ranks that fits."""
    runs = (random_run(n, wild=n % 2 == 1, graphs=graphs) for n in range(seed, 10**6, 1000))
    return next(each for each in runs if each.run.world_size > 2 and fits(each.run))


@pytest.mark.parametrize("seed", range(15))
def test_captured_training_is_eager_training(seed: int):
    drawn = drawn_run(seed, lambda run: True, graphs=True)
    print(drawn)
    eager = dataclasses.replace(drawn.run, cuda_graph=CudaGraphConfig())
    runs = {"eager": eager, "captured": drawn.run}
    for found in run_distributed(several, drawn.run.world_size, runs):
        assert same(found["captured"], found["eager"])


@pytest.mark.parametrize("seed", range(200, 215))
def test_captured_by_transformer_engine_too(seed: int, monkeypatch: pytest.MonkeyPatch):
    """On a stand-in that keeps its contract."""
    install(monkeypatch)
    drawn = drawn_run(seed, lambda run: run.cuda_graph.impl is GraphImpl.local, graphs=True)
    print(drawn)
    eager, graph = CudaGraphConfig(), drawn.run.cuda_graph
    theirs = dataclasses.replace(graph, impl=GraphImpl.transformer_engine)
    runs = {
        name: check(dataclasses.replace(drawn.run, cuda_graph=chosen))
        for name, chosen in (("eager", eager), ("captured", theirs))
    }
    for found in run_distributed(several, drawn.run.world_size, runs):
        assert same(found["captured"], found["eager"])


@pytest.mark.parametrize("seed", range(100, 115))
def test_recomputation_changes_no_bit(seed: int):
    drawn = drawn_run(seed, lambda run: run.recompute != RecomputeConfig())
    print(drawn)
    kept = dataclasses.replace(drawn.run, recompute=RecomputeConfig())
    again, once = (run_distributed(steps, drawn.run.world_size, run) for run in (drawn.run, kept))
    assert again == once
