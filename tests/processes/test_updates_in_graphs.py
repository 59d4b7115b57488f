"""`cuda_graph.optimizer`: full-iteration graphs update parameters as eager steps do, bit for bit.

A skipped step changes nothing: all values that differ between steps are read on the device.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from app.choices import (
    DispatcherKind,
    Dtype,
    Fp8Recipe,
    GraphImpl,
    ScheduleName,
    Score,
    StaticCapacity,
)
from app.config import (
    CudaGraphConfig,
    Fp8Config,
    ParallelConfig,
    PrecisionConfig,
    Run,
    ScheduleConfig,
    TrainConfig,
)
from app.config.experts import StaticConfig
from app.engine.files.run_folder import read_metrics
from app.engine.files.signals import StopRequest
from app.engine.step import shortage
from app.engine.step import step as stepping
from app.engine.step.engine import Engine
from app.engine.step.records import StepInput
from app.engine.step.shortage import RowShortage
from app.engine.step.step import TrainingStep
from app.errors import ConfigError
from app.fp8.linear import Fp8Layers
from app.optim.distributed import DistributedOptimizer
from app.rules import check
from tests.cases import chosen
from tests.distributed import run_distributed
from tests.processes.captured import EAGER, FOUR, UPDATING, WARMUP
from tests.processes.gathers_in_graphs import replays_as_on_a_gpu
from tests.runs import batches_of, engine_of, make_run
from tests.training import composed, corpus_in, train_rank

STEPS = WARMUP + 5
BAD = WARMUP + 2  # the second step that is replayed
DENSE = dataclasses.replace(FOUR, moe=None)
BIASED = dataclasses.replace(
    FOUR,
    moe=dataclasses.replace(
        FOUR.moe,
        score=Score.sigmoid,
        bias_update_rate=0.01,
        dispatcher=DispatcherKind.static,
    ),
)
SPLIT = ScheduleConfig(ScheduleName.zero_bubble_h1)
PP2_EP2 = ParallelConfig(pp=2, ep=2, dp=2)
DELAYED = Fp8Config(Fp8Recipe.delayed, amax_history=3)
# doubles after every clean step, until gradients overflow again
RISING = PrecisionConfig(
    Dtype.float16, initial_loss_scale=2.0**17, loss_scale_window=1, loss_scale_hysteresis=1
)
CASES: dict[str, dict[str, Any]] = {
    "one rank": {"model": BIASED},
    "dp2": {"model": DENSE, "parallel": ParallelConfig(dp=2)},
    "pp2 ep2, zero bubble": {"model": BIASED, "parallel": PP2_EP2, "schedule": SPLIT},
    "pp2, zero bubble, FP8": {
        "model": DENSE,
        "parallel": ParallelConfig(pp=2),
        "schedule": SPLIT,
        "precision": PrecisionConfig(Dtype.bfloat16, fp8=DELAYED),
    },
    "dp2, rising loss scale": {
        "model": DENSE,
        "parallel": ParallelConfig(dp=2),
        "precision": RISING,
    },
}


def state_of(engine: Engine) -> list[Tensor]:
    """Copies of all that an update changes on this rank."""
    found = [
        value
        for owned in engine.optimizer.param_shards()
        for value in (*owned.state.values(), owned.step)
    ]
    found += [router.bias_E for _, router in engine.routers()]
    fp8 = engine.state(Fp8Layers)
    if fp8 is not None and fp8.scales is not None:
        found += [fp8.scales.scales_M, fp8.scales.history_HM]
    return [value.clone() for value in found]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(map(torch.equal, one, other)) and len(one) == len(other)


@contextmanager
def updates_counted() -> Iterator[list[str]]:
    """Record whether each update within the block was captured or eager.

    A stop known to the host must not be read within a graph: its replays would not see it change.
    """
    told: list[str] = []
    inside: list[str] = []
    step = DistributedOptimizer.step
    in_graph = DistributedOptimizer.in_graph

    def looked_at(request: StopRequest) -> bool:
        assert not inside, "a recording reads the device alone"
        return request.__dict__["wanted"]

    def written(request: StopRequest, wanted: bool) -> None:
        request.__dict__["wanted"] = wanted

    def updated(optimizer: DistributedOptimizer, *given: Any) -> Tensor:
        told.append("in graph" if inside else "eager")
        return step(optimizer, *given)

    @contextmanager
    def noted(optimizer: DistributedOptimizer, updates: bool = False) -> Iterator[None]:
        inside.append("")
        with in_graph(optimizer, updates):
            yield
        inside.pop()

    with (
        mock.patch.object(DistributedOptimizer, "step", updated),
        mock.patch.object(DistributedOptimizer, "in_graph", noted),
        mock.patch.object(StopRequest, "wanted", property(looked_at, written), create=True),
    ):
        yield told


def poisoned(bad: int) -> Any:
    """Makes inputs of steps; those of the `bad` one give a loss that is not a number."""
    make, count = stepping.step_input, itertools.count()

    def step_input(*given: Any, **named: Any) -> StepInput:
        step = make(*given, **named)
        factor = math.nan if next(count) == bad else 1.0
        return dataclasses.replace(step, loss_weights_M=step.loss_weights_M * factor)

    return step_input


def history(rank: int, run: Run, bad: int | None) -> dict[str, Any]:
    """Return metrics and final state of steps whose rates differ from step to step."""
    torch.manual_seed(rank)
    engine = engine_of(run, rank)
    told, changed, skipped, stops, state = [], [], [], [], state_of(engine)
    inputs = stepping.step_input if bad is None else poisoned(bad)
    with (
        mock.patch.object(stepping, "step_input", inputs),
        replays_as_on_a_gpu(engine),
        updates_counted() as updates,
    ):
        step = TrainingStep(engine)
        for n in range(STEPS):
            if n == STEPS - 1:
                step.request.ask()
            facts, _ = step(batches_of(run, n, engine.groups.dp_rank), 1e-2 / (1 + n), 0.1 * n)
            before, state = state, state_of(engine)
            changed.append(not equal(before, state))
            skipped.append(bool(facts.skipped))
            stops.append(step.stops)
            facts = dataclasses.replace(facts, data_wait_ms=0.0)  # measured
            # nan is not nan
            told.append((repr(facts), [value.numpy().tobytes() for value in state]))
    engine.release()
    return {
        "told": told,
        "changed": changed,
        "skipped": skipped,
        "stops": stops,
        "updates": updates,
    }


def histories(rank: int, runs: dict[str, Run], bad: int | None) -> dict[str, dict[str, Any]]:
    return {name: history(rank, run, bad) for name, run in runs.items()}


QUICK = ["one rank", "dp2, rising loss scale"]


@pytest.mark.parametrize("case", chosen(CASES, QUICK))
def test_captured_steps_update_as_eager_and_skip_bad_ones(case: str):
    sections = dict(CASES[case])
    model = sections.pop("model")
    runs = {
        name: make_run(model, cuda_graph=graph, **sections)
        for name, graph in (("eager", EAGER), ("captured", UPDATING))
    }
    bad = None if "loss scale" in case else BAD
    for found in run_distributed(histories, runs["eager"].world_size, runs, bad):
        eager, captured = found["eager"], found["captured"]
        assert captured["told"] == eager["told"]
        assert captured["updates"] == ["eager"] * WARMUP + ["in graph"] * (STEPS - WARMUP)
        assert eager["updates"] == ["eager"] * STEPS
        skipped = captured["skipped"]
        assert captured["changed"] == [not each for each in skipped]
        if bad is not None:
            assert skipped == [n == bad for n in range(STEPS)]
        assert any(skipped[WARMUP + 1 :]) and not all(skipped[WARMUP + 1 :])  # by replays
        assert captured["stops"] == [n == STEPS - 1 for n in range(STEPS)]


def rerun_states(rank: int, run: Run) -> dict[str, Any]:
    """Return the state before every rerun step, and after its first attempt."""
    shortage.IN_A_ROW = 10**9
    torch.manual_seed(rank)
    engine = engine_of(run, rank)
    seen: list[Any] = []
    kept: list[Any] = []
    begin, again = RowShortage.begin, RowShortage.again

    def noting(watched: RowShortage) -> None:
        kept.append([state_of(engine)])
        begin(watched)

    @contextmanager
    def repeating(watched: RowShortage) -> Iterator[None]:
        kept[-1].append(state_of(engine))
        with again(watched):
            yield

    with (
        mock.patch.object(RowShortage, "begin", noting),
        mock.patch.object(RowShortage, "again", repeating),
        replays_as_on_a_gpu(engine),
        updates_counted() as updates,
    ):
        step = TrainingStep(engine)
        for n in range(STEPS):
            facts, _ = step(batches_of(run, n, engine.groups.dp_rank), 1e-3 / (1 + n), 0.1)
            seen.append((facts.loss, facts.grad_norm, facts.skipped))
    found = {
        "seen": seen,
        "state": [value.numpy().tobytes() for value in state_of(engine)],
        "again": [len(states) - 1 for states in kept],
        "untouched": [equal(*states) for states in kept if len(states) == 2],
        "updates": updates,
    }
    engine.release()
    return found


@pytest.mark.parametrize("parallel", chosen(["ep2", "pp2 ep2"], ["ep2"]))
def test_rerun_step_updates_only_once(parallel: str):
    layouts = {
        "ep2": {"parallel": ParallelConfig(ep=2, dp=2)},
        "pp2 ep2": {"parallel": PP2_EP2, "schedule": SPLIT},
    }
    train = TrainConfig(steps=20, seq_len=248, micro_batch=2, global_batch=8)
    results = []
    for graph, limits in (
        (EAGER, StaticConfig(capacity=StaticCapacity.worst)),
        (UPDATING, StaticConfig(capacity=StaticCapacity.factor, factor=1.1)),
    ):
        moe = dataclasses.replace(BIASED.moe, static=limits, first_k_dense=0)
        model = dataclasses.replace(BIASED, num_layers=2, moe=moe)
        run = make_run(model, train=train, cuda_graph=graph, **layouts[parallel])
        results.append(run_distributed(rerun_states, run.world_size, run))
    for exact, found in zip(*results, strict=True):
        assert found["seen"] == exact["seen"] and found["state"] == exact["state"]
        assert 0 < sum(found["again"][WARMUP + 1 :]) < STEPS - WARMUP - 1, "of those replayed"
        assert found["untouched"] == [True] * sum(found["again"]) and not sum(exact["again"])
        wanted = [
            way
            for n, again in enumerate(found["again"])
            for way in ("eager" if n < WARMUP else "in graph", *["eager"] * again)
        ]
        assert found["updates"] == wanted


@pytest.mark.full
def test_whole_runs_with_schedules_and_a_resume(tmp_path: Path):
    """Two stages, a split backward, warm-up and decay of the learning rate; a stop and a
    second process in the middle.
    """
    fixed = (
        *corpus_in(tmp_path),
        "model.num_layers=2",
        "parallel.pp=2",
        "schedule=zero_bubble_h1",
        "optim.warmup_steps=4",
        "optim.decay_steps=12",
        "train.eval_interval=3",
    )
    graphs = (
        *fixed,
        "cuda_graph=full_iteration",
        "cuda_graph.optimizer=true",
        "cuda_graph.warmup_steps=2",
        f"run_dir={tmp_path}/graphs",
    )
    for overrides in (
        (*fixed, "train.steps=12", f"run_dir={tmp_path}/eager"),
        (*graphs, "train.steps=6", "checkpoint.interval=6"),
        (*graphs, "train.steps=12", "resume=auto"),
    ):
        run_distributed(train_rank, 2, composed(overrides, 2), {})
    keys = ("step", "loss", "grad_norm", "lr", "weight_decay", "val_loss", "graph_count")
    eager, resumed = (
        [{key: row.get(key) for key in keys} for row in read_metrics(tmp_path / name)]
        for name in ("eager", "graphs")
    )
    counts = [row.pop("graph_count") for row in resumed if row["loss"] is not None]
    assert [int(count > 0) for count in counts] == [0, 0, 1, 1, 1, 1] * 2
    for row in (*eager, *resumed):
        row.pop("graph_count", None)
    assert resumed == eager
    assert len({row["lr"] for row in eager} - {None}) == 12


@pytest.mark.parametrize("impl", [GraphImpl.none, GraphImpl.local])
def test_only_full_iteration_captures_update(impl: GraphImpl):
    run = make_run()
    graph = CudaGraphConfig(impl, optimizer=True)
    with pytest.raises(ConfigError, match=rf"cuda_graph\.optimizer=true: .* impl={impl.value} ca"):
        check(dataclasses.replace(run, cuda_graph=graph))
