"""Parts of layers captured by Transformer Engine on GPUs: eager training bit for bit, as many
graphs and as much static memory as planned, and nothing that grows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from app.choices import Dtype, GraphImpl, GraphKey, GraphScope
from app.config import CudaGraphConfig, PrecisionConfig
from app.engine.build import build_engine
from app.engine.capture.facts import GraphFacts
from app.engine.groups import create_groups, process_world
from app.engine.pipeline.step import TrainingStep
from app.plan.plan import Plan
from tests.gpu.programs import GPUS, losses, rows_of
from tests.runs import TINY, batches_of, make_run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not GPUS, reason="needs a CUDA device"),
    pytest.mark.skipif(find_spec("transformer_engine") is None, reason="needs Transformer Engine"),
]
STEPS = 20
LAYOUTS = {
    "one rank": ("parallel.dp=1",),
    "pp2": ("parallel.pp=2",),
    "pp2 vpp2": ("parallel.pp=2", "parallel.vpp=2"),
}
PARTS = (GraphScope.attn, GraphScope.mlp, GraphScope.moe_router, GraphScope.moe_preprocess)
FOUR = dataclasses.replace(TINY, num_layers=4)


@pytest.fixture
def side_stream() -> Iterator[None]:
    with torch.cuda.stream(torch.cuda.Stream()):
        yield


@pytest.mark.parametrize("model", ["dense_tiny", "moe_tiny"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_repeats_eager_training_bit_for_bit(tmp_path: Path, layout: str, model: str):
    if layout != "one rank" and GPUS < 2:
        pytest.skip("needs two GPUs")
    fixed = (
        f"model={model}",
        "model.num_layers=4",
        "precision=bf16",
        f"train.steps={STEPS}",
        *LAYOUTS[layout],
    )
    eager = losses(tmp_path / "eager", *fixed)
    for name, graph in {
        "partial": ("cuda_graph=partial",),
        "layer": ("cuda_graph=layer",),
        "by slot": ("cuda_graph=partial", "cuda_graph.key=slot"),
    }.items():
        overrides = (*fixed, *graph, "cuda_graph.impl=transformer_engine")
        assert losses(tmp_path / name, *overrides) == eager, name
        assert rows_of(tmp_path / name)[-1]["graph_count"] > 0


@pytest.mark.parametrize("key", list(GraphKey), ids=lambda key: key.value)
@pytest.mark.parametrize("dense", [True, False], ids=["dense", "moe"])
def test_graphs_are_as_planned_and_leak_nothing(dense: bool, key: GraphKey, side_stream: None):
    model = dataclasses.replace(FOUR, moe=None) if dense else FOUR
    graph = CudaGraphConfig(GraphImpl.transformer_engine, PARTS, key=key)
    run = make_run(model, precision=PrecisionConfig(Dtype.bfloat16), cuda_graph=graph)
    with process_world(0, 1, torch.device("cuda:0")):
        plan = Plan(run)
        engine = build_engine(plan, create_groups(plan.layout, 0), torch.device("cuda:0"))
        step, seen = TrainingStep(engine), []
        for n in range(100):
            step(batches_of(run, n, 0), run.optim.lr, 0.1)
            seen.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
        assert len(set(seen[10:])) == 1
        facts, parts = GraphFacts.of(engine.recorder), plan.memory[0].parts
        assert plan.graphs[0] is not None and facts.count == plan.graphs[0].num_graphs
        planned = next(part.bytes for part in parts if part.name == "static inputs")
        assert 0 <= facts.static - planned <= 32  # gradients of routers' losses, a number each
        assert facts.cut > 0 and facts.pool > 0
        engine.release()
        with pytest.raises(RuntimeError, match="can no longer be used"):
            step(batches_of(run, 0, 0), 0.0, 0.0)
