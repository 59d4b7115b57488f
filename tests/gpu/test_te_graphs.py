"""Parts of layers captured by Transformer Engine on GPUs: eager training bit for bit, as many
graphs as planned, and nothing that grows.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch

from app.choices import Dtype, GraphImpl, GraphKey, GraphScope
from app.config import CudaGraphConfig, ParallelConfig, PrecisionConfig, Run
from app.engine.build import build_engine
from app.engine.capture.facts import GraphFacts
from app.engine.ranks.groups import create_groups, process_world
from app.engine.step.step import TrainingStep
from app.planner.plan import Plan
from tests.gpu.in_process import print_trained, trained_alone
from tests.gpu.programs import GPUS, printed_by_ranks
from tests.runs import TINY, batches_of, make_run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not GPUS, reason="needs a CUDA device"),
    pytest.mark.skipif(find_spec("transformer_engine") is None, reason="needs Transformer Engine"),
]
STEPS = 120  # corruption has been seen to begin after eighty
FOUR = dataclasses.replace(TINY, num_layers=4)
MODELS = {"moe": FOUR, "dense": dataclasses.replace(FOUR, moe=None)}
PARTS = (GraphScope.attn, GraphScope.mlp, GraphScope.moe_router, GraphScope.moe_preprocess)
EAGER = CudaGraphConfig()
GRAPHS = {
    "partial": CudaGraphConfig(GraphImpl.transformer_engine, PARTS),
    "layer": CudaGraphConfig(GraphImpl.transformer_engine),
    "by slot": CudaGraphConfig(GraphImpl.transformer_engine, PARTS, key=GraphKey.slot),
}
LAYOUTS = {"pp2": ParallelConfig(pp=2), "pp2 vpp2": ParallelConfig(pp=2, vpp=2)}


def run_of(model: str, graph: CudaGraphConfig, parallel: ParallelConfig | None = None) -> Run:
    return make_run(
        MODELS[model],
        precision=PrecisionConfig(Dtype.bfloat16),
        cuda_graph=graph,
        parallel=parallel or ParallelConfig(),
    )


@pytest.mark.parametrize("model", MODELS)
def test_it_repeats_eager_training_bit_for_bit(model: str):
    eager = trained_alone(run_of(model, EAGER), steps=STEPS)
    for name, graph in GRAPHS.items():
        assert trained_alone(run_of(model, graph), steps=STEPS) == eager, name


CASES = {
    f"{model}, {layout}": [run_of(model, graph, parallel) for graph in (EAGER, *GRAPHS.values())]
    for model, (layout, parallel) in itertools.product(MODELS, LAYOUTS.items())
}


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
def test_two_stages_repeat_eager_training_bit_for_bit():
    found = dict(printed_by_ranks(__file__, 2))
    assert found.keys() == CASES.keys()
    for case, (eager, *others) in found.items():
        assert len(eager) == STEPS
        for name, graphs in zip(GRAPHS, others, strict=True):
            assert graphs == eager, (case, name)


@pytest.fixture
def side_stream() -> Iterator[None]:
    with torch.cuda.stream(torch.cuda.Stream()):
        yield


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
        assert facts.static >= planned > 0  # also rotary positions and gradients of outputs
        assert facts.cut > 0 and facts.pool > 0
        engine.release()
        with pytest.raises(RuntimeError, match="can no longer be used"):
            step(batches_of(run, 0, 0), 0.0, 0.0)


if __name__ == "__main__":
    print_trained(CASES, steps=STEPS)
