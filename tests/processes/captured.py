"""Shared by test_captured.py and other tests."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from app.choices import (
    GraphImpl,
    GraphKey,
    GraphScope,
    Score,
)
from app.config import (
    CudaGraphConfig,
    ModelConfig,
    ParallelConfig,
    Run,
)
from app.engine.capture.facts import GraphFacts
from app.engine.report.metrics import Meter
from app.engine.step.step import TrainingStep
from app.plan.graphs import GraphPlan
from tests.runs import TINY, TWO_MICROBATCHES, batches_of, engine_of, make_run, whole_gradients

FOUR = dataclasses.replace(TINY, num_layers=4)


BIASED = dataclasses.replace(FOUR.moe, score=Score.sigmoid, bias_update_rate=0.01)


MODELS = {
    "moe": FOUR,
    "dense": dataclasses.replace(FOUR, moe=None),
    # its bias update uses the tokens per expert of the global batch
    "biased": dataclasses.replace(FOUR, moe=BIASED),
}


WARMUP, STEPS = 1, 4  # eager, captured, replayed twice more


SCOPES: dict[str, tuple[str, ...]] = {
    "attn": ("attn",),
    "mlp": ("mlp",),
    "router": ("attn", "mlp", "moe_router"),
    "partial": ("attn", "mlp", "moe_router", "moe_preprocess"),
    "moe": ("moe",),
    "attn and moe": ("attn", "mlp", "moe"),
    "layer": (),
}


def local(scope: str, key: GraphKey = GraphKey.microbatch) -> CudaGraphConfig:
    return CudaGraphConfig(GraphImpl.local, tuple(map(GraphScope, SCOPES[scope])), WARMUP, key)


EAGER, WHOLE = CudaGraphConfig(), CudaGraphConfig(GraphImpl.full_iteration, warmup_steps=WARMUP)


UPDATING = dataclasses.replace(WHOLE, optimizer=True)


CHOICES = {
    **{scope: local(scope) for scope in SCOPES},
    "layer by slot": local("layer", GraphKey.slot),
    "partial by slot": local("partial", GraphKey.slot),
    "full iteration": WHOLE,
    "full iteration, update": UPDATING,
}


FULL_ITERATIONS = ("full iteration", "full iteration, update")


def run_of(model: ModelConfig, graph: CudaGraphConfig, **sections: Any) -> Run:
    """A run with graphs; where one rank has all layers and data, with two microbatches."""
    parallel = sections.get("parallel", ParallelConfig())
    if parallel.pp * (parallel.dp or 1) == 1:
        sections.setdefault("train", TWO_MICROBATCHES)
    return make_run(model, cuda_graph=graph, **sections)


def trained(rank: int, run: Run, wrong: GraphPlan | None = None) -> dict[str, Any]:
    """Losses, norms and the last gradients of some steps, and how many graphs there are."""
    torch.manual_seed(rank)
    engine = engine_of(run, rank)
    step, seen = TrainingStep(engine), []
    meter = Meter(engine, first_step=1)
    if wrong is not None:
        # of the executor that is bound to the captured step
        step.captured.args[0].args[1].stages.graphs.plan = wrong
    for n in range(STEPS):
        lr, decay = run.optim.lr / (1 + n), run.optim.weight_decay * (1 + n)
        report, totals = step(batches_of(run, n, engine.groups.dp_rank), lr, decay)
        meter.count(totals)
        counts = {place: counts_E.tolist() for place, counts_E in totals.counts.items()}
        seen.append((report.loss, report.grad_norm, report.aux_loss, report.z_loss, counts))
    report.step, report.step_ms = run.train.steps, 1e3
    meter.complete(report)  # all ranks measure together
    finite = all(map(math.isfinite, seen[-1][:2]))
    biases = [router.bias_E.tolist() for _, router in engine.routers()]
    grads = {name: grad.numpy() for name, grad in whole_gradients(engine).items()} if finite else {}
    recorder, plan = engine.recorder, engine.plan.graphs[engine.groups.pp_rank]
    facts = None if recorder is None else GraphFacts.of(recorder)
    engine.release()
    assert (report.graph_count is None) == (recorder is None)
    return {
        "seen": seen,
        "biases": biases,
        "grads": grads,
        "facts": facts,
        "planned": plan and plan.num_graphs,
    }


def several(rank: int, runs: dict[str, Run]) -> dict[str, dict[str, Any]]:
    return {name: trained(rank, run) for name, run in runs.items()}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    equal = all(
        name in one["grads"] and (one["grads"][name] == grad).all()
        for name, grad in other["grads"].items()
    )
    return equal and one["seen"] == other["seen"] and one["biases"] == other["biases"]


LAYOUTS = {
    "one rank": ParallelConfig(),
    "pp2": ParallelConfig(pp=2),
    "pp2 vpp2": ParallelConfig(pp=2, vpp=2),
    "dp2": ParallelConfig(dp=2),
    "ep2": ParallelConfig(ep=2, dp=2),
    "tp2": ParallelConfig(tp=2),
    "cp2": ParallelConfig(cp=2),
}


def broken(rank: int, run: Run, slots: bool) -> dict[str, Any]:
    """Trained with a plan that is wrong on the first rank, where two microbatches are in flight."""
    engine = engine_of(run, rank)
    plan = engine.plan.graphs[engine.groups.pp_rank]
    assert plan is not None
    shared = dict.fromkeys(plan.slots, 0) if slots else plan.slots
    return trained(rank, run, dataclasses.replace(plan, slots=shared, pool_per_slot=False))
