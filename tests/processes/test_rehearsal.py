"""A rank rehearsed alone against the same rank of a run over gloo: memory, messages, tokens."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from app import collectives
from app.choices import CpComm, DispatcherKind, GraphImpl, ScheduleName, StaticTransport
from app.cli import rehearse as program
from app.cli.plan import main
from app.config import (
    CudaGraphConfig,
    ParallelConfig,
    RecomputeConfig,
    Run,
    ScheduleConfig,
    TrainConfig,
)
from app.config.experts import EchoConfig, StaticConfig
from app.engine.build import build_engine
from app.engine.ranks.groups import create_groups
from app.engine.rehearsal.clock import Alive, Noting, TensorMeter, WorkClock
from app.engine.rehearsal.faked import Message
from app.engine.rehearsal.rehearse import batches_of, refuse_what_needs_others, rehearse
from app.engine.rehearsal.rows import planned_rows
from app.engine.step.executor import Transport
from app.engine.step.step import TrainingStep
from app.errors import ConfigError
from app.plan.parts.dispatcher import run_dispatcher, tokens_per_rank
from app.planner.plan import Plan
from tests.cases import chosen
from tests.distributed import run_distributed
from tests.runs import TINY, TINY_MOE, make_run

CPU = torch.device("cpu")
# even loads, as routers of other ranks cannot be foreseen
EVEN = dataclasses.replace(TINY_MOE, force_balance=True, planned_imbalance=1.0)


def run_of(parallel: dict[str, Any], dispatcher: str = "auto", **sections: Any) -> Run:
    moe = dataclasses.replace(EVEN, dispatcher=DispatcherKind(dispatcher))
    train = TrainConfig(steps=20, seq_len=32, micro_batch=2, global_batch=16)
    model = dataclasses.replace(TINY, num_layers=4, moe=moe)
    return make_run(model, parallel=ParallelConfig(**parallel), train=train, **sections)


INTERLEAVED = {"schedule": ScheduleConfig(ScheduleName.interleaved)}
CASES: dict[str, Run] = {
    "stages": run_of({"pp": 4}),
    "experts": run_of({"dp": 2, "ep": 2}),
    "tokens gathered": run_of({"dp": 2, "ep": 2}, "all_gather"),
    "static": run_of({"dp": 2, "ep": 2}, "static"),
    "tp": run_of({"tp": 2}),
    "cp": run_of({"cp": 2, "cp_comm_type": CpComm.all_to_all}),
    "shards of the optimizer": run_of({"dp": 4}),
    "interleaved": run_of({"pp": 2, "vpp": 2}, **INTERLEAVED),
    "recomputed": run_of({"tp": 2, "pp": 2}, recompute=RecomputeConfig(full=True)),
}


def among_others(rank: int, run: Run) -> tuple[list[Message], int, int]:
    """Messages of the first step, and bytes between actions and at the peak, beyond those between
    steps: the least of three, as gloo may hold what it has sent a moment longer.
    """
    plan, alive = Plan(run), Alive()
    dog = Noting(rank, run.schedule.timeout_s, clock=WorkClock(CPU))
    found: list[Message] = []
    with alive:
        engine = build_engine(plan, create_groups(plan.layout, rank), CPU, watchdog=dog)
        step = TrainingStep(engine)

        def take() -> tuple[int, int]:
            dog.meter = TensorMeter(CPU, alive)
            between = dog.meter.live()
            dog.meter.reset()
            step(batches_of(run), run.optim.lr, run.optim.weight_decay)
            return dog.meter.saved - between, dog.meter.passes - between

        with recorded(found):
            take()
        sizes = [take() for _ in range(3)]
    return found, *map(min, *sizes)


class recorded:
    """Notes the collectives, sends and receives within the block."""

    def __init__(self, found: list[Message]) -> None:
        def noting(kind: str, function: Any, place: int) -> Any:
            def call(*tensors: Any, **options: Any) -> Any:
                group = options.get("group") or tensors[2]
                found.append(Message(kind, group.size(), tensors[place].nbytes))
                return function(*tensors, **options)

            return call

        def post(transport: Transport, tensors: Any) -> None:
            for op, tensor in tensors.items():
                kind = "send" if op.send else "receive"
                found.append(Message(kind, transport.group.size(), tensor.nbytes))
            posted(transport, tensors)

        def noting_each(kind: str, function: Any, place: int) -> Any:
            def call(*lists: Any) -> Any:
                found.extend(Message(kind, lists[2].size(), each.nbytes) for each in lists[place])
                return function(*lists)

            return call

        posted = Transport.post
        gather, scatter = collectives.all_gather_single, collectives.reduce_scatter_single
        gathers, scatters = collectives.all_gather_together, collectives.reduce_scatter_together
        to_all, reduce = dist.all_to_all_single, dist.all_reduce
        self.patches = [
            patch.object(collectives, "all_gather_single", noting("all-gather", gather, 1)),
            patch.object(
                collectives, "reduce_scatter_single", noting("reduce-scatter", scatter, 1)
            ),
            patch.object(collectives, "all_gather_together", noting_each("all-gather", gathers, 1)),
            patch.object(
                collectives, "reduce_scatter_together", noting_each("reduce-scatter", scatters, 1)
            ),
            patch.object(dist, "all_to_all_single", noting("all-to-all", to_all, 1)),
            patch.object(dist, "all_reduce", noting("all-reduce", reduce, 0)),
            patch.object(Transport, "post", post),
        ]

    def __enter__(self) -> None:
        for each in self.patches:
            each.start()

    def __exit__(self, *_: object) -> None:
        for each in self.patches:
            each.stop()


@pytest.mark.parametrize("name", chosen(CASES, ["experts"]))
def test_rank_alone_equals_rank_among_others(name: str):
    run = CASES[name]
    for rank, (messages, saved, peak) in enumerate(
        run_distributed(among_others, run.world_size, run)
    ):
        alone = rehearse(Plan(run), rank, CPU, steps=1)
        assert list(alone.messages) == messages and messages
        # gloo's threads hold what they send a moment longer: nothing, or at most all of a step
        sent = sum(message.bytes for message in messages)
        assert alone.saved <= 1.001 * saved and saved <= alone.saved + sent
        most = alone.saved + alone.working
        assert most <= 1.001 * peak and peak <= most + sent


@pytest.mark.parametrize("dispatcher", ["all_to_all", "all_gather", "static"])
def test_experts_get_the_planned_tokens(dispatcher: str):
    moe = dataclasses.replace(TINY_MOE, num_experts=16, dispatcher=DispatcherKind(dispatcher))
    run = make_run(
        dataclasses.replace(TINY, moe=moe),
        parallel=ParallelConfig(tp=2, ep=8, dp=8),
        train=TrainConfig(steps=20, seq_len=32, micro_batch=2, global_batch=16),
    )
    found = rehearse(Plan(run), 5, CPU, steps=1)
    planned = run_dispatcher(run)
    assert planned is not None
    tokens = tokens_per_rank(run)
    assert found.rows == planned.rows(tokens).computed
    assert planned_rows(planned, tokens) == tokens * 2 * 2 * (1 if dispatcher == "static" else 1.5)


def test_masks_and_graphs_of_a_cpu_are_refused():
    graphs = make_run(cuda_graph=CudaGraphConfig(GraphImpl.full_iteration))
    with pytest.raises(ConfigError, match="a CPU has no graphs"):
        refuse_what_needs_others(graphs, CPU)
    with pytest.raises(ConfigError, match="did you mean all_to_all"):
        refuse_what_needs_others(run_of({"cp": 2}), CPU)


def test_clones_and_peer_memory_are_refused():
    for static in (StaticConfig(), StaticConfig(StaticTransport.peer)):
        moe = dataclasses.replace(EVEN, dispatcher=DispatcherKind.static, static=static)
        model = dataclasses.replace(TINY, moe=moe)
        run = make_run(model, parallel=ParallelConfig(ep=2, dp=2))
        with pytest.raises(ConfigError, match="a rehearsal has one rank"):
            refuse_what_needs_others(run, torch.device("cuda"))
    cloned = dataclasses.replace(moe, static=StaticConfig(), echo=EchoConfig(spares=1))
    run = make_run(dataclasses.replace(TINY, moe=cloned), parallel=ParallelConfig(ep=2, dp=2))
    with pytest.raises(ConfigError, match="clones follow the load of all ranks"):
        refuse_what_needs_others(run, CPU)


LARGE = (
    "model=moe_tiny", "model.num_layers=8", "model.moe.num_experts=64", "parallel.tp=2",
    "parallel.pp=8", "parallel.ep=32", "parallel.dp=128", "train.micro_batch=1",
    "train.global_batch=1024", "train.device=cpu",
)  # fmt: skip


def test_a_rank_of_2048_is_shown(capsys: pytest.CaptureFixture[str]):
    assert main(["what=rehearse", "rank=1030", "steps=1", *LARGE]) == 0
    out = capsys.readouterr().out
    assert "rank 1,030 of 2,048, pipeline rank 4, on cpu" in out
    assert "tensors at the peak, GiB" in out and "dispatched tokens per microbatch" in out


def test_a_rank_that_does_not_fit_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(program, "memory_of", lambda run, device: 2**30)
    with pytest.raises(SystemExit):
        main(["what=rehearse", *LARGE, "train.seq_len=4096"])
    said = capsys.readouterr().err
    assert "is planned to need" in said and "with recompute.full=true every rank fits" in said
    with pytest.raises(SystemExit):
        main(["what=memory", "rank=0"])
    assert "rank=0: only works with what=rehearse" in capsys.readouterr().err
