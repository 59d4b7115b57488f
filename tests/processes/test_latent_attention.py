"""Multi-head latent attention trains like one process in every kind of layout, and the same bit for
bit whatever backward computes again and graphs hold.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from app.choices import CpComm, Recompute, ScheduleName
from app.config import ParallelConfig, RecomputeConfig, Run, ScheduleConfig
from tests.cases import chosen
from tests.distributed import run_distributed
from tests.parity import OneProcess, few_steps
from tests.processes.captured import WHOLE, local, same, several
from tests.runs import LATENT, STEADY, make_run

STEPS = 3
PLAIN_QUERIES = dataclasses.replace(
    LATENT, moe=None, yarn=None, mla=dataclasses.replace(LATENT.mla, q_lora_rank=None)
)
MODELS = {"latent": LATENT, "queries as they are": PLAIN_QUERIES}
CASES = {
    "tp 2": ({"tp": 2}, "auto"),
    "cp 2": ({"cp": 2}, "auto"),
    "cp 2 heads": ({"cp": 2, "cp_comm_type": CpComm.all_to_all}, "auto"),
    "pp 2 split backward": ({"pp": 2}, "zero_bubble_h1"),
    "tp 2 split backward": ({"tp": 2, "pp": 2}, "zero_bubble_h1"),
    "tp 2 cp 2": ({"tp": 2, "cp": 2}, "auto"),
    "tp 2 cp 2 heads": ({"tp": 2, "cp": 2, "cp_comm_type": CpComm.all_to_all}, "auto"),
    "tp 4": ({"tp": 4}, "auto"),
    "two stages per rank": ({"pp": 2, "vpp": 2}, "interleaved"),
    "two replicas": ({"dp": 2, "tp": 2}, "auto"),
}
QUICK = ("tp 2", "cp 2", "cp 2 heads", "tp 2 split backward")
PAIRS = [(name, case) for name in MODELS for case in CASES]


def run_of(name: str, schedule: str = "auto", phases: Any = (), **parallel: Any) -> Run:
    stages = parallel.get("pp", 1) * parallel.get("vpp", 1)
    return make_run(
        dataclasses.replace(MODELS[name], num_layers=max(2, stages)),
        parallel=ParallelConfig(**({"dp": 1} | parallel)),
        schedule=ScheduleConfig(ScheduleName(schedule)),
        recompute=RecomputeConfig(phases=phases),
        optim=STEADY,
    )


@pytest.mark.every(2)
@pytest.mark.parametrize(("name", "case"), chosen(PAIRS, [("latent", case) for case in QUICK]))
def test_layouts_equal_one_process(name: str, case: str):
    parallel, schedule = CASES[case]
    run = run_of(name, schedule, **parallel)
    alone = dataclasses.replace(run, parallel=ParallelConfig(), schedule=ScheduleConfig())
    one = OneProcess.of(alone, STEPS)
    for found in run_distributed(few_steps, run.world_size, run, STEPS):
        one.expect(found)


@pytest.mark.parametrize("parallel", chosen([{}, {"tp": 2}, {"cp": 2}], [{}]), ids=str)
def test_recomputed_and_captured_parts_change_nothing(parallel: dict[str, Any]):
    """All parts, and attention captured with what it recomputes."""
    plain = run_of("latent", **parallel)
    again = run_of("latent", phases=tuple(part for part in Recompute), **parallel)
    core = run_of("latent", phases=(Recompute.attn_core, Recompute.norm), **parallel)
    runs = {
        "eager": plain,
        "again": again,
        "captured": dataclasses.replace(plain, cuda_graph=local("attn")),
        "captured again": dataclasses.replace(core, cuda_graph=local("attn")),
    }
    if not parallel:
        runs["whole"] = dataclasses.replace(plain, cuda_graph=WHOLE)
    for results in run_distributed(several, plain.world_size, runs):
        eager = results.pop("eager")
        for name, result in results.items():
            assert same(result, eager), name
