"""Where a device is within a replay is seen from the host, and costs no bit."""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from app.choices import GraphImpl
from app.config import CudaGraphConfig, Run
from app.engine.build import build_engine
from app.engine.ranks.groups import create_groups
from app.engine.step.step import TrainingStep
from app.engine.watchdog.watchdog import Watchdog
from app.planner.plan import Plan
from tests.gpu.in_process import easy_batches, one_gpu
from tests.processes.captured import MODELS
from tests.runs import TWO_MICROBATCHES, make_run
from tests.training import wait_for

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SPIN_CYCLES = 4_000_000_000  # about 2 s
GRAPHS = {
    "full iteration": CudaGraphConfig(GraphImpl.full_iteration, warmup_steps=1, marks=True),
    "layer": CudaGraphConfig(GraphImpl.local, warmup_steps=1, marks=True),
}


def run_with(graph: str) -> Run:
    return make_run(MODELS["dense"], cuda_graph=GRAPHS[graph], train=TWO_MICROBATCHES)


def losses(run: Run, device: torch.device, watched: bool) -> list[tuple[float, float]]:
    plan = Plan(run)
    watchdog = Watchdog(0, 100.0) if watched else None
    engine = build_engine(plan, create_groups(plan.layout, 0), device, watchdog=watchdog)
    step, found = TrainingStep(engine), []
    for n in range(4):
        report, _ = step(easy_batches(run, n, 0), 1e-3, 0.0)
        found.append((report.loss, report.grad_norm))
    engine.release()
    assert (engine.watchdog.marks is not None) == watched
    return found


@pytest.mark.parametrize("graph", GRAPHS)
def test_marks_change_no_bit_on_a_gpu(graph: str):
    with one_gpu() as device:
        run = run_with(graph)
        assert losses(run, device, watched=True) == losses(run, device, watched=False)


def device_work(run: Run, device: torch.device, watched: bool) -> tuple[Counter[str], int]:
    """Copies between host and device and kernels of marks in a step, and the number of marks."""
    plan = Plan(run)
    watchdog = Watchdog(0, 100.0) if watched else None
    engine = build_engine(plan, create_groups(plan.layout, 0), device, watchdog=watchdog)
    step = TrainingStep(engine)
    for n in range(3):
        step(easy_batches(run, n, 0), 1e-3, 0.0)
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        step(easy_batches(run, 3, 0), 1e-3, 0.0)
        torch.cuda.synchronize()
    done: Counter[str] = Counter()
    for event in profiler.events():
        for kind in ("Memcpy DtoH", "Memcpy HtoD", "_store"):
            done[kind] += event.name.startswith(kind)
    marks = engine.watchdog.marks
    passed = 0 if marks is None else sum(len(each.marks) for each in marks.graphs)
    engine.release()
    return done, passed


@pytest.mark.parametrize("graph", GRAPHS)
def test_marks_are_kernels_and_no_copies(graph: str):
    """Copies make the kernels around them wait for a copy engine."""
    with one_gpu() as device:
        run = run_with(graph)
        marked, passed = device_work(run, device, watched=True)
        plain, _ = device_work(run, device, watched=False)
        assert marked.pop("_store") >= passed > 0
        assert plain.pop("_store") == 0
        assert marked == plain


@pytest.mark.parametrize("graph", GRAPHS)
def test_kernel_that_spins_in_a_replay_is_named(graph: str):
    """It spins behind the last phase of layer 1, within the graph."""
    with one_gpu() as device:
        run = run_with(graph)
        plan = Plan(run)
        watchdog = Watchdog(0, 100.0)
        engine = build_engine(plan, create_groups(plan.layout, 0), device, watchdog=watchdog)
        layer = engine.chunks[0].in_order[1]
        phase, spins = layer.phases[-1], [False]

        def spinning(*inputs: object) -> tuple[object, ...]:
            outputs = phase.run(*inputs)
            if spins[0] and torch.cuda.is_current_stream_capturing():
                torch.cuda._sleep(SPIN_CYCLES)
            return outputs

        layer.phases = (*layer.phases[:-1], dataclasses.replace(phase, run=spinning))
        step = TrainingStep(engine)
        step(easy_batches(run, 0, 0), 1e-3, 0.0)
        spins[0] = True
        step(easy_batches(run, 1, 0), 1e-3, 0.0)
        seen: list[str] = []

        def look() -> None:
            wait_for(lambda: bool(seen) or note())

        def note() -> bool:
            named = [each.name for each in watchdog.waits()]
            seen.extend(name for name in named if "layer 1 mlp" in name)
            return bool(seen)

        thread = threading.Thread(target=look)
        thread.start()
        step(easy_batches(run, 2, 0), 1e-3, 0.0)
        thread.join()
        assert seen[0] == "F0.0, layer 1 mlp of a graph"
        assert watchdog.marks is not None and watchdog.marks.position() is None
        engine.release()
