"""Shared by test_static.py and other tests."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch

from app.choices import (
    DispatcherKind,
    Recompute,
    ScheduleName,
    StaticCapacity,
)
from app.config import (
    CudaGraphConfig,
    ModelConfig,
    ParallelConfig,
    RecomputeConfig,
    Run,
    ScheduleConfig,
    TrainConfig,
)
from app.config.experts import StaticConfig
from app.engine.step import shortage
from app.engine.step.step import TrainingStep, Validation
from app.moe.dispatch import static
from app.moe.dispatch.expert_rows import ExpertRows
from tests.distributed import run_distributed
from tests.processes.captured import (
    EAGER,
    FOUR,
    FULL_ITERATIONS,
)
from tests.runs import batches_of, engine_of, make_run

FACTOR = StaticCapacity.factor


NEVER = 10**9  # steps in a row


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


WHOLE, PARTS = FULL_ITERATIONS, ("partial", "moe", "layer", *FULL_ITERATIONS)


GRAPHS = {
    "ep2": PARTS,
    "pp2 ep2": ("partial", "layer", FULL_ITERATIONS[1]),
    "pp2 vpp2 ep2": PARTS,
    "experts recomputed": ("moe", "layer", *FULL_ITERATIONS),
    **dict.fromkeys(("ep2 etp2", "ep2 tp2"), ("layer", *FULL_ITERATIONS)),
}


def with_static(**options: Any) -> ModelConfig:
    moe = dataclasses.replace(FOUR.moe, dispatcher=DispatcherKind.static, **options)
    return dataclasses.replace(FOUR, moe=moe)


def run_of(layout: str, graph: CudaGraphConfig = EAGER, **options: Any) -> Run:
    return make_run(with_static(**options), cuda_graph=graph, **LAYOUTS[layout])


TOKENS, STEPS = 484, 6  # of a rank in a microbatch


def short_run(graph: CudaGraphConfig, capacity: StaticCapacity, **options: Any) -> Run:
    """Experts that have memory for little more than the mean number of rows, or for all."""
    limits = StaticConfig(capacity=capacity, **options)
    if capacity is FACTOR:
        limits = dataclasses.replace(limits, factor=1.1)
    train = TrainConfig(steps=20, seq_len=TOKENS // 2, micro_batch=2, global_batch=8)
    model = with_static(static=limits, jitter_eps=0.01, first_k_dense=0)
    model = dataclasses.replace(model, num_layers=2)
    return make_run(model, cuda_graph=graph, parallel=EP2, train=train)


def steps_of(rank: int, run: Run, in_a_row: int, favour: int = 0) -> dict[str, Any]:
    """Return the results of steps, which of them were rerun, and the most rows experts needed.

    `favour` lists the experts that routers are made to choose.
    """
    shortage.IN_A_ROW = in_a_row
    torch.manual_seed(rank)
    engine = engine_of(run, rank)
    for _, router in engine.routers():
        router.bias_E[:favour] = 10.0
    dispatcher, needed, place = engine.static, [0], static.place_rows

    def placed(*given: Any, **named: Any) -> ExpertRows:
        rows = place(*given, **named)
        needed[-1] = max(needed[-1], int(rows.needed))
        return rows

    static.place_rows = placed
    step, validation = TrainingStep(engine), Validation(engine, 2)
    found: dict[str, Any] = {"seen": [], "again": [], "needed": [], "validated": []}
    for n in range(STEPS):
        facts, totals = step(batches_of(run, n, engine.groups.dp_rank), 1e-3, 0.1)
        counts = [counts_E.tolist() for counts_E in totals.counts.values()]
        found["seen"].append((facts.loss, facts.grad_norm, facts.aux_loss, counts))
        found["again"].append(facts.reruns)
        found["needed"].append(needed[-1])
        held_out = batches_of(run, 100 + n, engine.groups.dp_rank)[:2]
        found["validated"].append(validation(held_out))
        needed.append(0)
    found["rows"] = dispatcher.planned.rows(TOKENS).computed
    found["params"] = [
        param.detach().numpy() for chunk in engine.chunks for param in chunk.parameters()
    ]
    engine.release()
    return found


@functools.cache
def steps_with_all_rows() -> list[dict[str, Any]]:
    """Return what every rank of `steps_of` finds where experts have memory for all rows."""
    return run_distributed(steps_of, 2, short_run(EAGER, StaticCapacity.worst), NEVER)
