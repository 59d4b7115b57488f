"""Activations that wait in host memory change no bit, and are freed on the device."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from app.choices import Dtype, GraphImpl, Offload, Recompute, ScheduleName
from app.config import (
    CudaGraphConfig,
    MoEConfig,
    ParallelConfig,
    PrecisionConfig,
    RecomputeConfig,
    Run,
    ScheduleConfig,
    TrainConfig,
)
from app.errors import ConfigError
from app.model.offload import HostBuffers
from tests.distributed import run_distributed
from tests.runs import engine_of, make_run, train_steps, whole_gradients, whole_parameters
from tests.tensors.activation_memory import DENSE

EAGER = CudaGraphConfig()
WHOLE = CudaGraphConfig(GraphImpl.full_iteration, warmup_steps=1)
LARGE = dataclasses.replace(DENSE, num_layers=4)  # whose activations are above the smallest size
MOE = MoEConfig(num_experts=4, top_k=2, ffn_hidden_size=64, first_k_dense=1)
MODELS = {"dense": LARGE, "moe": dataclasses.replace(LARGE, moe=MOE)}


def run_of(name: str, recompute: dict[str, Any], **options: Any) -> Run:
    """A run with these keys of `recompute`; other options are `graph`, `schedule`, `precision` and
    degrees.
    """
    graph = options.pop("graph", EAGER)
    schedule = ScheduleConfig(ScheduleName(options.pop("schedule", "auto")))
    precision = PrecisionConfig(options.pop("precision", Dtype.float32))
    return make_run(
        MODELS[name],
        train=TrainConfig(steps=20, seq_len=128, micro_batch=2, global_batch=8),
        precision=precision,
        cuda_graph=graph,
        parallel=ParallelConfig(**dict(dp=1) | options),
        schedule=schedule,
        recompute=RecomputeConfig(**recompute),
    )


class LateStream:
    """Stand-in for a CUDA stream beside compute, whose copies run when compute waits for them."""

    def __init__(self, compute: bool = False) -> None:
        self.compute = compute
        self.work: list[Callable[[], None]] = []
        self.done = 0

    def record_event(self) -> tuple[LateStream, int]:
        return self, len(self.work)

    def wait_event(self, event: tuple[LateStream, int]) -> None:
        stream, until = event
        if self.compute:
            stream.run(until)
        else:
            self.work.append(lambda: stream.run(until))

    def wait_stream(self, other: LateStream) -> None:
        self.wait_event(other.record_event())

    def run(self, until: int) -> None:
        while self.done < until:
            self.done += 1
            self.work[self.done - 1]()


class Late(TorchDispatchMode):
    """Copies within the block are those of a stream."""

    def __init__(self, stream: LateStream) -> None:
        super().__init__()
        self.stream = stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.copy_.default:
            return func(*args, **(kwargs or {}))
        given = [weakref.ref(each) for each in args[:2]]

        def copy() -> None:
            into, source = (each() for each in given)
            assert into is not None and source is not None, "freed while it was copied"
            into.copy_(source)

        self.stream.work.append(copy)
        return args[0]


def trained_late(rank: int, run: Run) -> dict[str, Any]:
    """As `trained`, where copies are as late as waits for them allow."""
    compute, *beside = LateStream(compute=True), LateStream(), LateStream()
    with patch.multiple(torch.cuda, current_stream=lambda: compute, stream=Late):
        found = trained(rank, run, tuple(beside))
    assert all(each.done == len(each.work) for each in beside) and beside[0].work
    return found


def trained(rank: int, run: Run, streams: Any = None) -> dict[str, Any]:
    """Losses of an eager step and of two more, which are captured and replayed with a graph; then
    gradients and parameters.
    """
    torch.manual_seed(0)
    engine = engine_of(run, rank)
    if streams:
        engine.state(HostBuffers).streams = streams
    losses = train_steps(run, engine, 3)
    both = {"gradients": whole_gradients(engine), "values": whole_parameters(engine)}
    return {"losses": losses} | {
        f"{kind} {name}": value.float().numpy().tobytes()
        for kind, values in both.items()
        for name, value in values.items()
    }


ALL = dict(offload=(Offload.layers,))
CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("dense", ALL, {}),
    ("moe", ALL, {}),
    ("moe", dict(offload=(Offload.moe,)), {}),
    ("dense", dict(offload=(Offload.attn,), phases=(Recompute.norm, Recompute.mlp_act)), {}),
    ("moe", dict(offload=(Offload.mlp,)), {}),
    ("moe", dict(offload=(Offload.attn, Offload.mlp), phases=(Recompute.moe,)), {}),
    ("moe", ALL | dict(phases=tuple(Recompute)), {}),
    ("dense", ALL | dict(full=True), {}),
    ("dense", ALL, dict(pp=2)),
    ("dense", ALL, dict(tp=2, precision=Dtype.bfloat16)),
    ("dense", ALL, dict(cp=2)),
    ("moe", ALL, dict(pp=2, vpp=2, schedule="interleaved")),
    ("moe", ALL, dict(pp=2, schedule="zero_bubble_h1")),
    ("moe", ALL, dict(dp=2, ep=2, precision=Dtype.bfloat16)),
    ("dense", ALL | dict(full=True, partial_microbatches=1), dict(pp=2)),
    ("dense", ALL, dict(pp=2, graph=WHOLE)),
    ("moe", ALL, dict(graph=WHOLE)),
]


@pytest.mark.parametrize(("name", "recompute", "options"), CASES, ids=str)
def test_offloading_changes_no_bit(name: str, recompute: dict[str, Any], options: dict[str, Any]):
    run = run_of(name, recompute, **options)
    plain = dataclasses.replace(run, recompute=RecomputeConfig(), cuda_graph=EAGER)
    assert run_distributed(trained, run.world_size, run) == run_distributed(
        trained, run.world_size, plain
    )


@pytest.mark.parametrize(("name", "recompute", "options"), [*CASES[2:5], *CASES[10:13]], ids=str)
def test_late_copies_change_no_bit(name: str, recompute: dict[str, Any], options: dict[str, Any]):
    run = run_of(name, recompute, **options)
    assert run_distributed(trained_late, run.world_size, run) == run_distributed(
        trained, run.world_size, run
    )


HALF = MODELS["dense"].hidden_size * 2 * 128 * 4  # bytes of hidden states


def host_bytes(rank: int, run: Run) -> tuple[int, int, float]:
    """Host memory after one step and after three, and planned."""
    engine = engine_of(run, rank)
    found = []
    for count in (1, 2):
        train_steps(run, engine, count)
        buffers = engine.state(HostBuffers)
        assert buffers is not None and not buffers.fetching
        found.append(buffers.host_bytes)
    return found[0], found[1], engine.plan.memory[rank].offloaded


def test_host_memory_is_that_of_microbatches_in_flight():
    run = run_of("dense", ALL, pp=2)
    first, last = run_distributed(host_bytes, 2, run)
    assert first[0] == first[1] and last[0] == last[1]
    # two in flight on the first rank; the last one keeps the stage's input for its gradient
    assert first[0] == 2 * (last[0] + HALF) > 0
    assert first[2] == 2 * (last[2] + HALF)


LOCAL = CudaGraphConfig(GraphImpl.local)
REFUSED = [
    (
        "dense",
        dict(cuda_graph=CudaGraphConfig(GraphImpl.local)),
        [Offload.layers],
        "cuda_graph=none",
    ),
    ("dense", dict(full=True), [Offload.attn], "recompute.offload=[layers]"),
    ("moe", dict(phases=(Recompute.moe,)), [Offload.moe], "recompute.offload=[layers]"),
    ("dense", dict(), [Offload.moe], "recompute.offload=[layers]"),
]


@pytest.mark.parametrize(("name", "options", "offload", "advice"), REFUSED, ids=str)
def test_offload_is_refused_with_advice(
    name: str, options: dict[str, Any], offload: list[Offload], advice: str
):
    graph = options.get("cuda_graph", CudaGraphConfig())
    recompute = {key: value for key, value in options.items() if key != "cuda_graph"}
    with pytest.raises(ConfigError, match=r"recompute\.offload=\[") as error:
        make_run(
            MODELS[name],
            recompute=RecomputeConfig(offload=tuple(offload), **recompute),
            cuda_graph=graph,
        )
    assert advice in str(error.value)
