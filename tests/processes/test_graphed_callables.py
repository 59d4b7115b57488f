"""Parts of layers captured by Transformer Engine equal eager training, on a stand-in that keeps its
contract.
"""

from __future__ import annotations

import dataclasses
import sys
import types
from importlib import metadata
from pathlib import Path

import pytest
import torch

from app.choices import GraphImpl, GraphKey, GraphScope, Recompute, StaticCapacity
from app.config import (
    CudaGraphConfig,
    OptimConfig,
    ParallelConfig,
    RecomputeConfig,
    Run,
    TrainConfig,
)
from app.engine.capture.transformer_engine import CapturedPart, graphed_callables
from app.engine.files.run_folder import read_metrics
from app.engine.ranks.groups import create_groups, process_world
from app.engine.step.step import TrainingStep
from app.errors import ConfigError
from app.optim.grad_buckets import GradBuckets
from app.plan.graphs import PoolOrder
from app.planner.plan import Plan
from tests.cases import chosen
from tests.distributed import run_distributed
from tests.graphed_callables import install
from tests.processes.captured import (
    EAGER,
    FOUR,
    LAYOUTS,
    MODELS,
    SCOPES,
    STEPS,
    WARMUP,
    run_of,
    same,
    several,
    trained,
)
from tests.processes.static import NEVER, short_run, steps_of, steps_with_all_rows
from tests.runs import batches_of, engine_of
from tests.training import composed, corpus_in, train_rank

BY_SLOT = GraphKey.slot


def captured(scope: str, key: GraphKey = GraphKey.microbatch) -> CudaGraphConfig:
    parts = tuple(map(GraphScope, SCOPES[scope]))
    return CudaGraphConfig(GraphImpl.transformer_engine, parts, WARMUP, key)


CHOICES = {**{scope: captured(scope) for scope in SCOPES},
           "layer by slot": captured("layer", BY_SLOT),
           "partial by slot": captured("partial", BY_SLOT)}  # fmt: skip
CASES = [(layout, model) for layout in LAYOUTS for model in ("moe", "dense", "biased")
         if (layout, model) != ("ep2", "dense")]  # fmt: skip
WIDEST = ("partial", "partial by slot", "attn and moe", "layer", "layer by slot")
QUICK = [("pp2", "biased", WIDEST)]


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)


@pytest.mark.parametrize(
    ("layout", "model", "choices"),
    chosen([*QUICK, *((*case, tuple(CHOICES)) for case in CASES)], QUICK),
)
def test_it_equals_eager_training_bit_for_bit(layout: str, model: str, choices: tuple[str, ...]):
    runs = {"eager": run_with(EAGER, layout, model)}
    for name in choices:
        try:
            runs[name] = run_with(CHOICES[name], layout, model)
        except ConfigError:  # no such layers, or an exchange of tokens within
            assert (model, name) == ("dense", "moe") or layout in ("ep2", "tp2")
    for results in run_distributed(several, runs["eager"].world_size, runs):
        eager = results.pop("eager")
        for name, result in results.items():
            assert same(result, eager), name
            assert result["facts"].count == result["planned"], name
            assert result["facts"].count or name in ("mlp", "moe")  # a rank may have no such layers


def run_with(graph: CudaGraphConfig, layout: str, model: str) -> Run:
    optim = OptimConfig(lr=1e-2, bucket_numel=1500)
    return run_of(MODELS[model], graph, parallel=LAYOUTS[layout], optim=optim)


def memory_of(rank: int, runs: dict[int, Run]) -> list[tuple[int, int, int, int]]:
    """Bytes of static memory, as planned, of what leaves graphs and of their pools."""
    found = []
    for run in runs.values():
        facts = trained(rank, run)["facts"]
        stage = create_groups(Plan(run).layout, rank).pp_rank
        parts = {part.name: part.bytes for part in Plan(run).memory[stage].parts}
        found.append((facts.static, parts["static inputs"], facts.cut, facts.pool))
    return found


@pytest.mark.full
@pytest.mark.parametrize("scope", ["partial", "layer"])
@pytest.mark.parametrize("key", list(GraphKey), ids=lambda key: key.value)
@pytest.mark.parametrize("layout", chosen(["one rank", "pp2", "pp2 vpp2"], ["pp2"]))
def test_static_memory_is_constant_and_holds_planned_inputs(layout: str, key: GraphKey, scope: str):
    runs = {}
    for count in (4, 8):
        train = TrainConfig(steps=20, seq_len=16, micro_batch=2, global_batch=2 * count)
        graph = captured(scope, key)
        runs[count] = run_of(MODELS["moe"], graph, parallel=LAYOUTS[layout], train=train)
    for found in run_distributed(memory_of, runs[4].world_size, runs):
        static, planned, cut, pool = found[0]
        # rotary positions and gradients of outputs, which plans count with the activations
        assert cut > 0 and static >= planned > 0
        for sizes in found:
            assert sizes[:2] == (static, planned)
            assert sum(sizes[2:]) <= 1.01 * (cut + pool), found


@pytest.mark.full
@pytest.mark.parametrize("phases", [(Recompute.attn_core, Recompute.norm, Recompute.mlp_act)])
def test_recomputation_and_noise_within_captured_parts(phases: tuple[Recompute, ...]):
    again = RecomputeConfig(phases=phases)
    with process_world(0, 1, torch.device("cpu")):
        eager, graphs = (
            trained(0, run_of(FOUR, graph, recompute=again))
            for graph in (EAGER, captured("partial"))
        )
        assert same(graphs, eager)
        noisy = dataclasses.replace(FOUR, moe=dataclasses.replace(FOUR.moe, jitter_eps=0.1))
        eager, graphs = (trained(0, run_of(noisy, graph)) for graph in (EAGER, captured("partial")))
        assert same(graphs, eager)


def test_gradients_arrive_from_replays_as_from_eager_steps(monkeypatch: pytest.MonkeyPatch):
    """So reductions begin beside backward; and what is only reported holds no graph of autograd."""
    arrived: list[tuple[int, int]] = []
    arrive = GradBuckets.arrive

    def noted(self: GradBuckets, bucket: int) -> None:
        if not self._listing:
            arrived.append((self.buffer.layout.numel, bucket))
        arrive(self, bucket)

    monkeypatch.setattr(GradBuckets, "arrive", noted)
    found = []
    with process_world(0, 1, torch.device("cpu")):
        for graph in (EAGER, captured("partial")):
            run = run_of(FOUR, graph)
            step = TrainingStep(engine_of(run))
            for n in range(STEPS):
                arrived.clear()
                totals = step(batches_of(run, n, 0), 0.0, 0.0)[1]
                assert not totals.aux_loss.requires_grad and not totals.z_loss.requires_grad
                found.append(sorted(arrived))
    assert len(found[0]) > 50 and found == [found[0]] * (2 * STEPS)


def test_what_leaves_is_contiguous():
    part = CapturedPart([lambda x_BsD: {"x": x_BsD.mT * 2, "norm": x_BsD.norm()}])
    x_BsD = torch.randn(2, 3, 4)
    out, norm = part(x_BsD)
    assert out.is_contiguous() and torch.equal(out, x_BsD.mT * 2) and norm.shape == ()


def told_otherwise(rank: int, run: Run) -> None:
    """On the first rank, where two microbatches are in flight, one at a time is captured."""
    step = TrainingStep(engine_of(run, rank))
    plan = step.graphs.plan
    mbs = plan.orders[0].firsts[0]
    if len(mbs) > 1:
        order = PoolOrder((0,), (mbs,), order=(1, -1) * len(mbs))
        step.graphs.plan = dataclasses.replace(plan, orders={0: order})
    for n in range(WARMUP + 1):
        step(batches_of(run, n, 0), 0.0, 0.0)


def test_another_order_than_the_list_is_noticed():
    run = run_of(MODELS["dense"], captured("layer"), parallel=ParallelConfig(pp=2))
    with pytest.raises(AssertionError, match="in the order of capture"):
        run_distributed(told_otherwise, 2, run)


@pytest.mark.full
def test_a_resumed_run_resumes_as_one_without_graphs(tmp_path: Path):
    settings = (*corpus_in(tmp_path), "checkpoint.interval=5")
    graphs = (
        *settings,
        "cuda_graph=partial",
        "cuda_graph.impl=transformer_engine",
        "cuda_graph.warmup_steps=2",
        f"run_dir={tmp_path}/graphs",
    )
    starts = (
        (*settings, "train.steps=12", f"run_dir={tmp_path}/eager"),
        (*graphs, "train.steps=5"),
        (*graphs, "train.steps=12", "resume=auto"),
    )
    for overrides in starts:
        assert run_distributed(train_rank, 1, composed(overrides, 1), {})[0][0]
    eager, resumed = (
        [(row["step"], row["loss"], row["grad_norm"], row["graph_count"] if name == "graphs" else 0)
         for row in read_metrics(tmp_path / name) if "loss" in row]
        for name in ("eager", "graphs")
    )  # fmt: skip
    assert [row[:3] for row in resumed] == [row[:3] for row in eager] and len(eager) == 12
    # capture is in the third step of a process
    assert [row[3] > 0 for row in resumed] == [n in (2, 3, 4) or n > 6 for n in range(12)]


def test_nothing_is_replayed_after_its_release():
    run = run_of(FOUR, captured("layer"))
    with process_world(0, 1, torch.device("cpu")):
        engine = engine_of(run)
        step = TrainingStep(engine)
        for n in range(WARMUP + 1):
            step(batches_of(run, n, 0), 0.0, 0.0)
        assert engine.recorder.recordings
        engine.release()
        with pytest.raises(RuntimeError, match="can no longer be used"):
            step(batches_of(run, 0, 0), 0.0, 0.0)


@pytest.mark.parametrize(
    ("package", "said"),
    [
        (None, "Transformer Engine cannot be loaded: import of transformer_engine.* halted"),
        ("2.19.1", "Transformer Engine 2.19.1 is older than 2.20"),
        (types.SimpleNamespace(), "too old: it has no make_graphed_callables"),
        (
            types.SimpleNamespace(make_graphed_callables=lambda modules, _order=None: None),
            "too old: make_graphed_callables lacks _num_layers_per_chunk",
        ),
    ],
    ids=["broken", "by its version", "older", "old"],
)
def test_missing_transformer_engine_gets_one_line_of_advice(
    monkeypatch: pytest.MonkeyPatch, package: object, said: str
):
    version = package if isinstance(package, str) else "2.20rc1"
    monkeypatch.setattr(metadata, "version", lambda name: version)
    monkeypatch.setitem(sys.modules, "transformer_engine", package)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", package)
    with pytest.raises(ConfigError, match=said) as refused:
        graphed_callables()
    assert str(refused.value).endswith(
        "; pip install 'graphfold[gpu]' --no-build-isolation, or cuda_graph.impl=local"
    )


@pytest.mark.full
@pytest.mark.parametrize("in_a_row", [2, NEVER], ids=str)
@pytest.mark.parametrize("scope", ["partial", "layer"])
def test_what_its_trial_run_lacks_is_no_shortage(scope: str, in_a_row: int):
    """The warm-up runs layers on zeros, which all go to the same experts.

    No step is rerun for that; if memory grows, everything is captured again.
    """
    worst = steps_with_all_rows()
    eager, found = (
        run_distributed(steps_of, 2, short_run(graph, StaticCapacity.factor), in_a_row)
        for graph in (EAGER, captured(scope))
    )
    assert 0 < sum(eager[0]["again"]) < len(eager[0]["again"])
    for ours, exact, plain in zip(found, worst, eager, strict=True):
        assert ours["seen"] == exact["seen"] and ours["again"] == plain["again"]
