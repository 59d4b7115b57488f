"""Training with experts on several ranks and sizes that nobody waits for: captured like eager, and
like the other dispatchers.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from app.choices import DispatcherKind, Recompute, ScheduleName
from app.config import (
    CudaGraphConfig,
    ModelConfig,
    ParallelConfig,
    RecomputeConfig,
    Run,
    ScheduleConfig,
)
from tests.cases import chosen
from tests.distributed import run_distributed
from tests.processes.test_captured import CHOICES, EAGER, FOUR, same, several
from tests.runs import make_run

EP2, EP4 = ParallelConfig(ep=2, dp=2), ParallelConfig(ep=4, dp=4)
SPLITS = ScheduleConfig(ScheduleName.zero_bubble_h1)
LAYOUTS: dict[str, dict[str, Any]] = {
    "ep2": {"parallel": EP2},
    "ep4": {"parallel": EP4},
    "ep2 etp2": {"parallel": ParallelConfig(tp=2, etp=2, ep=2, dp=2)},
    "ep2 tp2": {"parallel": ParallelConfig(tp=2, etp=1, ep=2)},
    "ep2 cp2": {"parallel": ParallelConfig(cp=2, ep=2)},
    "pp2 ep2": {"parallel": ParallelConfig(pp=2, ep=2, dp=2)},
    "pp2 vpp2 ep2": {"parallel": ParallelConfig(pp=2, vpp=2, ep=2, dp=2)},
    "pp2 ep4": {"parallel": ParallelConfig(pp=2, ep=4, dp=4)},
    "zero bubble ep2": {"parallel": ParallelConfig(pp=2, ep=2, dp=2), "schedule": SPLITS},
    "experts recomputed": {"parallel": EP2, "recompute": RecomputeConfig(phases=(Recompute.moe,))},
    "layers recomputed": {"parallel": EP2, "recompute": RecomputeConfig(full=True)},
}
WHOLE, PARTS = ("whole step",), ("partial", "moe", "layer", "whole step")
GRAPHS = {
    "ep2": PARTS,
    "pp2 ep2": PARTS,
    "experts recomputed": ("moe", "layer", "whole step"),
    **dict.fromkeys(("ep2 etp2", "ep2 tp2", "pp2 vpp2 ep2"), ("layer", "whole step")),
}


def with_static(**options: Any) -> ModelConfig:
    moe = dataclasses.replace(FOUR.moe, dispatcher=DispatcherKind.static, **options)
    return dataclasses.replace(FOUR, moe=moe)


def run_of(layout: str, graph: CudaGraphConfig = EAGER, **options: Any) -> Run:
    return make_run(with_static(**options), cuda_graph=graph, **LAYOUTS[layout])


@pytest.mark.parametrize("layout", chosen(list(LAYOUTS), ["ep2", "pp2 ep2"]))
def test_experts_on_several_ranks_are_captured(layout: str):
    names = GRAPHS.get(layout, WHOLE)
    runs = {name: run_of(layout, CHOICES[name]) for name in names} | {"eager": run_of(layout)}
    for results in run_distributed(several, runs["eager"].world_size, runs):
        eager = results.pop("eager")
        for name, result in results.items():
            assert same(result, eager), name
            assert result["facts"].count == (1 if name == "whole step" else result["planned"]), name


@pytest.mark.parametrize("options", [{"shared_overlap": True}, {"capacity_factor": 1.0}], ids=str)
def test_with_what_else_an_moe_layer_may_have(options: dict[str, Any]):
    runs = {name: run_of("ep2", CHOICES[name], **options) for name in WHOLE}
    runs["eager"] = run_of("ep2", **options)
    for results in run_distributed(several, 2, runs):
        assert same(results["whole step"], results["eager"])
