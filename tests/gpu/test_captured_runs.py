"""CUDA graphs in whole runs: the same bits as without, no waits, and a clean end in every case."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from app.choices import Dtype, GraphImpl, GraphScope
from app.config import CudaGraphConfig, ModelConfig, PrecisionConfig
from app.engine.build import build_engine
from app.engine.capture.facts import GraphFacts
from app.engine.files.run_folder import read_metrics
from app.engine.ranks.groups import create_groups, process_world
from app.engine.step.step import TrainingStep
from app.planner.plan import Plan
from tests.gpu.programs import GPUS, ROOT, command, losses, no_waits, rows_of
from tests.runs import TINY, batches_of, make_run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not GPUS, reason="needs a CUDA device")]
MODELS = {"moe": TINY, "dense": dataclasses.replace(TINY, moe=None)}
STOPPED = 75


@pytest.fixture
def side_stream() -> Iterator[None]:
    with torch.cuda.stream(torch.cuda.Stream()):
        yield


UPDATING = ("cuda_graph=full_iteration", "cuda_graph.optimizer=true")
GRAPHS = {
    **{name: (f"cuda_graph={name}",) for name in ("partial", "layer", "full_iteration")},
    "update": UPDATING,
}


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("model", ["moe_tiny", "dense_tiny"])
def test_a_run_with_graphs_repeats_one_without(tmp_path: Path, model: str, graph: str):
    overrides = (
        "train.steps=12",
        f"model={model}",
        "precision=bf16",
        "parallel.dp=1",
        "train.eval_interval=4",
    )
    eager = losses(tmp_path / "eager", *overrides)
    assert losses(tmp_path / "graphs", *overrides, *GRAPHS[graph]) == eager
    first, *_, last = (row for row in rows_of(tmp_path / "graphs") if "graph_count" in row)
    assert first["graph_count"] == first["graph_pool_gib"] == 0  # before capture
    assert last["graph_count"] > 0 and last["graph_pool_gib"] > 0


@pytest.mark.parametrize("model", ["moe_tiny", "dense_tiny"])
def test_a_resumed_run_validates_as_one_without_graphs(tmp_path: Path, model: str):
    """No validation before training is recorded: step 10's runs without a graph, 15's is
    captured, and 20's replayed.
    """
    fixed = (
        f"model={model}",
        "precision=bf16",
        "parallel.dp=1",
        "train.eval_interval=5",
        "optim.decay_steps=20",
    )
    graphs = (
        *fixed,
        "cuda_graph=full_iteration",
        "cuda_graph.warmup_steps=2",
        "checkpoint=default",
    )
    eager = losses(tmp_path / "eager", *fixed, "train.steps=20", first=6)
    losses(tmp_path / "graphs", *graphs, "train.steps=5")
    assert losses(tmp_path / "graphs", *graphs, "train.steps=20", "resume=auto", first=6) == eager
    found = validations(tmp_path / "graphs")
    assert found == validations(tmp_path / "eager") and [step for step, _ in found] == [
        0,
        5,
        10,
        15,
        20,
    ]


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
@pytest.mark.parametrize("graph", ["full_iteration", "update"])
@pytest.mark.parametrize("overlap", ["true", "false"])
@pytest.mark.parametrize("layout", ["parallel.dp=2", "parallel.tp=2", "parallel.pp=2"])
def test_full_iteration_graph_gathers_parameters(
    tmp_path: Path, layout: str, overlap: str, graph: str
):
    """After every step a validation, whose graph leaves everything whole, and a new process."""
    fixed = (
        "model=dense_tiny",
        "precision=bf16",
        layout,
        "train.eval_interval=1",
        "optim.bucket_numel=20000",
        "optim.decay_steps=12",
    )
    graphs = (
        *fixed,
        f"optim.overlap_params={overlap}",
        *GRAPHS[graph],
        "cuda_graph.warmup_steps=1",
        "checkpoint=default",
    )
    eager = losses(tmp_path / "eager", *fixed, "train.steps=12", first=7)
    losses(tmp_path / "graphs", *graphs, "train.steps=6")
    assert losses(tmp_path / "graphs", *graphs, "train.steps=12", "resume=auto", first=7) == eager
    assert validations(tmp_path / "graphs") == validations(tmp_path / "eager")


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_split_backwards_and_skipped_updates_in_one_graph(tmp_path: Path, precision: str):
    """Two stages; learning rate and weight decay change in every step, and in fp16 a loss scale
    that rises with each lets gradients overflow again and again.
    """
    fixed = (
        "model=dense_tiny",
        f"precision={precision}",
        "precision.loss_scale_window=1",
        "precision.loss_scale_hysteresis=1",
        "parallel.pp=2",
        "schedule=zero_bubble_h1",
        "optim.warmup_steps=4",
        "optim.decay_steps=40",
        "train.steps=40",
    )
    eager, captured = (
        [
            (row["loss"], row["grad_norm"], row["lr"], row.get("loss_scale"))
            for row in run_rows(tmp_path / name, *fixed, *graph)
        ]
        for name, graph in (("eager", ()), ("graphs", UPDATING))
    )
    assert repr(captured) == repr(eager)  # nan is not nan
    assert (len({row[2] for row in eager}) < len(eager)) == (precision == "fp16"), "skipped"


def run_rows(folder: Path, *overrides: str) -> list[dict[str, Any]]:
    """The metrics of every step of a run."""
    losses(folder, *overrides)
    return rows_of(folder)


def validations(folder: Path) -> list[tuple[int, float]]:
    """(step, loss) of every validation of a run."""
    return [(row["step"], row["val_loss"]) for row in read_metrics(folder) if "val_loss" in row]


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_nothing_between_input_and_update_waits_for_the_device(
    model: ModelConfig, side_stream: None
):
    run = make_run(model, precision=PrecisionConfig(Dtype.bfloat16))
    with process_world(0, 1, torch.device("cuda:0")):
        plan = Plan(run)
        step = TrainingStep(
            build_engine(plan, create_groups(plan.layout, 0), torch.device("cuda:0"))
        )
        assert not any(
            phase.host_sync
            for layer in step.engine.chunks[0].layers.values()
            for phase in layer.phases
        )
        attempt = step.eager

        def without_waits(given: object) -> object:
            with no_waits():
                return attempt(given)

        step.eager = step.captured = without_waits
        for n in range(2):
            step(batches_of(run, n, 0), run.optim.lr, 0.1)


LEAKING = {
    "attn": CudaGraphConfig(GraphImpl.local, (GraphScope.attn,)),
    "full_iteration": CudaGraphConfig(GraphImpl.full_iteration),
    "update": CudaGraphConfig(GraphImpl.full_iteration, optimizer=True),
}


@pytest.mark.parametrize("graph", LEAKING.values(), ids=LEAKING)
def test_three_hundred_steps_leak_nothing(graph: CudaGraphConfig, side_stream: None):
    run = make_run(TINY, precision=PrecisionConfig(Dtype.bfloat16), cuda_graph=graph)
    with process_world(0, 1, torch.device("cuda:0")):
        plan = Plan(run)
        engine = build_engine(plan, create_groups(plan.layout, 0), torch.device("cuda:0"))
        step, seen = TrainingStep(engine), []
        for n in range(300):
            step(batches_of(run, n, 0), run.optim.lr, 0.1)
            seen.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
        assert len(set(seen[10:])) == 1
        assert GraphFacts.of(engine.recorder).count > 0
        engine.release()


@pytest.mark.parametrize("graph", ["partial", "full_iteration", "update"])
def test_a_signal_ends_a_run_with_graphs(tmp_path: Path, graph: str):
    gpus = min(GPUS, 2)
    overrides = (
        "train.steps=100000",
        "precision=bf16",
        *GRAPHS[graph],
        f"parallel.pp={gpus}",
        "model.num_layers=4",
    )
    with subprocess.Popen(
        command(tmp_path / "run", *overrides), cwd=ROOT, stderr=subprocess.PIPE, text=True
    ) as process:
        metrics, since = tmp_path / "run" / "metrics.jsonl", time.monotonic()
        while not (metrics.exists() and len(metrics.read_text().splitlines()) > 10):
            assert process.poll() is None and time.monotonic() - since < 120, process.communicate()[
                1
            ][-2000:]
            time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)
        assert process.returncode == STOPPED


FAILING = """
import os
import torch
from app.choices import Dtype, GraphImpl
from app.cli.start.launch import Launch
from app.config import CudaGraphConfig, ParallelConfig, PrecisionConfig
from app.engine.build import build_engine
from app.engine.ranks.groups import create_groups, process_world
from app.engine.step.step import TrainingStep
from app.engine.run.train import closing_graphs
from app.planner.plan import Plan
from tests.runs import TINY, batches_of, make_run
import dataclasses

launch = Launch.from_environment(os.environ)
world, device = launch.world_size or 1, torch.device("cuda", launch.local_rank)
torch.cuda.set_device(device)
torch.cuda.set_stream(torch.cuda.Stream())
graph = CudaGraphConfig(GraphImpl("GRAPH"))
bf16 = PrecisionConfig(Dtype.bfloat16)
model = dataclasses.replace(TINY, num_layers=4)
run = make_run(model, cuda_graph=graph, parallel=ParallelConfig(pp=world), precision=bf16)
with process_world(launch.rank, world, device):
    plan = Plan(run)
    engine = build_engine(plan, create_groups(plan.layout, launch.rank), device)
    with closing_graphs(engine):
        step = TrainingStep(engine)
        for n in range(100):
            step(batches_of(run, n, 0), 0.0, 0.0)
            if n == 6 and launch.rank == 0:
                raise RuntimeError("on purpose")
"""


@pytest.mark.parametrize("graph", ["local", "full_iteration"])
def test_an_error_ends_a_run_with_graphs(tmp_path: Path, graph: str):
    program = tmp_path / "failing.py"
    program.write_text(FAILING.replace("GRAPH", graph))
    line = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(min(GPUS, 2)),
        str(program),
    ]
    paths = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    found = subprocess.run(
        line, capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": paths}
    )
    assert (
        found.returncode == 1 and "on purpose" in found.stderr and "exitcode  : 1" in found.stderr
    )
