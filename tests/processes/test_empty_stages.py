"""Stages without layers hand on what they get: layouts with some train like those without any."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch

from app.choices import Dtype, GraphImpl, GraphKey, GraphScope, Recompute, ScheduleName
from app.config import (
    CudaGraphConfig,
    ModelConfig,
    ParallelConfig,
    PrecisionConfig,
    RecomputeConfig,
    Run,
    ScheduleConfig,
    TrainConfig,
)
from app.engine.decoding.generate import sample_tokens
from app.engine.step.engine import Engine
from app.engine.step.executor import InFlight
from app.engine.step.step import Validation
from tests.cases import chosen
from tests.distributed import run_distributed
from tests.parity import OneProcess, Trained, alone, here, results
from tests.processes.captured import several
from tests.runs import (
    STEADY,
    TINY,
    TINY_MOE,
    batches_of,
    engine_of,
    make_run,
    train_steps,
    whole_gradients,
)

STEPS, MBS = 3, 4
DENSE = dataclasses.replace(TINY, num_layers=4, moe=None)
LATE_MOE = dataclasses.replace(
    TINY, num_layers=4, moe=dataclasses.replace(TINY_MOE, first_k_dense=2)
)
MODELS = {"dense": DENSE, "tied": dataclasses.replace(DENSE, tie_embeddings=True), "moe": LATE_MOE}
OPTIM = dataclasses.replace(STEADY, bucket_numel=1500)  # several buckets
Found = tuple[Trained, int, list[int]]  # also validated: tokens; sampled


def run_of(model: ModelConfig, schedule: str = "auto", **choice: Any) -> Run:
    """A run of MBS microbatches per step; keyword arguments are sections or degrees."""
    degrees = {
        key: choice.pop(key) for key in tuple(choice) if key in ParallelConfig.__dataclass_fields__
    }
    batch = 2 * MBS * degrees.get("dp", 1)
    train = TrainConfig(steps=20, seq_len=16, micro_batch=2, global_batch=batch)
    sections = {"optim": OPTIM, "train": train, "schedule": ScheduleConfig(ScheduleName(schedule))}
    return make_run(model, **(sections | choice), parallel=ParallelConfig(**degrees))


def trained(engine: Engine) -> Found:
    """Return the results of a few steps, of a validation of one microbatch, and a sample."""
    run, found = engine.plan.run, results(engine, STEPS)
    held_out = batches_of(run, 100, 0)[:1]  # the same one on every data-parallel rank
    loss, tokens = Validation(engine, 1)(held_out)
    sample = sample_tokens(
        engine, [1, 2, 3], count=4, window=16, vocab=run.model.vocab_size, seed=5
    )
    return found | {"validation": {1: loss}}, tokens, list(sample)


CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("dense", dict(pp=2, layout="Ett|tt||L")),
    ("tied", dict(pp=4, layout="Ett||tt|L")),
    ("moe", dict(pp=4, layout="E|tttt||L", recompute=RecomputeConfig(full=True))),
    (
        "moe",
        dict(
            pp=2, layout="Ett|tt||L", dp=2, ep=2, recompute=RecomputeConfig(phases=(Recompute.moe,))
        ),
    ),
    ("tied", dict(pp=2, layout="E|tttt||L", tp=2)),
    ("moe", dict(pp=2, layout="E||tttt|L", cp=2)),
    ("tied", dict(pp=2, layout="Ett||tt|L", schedule="zero_bubble_v")),
    ("moe", dict(pp=2, layout="Ett|tt||L", schedule="zero_bubble_v")),
    ("moe", dict(pp=2, layout="Ett|||ttL", schedule="zero_bubble_v")),  # a rank without parameters
    ("dense", dict(pp=4, layout="Ett||tt|L", schedule="zero_bubble_h1")),
)


def short(value: object) -> str:
    """A parameter of a test in a few characters."""
    return f"pp{value['pp']} {value['layout']}" if isinstance(value, dict) else str(value)


@functools.cache
def one_process(name: str, dp: int) -> tuple[Found, Found]:
    train = TrainConfig(steps=20, seq_len=16, micro_batch=2, global_batch=2 * MBS * dp)
    return alone(run_of(MODELS[name], train=train), trained)


QUICK = CASES[0], CASES[1], CASES[3], CASES[8]


@pytest.mark.every(4)
@pytest.mark.parametrize(("name", "choice"), chosen(CASES, QUICK), ids=short)
def test_trains_validates_and_samples_like_one_process(name: str, choice: dict[str, Any]):
    run = run_of(MODELS[name], **choice)
    (plain, tokens, sample), (exact, *_) = one_process(name, run.dp)
    for found, told, written in run_distributed(here, run.world_size, run, trained):
        OneProcess(plain, exact).expect(found)
        assert told == tokens * run.dp and written == sample


def two_byte_gradients(rank: int, run: Run) -> tuple[float, dict[str, Any]]:
    """Loss and gradients of one step."""
    engine = engine_of(run, rank)
    ((loss, _),) = train_steps(run, engine, 1)
    return loss, {name: value.numpy() for name, value in whole_gradients(engine).items()}


@pytest.mark.every(2)
@pytest.mark.parametrize("params", (Dtype.float16, Dtype.bfloat16))
def test_the_same_bits_as_without_empty_stages_in_two_bytes(params: Dtype):
    precision = PrecisionConfig(params)
    plain = run_of(MODELS["moe"], pp=2, layout="Ett|ttL", precision=precision)
    loss, wanted = run_distributed(two_byte_gradients, 2, plain)[0]
    empty = run_of(MODELS["moe"], pp=4, layout="Ett||tt|L", precision=precision)
    for found, gradients in run_distributed(two_byte_gradients, 4, empty):
        assert found == loss and gradients.keys() == wanted.keys()
        for name, value in wanted.items():
            assert (gradients[name] == value).all(), name


WHOLE = CudaGraphConfig(GraphImpl.full_iteration, warmup_steps=2)
PARTIAL = tuple(map(GraphScope, ("attn", "mlp", "moe_router", "moe_preprocess")))
GRAPHS = {
    "partial": CudaGraphConfig(GraphImpl.local, PARTIAL, 2),
    "layer": CudaGraphConfig(GraphImpl.local, (), 2),
    "layer by slot": CudaGraphConfig(GraphImpl.local, (), 2, GraphKey.slot),
    "full iteration": WHOLE,
}


CAPTURED = (
    (dict(pp=4, layout="Ett||tt|L"), tuple(GRAPHS)),
    (dict(pp=2, layout="Ett|tt||L"), tuple(GRAPHS)),
    (dict(pp=2, layout="Ett|||ttL", schedule="zero_bubble_v"), ("full iteration",)),
)


@pytest.mark.full
@pytest.mark.parametrize(("choice", "names"), CAPTURED, ids=short)
def test_captured_training_equals_eager_training_bit_for_bit(
    choice: dict[str, Any], names: tuple[str, ...]
):
    graphs = {"eager": CudaGraphConfig(), **{name: GRAPHS[name] for name in names}}
    runs = {
        name: run_of(MODELS["moe"], **choice, cuda_graph=graph) for name, graph in graphs.items()
    }
    for found in run_distributed(several, runs["eager"].world_size, runs):
        eager = found.pop("eager")
        for name, result in found.items():
            assert result["seen"] == eager["seen"], name
            for key, grad in eager["grads"].items():
                assert (result["grads"][key] == grad).all(), (name, key)


def memory_handed_on(rank: int, run: Run) -> list[tuple[int, int]]:
    """Return bytes of an empty stage's output in each forward: when made, and after the step."""
    engine, outputs, pass_on = engine_of(run, rank), [], InFlight._pass_on

    def noted(in_flight: InFlight, place: tuple[int, int], output: torch.Tensor) -> None:
        if not engine.chunks[place[1]].layers:
            assert output.data_ptr() == in_flight.inputs[place].data_ptr()
            outputs.append((output, output.untyped_storage().nbytes()))
        pass_on(in_flight, place, output)

    InFlight._pass_on = noted  # this process is about to end
    train_steps(run, engine, 1)
    return [(size, output.untyped_storage().nbytes()) for output, size in outputs]


def test_empty_stage_forwards_input_and_keeps_no_memory():
    run = run_of(MODELS["dense"], pp=4, layout="Ett||tt|L")
    assert run_distributed(memory_handed_on, 4, run)[1] == [(2 * 16 * 32 * 4, 0)] * MBS
