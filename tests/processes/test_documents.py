"""Packed documents train like one process in every kind of layout, and the same bit for bit
whatever backward computes again and graphs hold.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from app.choices import CpComm, GraphKey, Recompute, ScheduleName
from app.config import DataConfig, ParallelConfig, RecomputeConfig, Run, ScheduleConfig
from tests.cases import chosen
from tests.distributed import run_distributed
from tests.parity import OneProcess, few_steps
from tests.processes.captured import UPDATING, WHOLE, local, same, several
from tests.runs import LATENT, STEADY, TINY, make_run

STEPS = 3
MODELS = {
    "grouped": dataclasses.replace(TINY, moe=None, qk_norm=True),
    "experts": TINY,
    "latent": LATENT,
}
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "tp 2": ({"tp": 2}, "auto"),
    "cp 2": ({"cp": 2}, "auto"),
    "cp 2 heads": ({"cp": 2, "cp_comm_type": CpComm.all_to_all}, "auto"),
    "cp 4": ({"cp": 4}, "auto"),
    "dp 2": ({"dp": 2}, "auto"),
    "pp 2 split backward": ({"pp": 2}, "zero_bubble_h1"),
    "tp 2 cp 2": ({"tp": 2, "cp": 2}, "auto"),
    "two stages per rank": ({"pp": 2, "vpp": 2}, "interleaved"),
}
QUICK = [("grouped", "cp 2"), ("latent", "cp 2 heads"), ("experts", "two stages per rank")]
PAIRS = [(name, case) for name in MODELS for case in CASES]


def run_of(name: str, schedule: str = "auto", phases: Any = (), **parallel: Any) -> Run:
    stages = parallel.get("pp", 1) * parallel.get("vpp", 1)
    return make_run(
        dataclasses.replace(MODELS[name], num_layers=max(2, stages)),
        parallel=ParallelConfig(**({"dp": 1} | parallel)),
        schedule=ScheduleConfig(ScheduleName(schedule)),
        recompute=RecomputeConfig(phases=phases),
        data=DataConfig(document_mask=True),
        optim=STEADY,
    )


@pytest.mark.parametrize(("name", "case"), chosen(PAIRS, QUICK))
def test_layouts_equal_one_process(name: str, case: str):
    parallel, schedule = CASES[case]
    run = run_of(name, schedule, **parallel)
    alone = dataclasses.replace(run, parallel=ParallelConfig(), schedule=ScheduleConfig())
    one = OneProcess.of(alone, STEPS)
    for found in run_distributed(few_steps, run.world_size, run, STEPS):
        one.expect(found)


@pytest.mark.parametrize(
    "parallel", chosen([{}, {"tp": 2}, {"cp": 2}, {"pp": 2}], [{"cp": 2}]), ids=str
)
def test_recomputed_and_captured_parts_change_nothing(parallel: dict[str, Any]):
    plain = run_of("grouped", **parallel)
    again = run_of("grouped", phases=(Recompute.attn_core, Recompute.norm), **parallel)
    runs = {
        "eager": plain,
        "again": again,
        "captured": dataclasses.replace(plain, cuda_graph=local("attn")),
        "captured by slot": dataclasses.replace(plain, cuda_graph=local("layer", GraphKey.slot)),
        "captured again": dataclasses.replace(again, cuda_graph=local("attn")),
        "full iteration": dataclasses.replace(plain, cuda_graph=WHOLE),
        "update too": dataclasses.replace(plain, cuda_graph=UPDATING),
    }
    for results in run_distributed(several, plain.world_size, runs):
        eager = results.pop("eager")
        for name, result in results.items():
            assert same(result, eager), name
