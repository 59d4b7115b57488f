"""Runs of attention in every kind of layout, compared with one process."""

from __future__ import annotations

import dataclasses
from typing import Any

from app.choices import CpComm, ScheduleName
from app.config import ModelConfig, ParallelConfig, RecomputeConfig, Run, ScheduleConfig
from tests.distributed import run_distributed
from tests.parity import OneProcess, few_steps
from tests.runs import STEADY, TWO_MICROBATCHES, make_run

STEPS = 3
LAYOUTS: dict[str, tuple[dict[str, Any], str]] = {  # parallelism, schedule
    "tp 2": ({"tp": 2}, "auto"),
    "cp 2": ({"cp": 2}, "auto"),
    "cp 2 heads": ({"cp": 2, "cp_comm_type": CpComm.all_to_all}, "auto"),
    "pp 2 split backward": ({"pp": 2}, "zero_bubble_h1"),
    "tp 2 cp 2": ({"tp": 2, "cp": 2}, "auto"),
    "two stages per rank": ({"pp": 2, "vpp": 2}, "interleaved"),
}


def layout_run(
    model: ModelConfig,
    parallel: dict[str, Any],
    schedule: str = "auto",
    *,
    phases: Any = (),
    **sections: Any,
) -> Run:
    """A run of a model with as many layers as the layout needs, two at least, and on one stage with
    two microbatches; `phases` are recomputed, and keyword arguments replace whole sections.
    """
    stages = parallel.get("pp", 1) * parallel.get("vpp", 1)
    if stages == 1:
        sections.setdefault("train", TWO_MICROBATCHES)
    return make_run(
        dataclasses.replace(model, num_layers=max(2, stages)),
        parallel=ParallelConfig(**({"dp": 1} | parallel)),
        schedule=ScheduleConfig(ScheduleName(schedule)),
        recompute=RecomputeConfig(phases=phases),
        optim=STEADY,
        **sections,
    )


def expect_one_process(run: Run) -> None:
    """Train a few steps, and compare with the same steps of one process."""
    alone = dataclasses.replace(run, parallel=ParallelConfig(), schedule=ScheduleConfig())
    one = OneProcess.of(alone, STEPS)
    for found in run_distributed(few_steps, run.world_size, run, STEPS):
        one.expect(found)
