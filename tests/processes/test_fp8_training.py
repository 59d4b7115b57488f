"""Training in FP8: layouts, schedules, recomputation and graphs change no bits, or no more
than other scales explain; weights are quantised once per update.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from app.choices import (
    Dtype,
    Fp8Part,
    Fp8Recipe,
    GraphImpl,
    GraphKey,
    GraphScope,
    Recompute,
    ScheduleName,
)
from app.config import (
    CudaGraphConfig,
    Fp8Config,
    LossConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    PrecisionConfig,
    RecomputeConfig,
    Run,
    ScheduleConfig,
    TrainConfig,
)
from app.engine.capture.recorder import Work
from app.engine.capture.stand_in import HostRecorder, HostRecording
from app.engine.checkpoint.load import Progress, load_checkpoint
from app.engine.files.checkpoints import read_manifest
from app.engine.step.engine import Engine
from app.engine.step.step import TrainingStep, Validation
from tests.cases import chosen
from tests.checkpoints import save_checkpoint
from tests.distributed import run_distributed
from tests.forks import Patches
from tests.graphed_callables import install
from tests.processes.fp8_training import (
    STEPS,
    WARMUP,
    captured,
    distance,
    exact_step,
    expect_same,
    first_step,
    overfitted,
    several,
    stopped_and_resumed,
    trained,
)
from tests.runs import (
    TINY,
    TWO_MICROBATCHES,
    batches_of,
    engine_of,
    fp8_of,
    make_run,
    train_steps,
)
from tests.training import composed, corpus_in, untimed

# with biases, which attention adds in place to the output of its first FP8 layer
EXPERTS = dataclasses.replace(
    TINY,
    num_layers=4,
    ffn_hidden_size=64,
    qkv_bias=True,
    moe=dataclasses.replace(TINY.moe, shared_ffn_hidden_size=32),
)
DENSE = dataclasses.replace(EXPERTS, moe=None)
TWO = dataclasses.replace(DENSE, num_layers=2)
RECIPES = tuple(Fp8Recipe)
EVERYTHING = tuple(Fp8Part)


def in_8(
    recipe: Fp8Recipe | None, params: Dtype = Dtype.bfloat16, **choices: Any
) -> PrecisionConfig:
    usual = {"include": (Fp8Part.linear, Fp8Part.head)} if recipe else {}
    return PrecisionConfig(params, fp8=Fp8Config(recipe, **(usual | choices)))


def run_of(recipe: Fp8Recipe | None, model: Any = DENSE, **sections: Any) -> Run:
    return make_run(model, **({"precision": in_8(recipe)} | sections))


ONE_STAGE = {
    "recompute everything": {"recompute": RecomputeConfig(full=True)},
    "recompute parts": {
        "recompute": RecomputeConfig(
            phases=(Recompute.attn_core, Recompute.norm, Recompute.mlp_act, Recompute.shared)
        )
    },
    "one bucket per parameter": {"optim": OptimConfig(lr=1e-2, warmup_steps=2, bucket_numel=1)},
    "gathers when needed": {
        "optim": OptimConfig(lr=1e-2, warmup_steps=2, overlap_params=False, overlap_grads=False)
    },
}


@pytest.mark.full
@pytest.mark.parametrize("recipe", chosen(RECIPES, [Fp8Recipe.current]))
def test_recomputation_and_buckets_change_no_bits(recipe: Fp8Recipe):
    plain = {"optim": OptimConfig(lr=1e-2, warmup_steps=2), "train": TWO_MICROBATCHES}
    model = dataclasses.replace(EXPERTS, num_layers=2)  # dense, and with experts
    runs = {
        name: run_of(recipe, model, **(plain | sections))
        for name, sections in {"plain": {}, **ONE_STAGE}.items()
    }
    results = run_distributed(several, 1, runs)[0]
    expected = results.pop("plain")
    assert expected["times"] == {STEPS}
    for name, found in results.items():
        expect_same(found, expected, name)
        assert found["times"] == {STEPS}, name


STAGES = {
    "1f1b": (ParallelConfig(pp=2), ScheduleName.auto),
    "interleaved": (ParallelConfig(pp=2, vpp=2), ScheduleName.auto),
    "zero_bubble_h1": (ParallelConfig(pp=2), ScheduleName.zero_bubble_h1),
    "zero_bubble_v": (ParallelConfig(pp=2, vpp=2), ScheduleName.zero_bubble_v),
}
STAGE_CASES = [*itertools.product(RECIPES, STAGES)]
STAGES_QUICK = [(Fp8Recipe.current, "zero_bubble_v"), (Fp8Recipe.block, "1f1b")]


@pytest.mark.every(2)
@pytest.mark.parametrize(("recipe", "schedule"), chosen(STAGE_CASES, STAGES_QUICK))
def test_stages_change_no_bits(recipe: Fp8Recipe, schedule: str):
    """Each has whole microbatches, in order: sums are the same, whenever they are computed. Only
    the norm adds up ranks in another order, and would be clipped by.
    """
    parallel, name = STAGES[schedule]
    optim = OptimConfig(lr=1e-2, warmup_steps=2, clip_norm=0.0)
    one = run_distributed(trained, 1, run_of(recipe, optim=optim))[0]
    run = run_of(recipe, parallel=parallel, schedule=ScheduleConfig(name=name), optim=optim)
    for found in run_distributed(trained, 2, run):
        grads = {name: found["grads"][name] for name in one["grads"]}
        for name, grad in one["grads"].items():
            assert (grads[name] == grad).all(), name
        assert found["times"] == {STEPS}


LAYOUTS = {
    "tp2": {"parallel": ParallelConfig(tp=2)},
    "tp2 chunked loss": {"parallel": ParallelConfig(tp=2), "loss": LossConfig(chunk_tokens=8)},
    "tp2 pp2 zero-bubble": {
        "parallel": ParallelConfig(tp=2, pp=2),
        "schedule": ScheduleConfig(name=ScheduleName.zero_bubble_h1),
    },
    "cp2": {"parallel": ParallelConfig(cp=2)},
    "dp2": {"parallel": ParallelConfig(dp=2)},
    "dp2 tp2": {"parallel": ParallelConfig(dp=2, tp=2)},
}
LAYOUT_CASES = [*itertools.product(RECIPES, LAYOUTS)]
LAYOUTS_QUICK = [(Fp8Recipe.current, "tp2 pp2 zero-bubble"), (Fp8Recipe.block, "dp2")]


@pytest.mark.parametrize(("recipe", "layout"), chosen(LAYOUT_CASES, LAYOUTS_QUICK))
def test_layouts_are_as_near_to_fp64_as_one_process(recipe: Fp8Recipe, layout: str):
    """Ranks that have parts of a matrix scale their own: no worse than one scale for all."""
    expect_near(recipe, layout, DENSE)


@pytest.mark.parametrize("recipe", chosen(RECIPES, [Fp8Recipe.block]))
def test_feed_forwards_without_gates_are_near_too(recipe: Fp8Recipe):
    ungated = dataclasses.replace(TWO, mlp_gate=False, mlp_bias=True)  # with silu
    expect_near(recipe, "tp2", ungated)


def expect_near(recipe: Fp8Recipe, layout: str, model: ModelConfig) -> None:
    given = {"precision": in_8(recipe, Dtype.float32), "train": TWO_MICROBATCHES}
    plain = given | {"precision": in_8(None, Dtype.float32)}
    exact = run_distributed(exact_step, 1, run_of(None, model, **plain))[0]
    one = run_distributed(first_step, 1, run_of(recipe, model, **given))[0]
    run = run_of(recipe, model, **given, **LAYOUTS[layout])
    several = run_distributed(first_step, run.world_size, run)
    noise = distance(one, exact)
    assert 1e-3 < noise < 0.25  # steps of 2⁻⁴ and 2⁻³, in every GEMM of four layers
    for found in several:
        assert distance(found, exact) < 1.25 * noise
        assert abs(found["losses"][0] - exact["losses"][0]) < 1e-2


GRAPHS = {
    "attn": captured(GraphImpl.local, GraphScope.attn),
    "layer": captured(GraphImpl.local),
    "layer by slot": captured(GraphImpl.local, key=GraphKey.slot),
    "full iteration": captured(GraphImpl.full_iteration),
}
GRAPH_LAYOUTS = {
    "one rank": ParallelConfig(),
    "pp2": ParallelConfig(pp=2),
    "pp2 vpp2": ParallelConfig(pp=2, vpp=2),
    "dp2": ParallelConfig(dp=2),
    "tp2": ParallelConfig(tp=2),
}
GRAPH_CASES = [*itertools.product(RECIPES, GRAPH_LAYOUTS)]
GRAPHS_QUICK = [
    (Fp8Recipe.delayed, "pp2"),
]


@pytest.mark.parametrize(("recipe", "layout"), chosen(GRAPH_CASES, GRAPHS_QUICK))
def test_captured_training_equals_eager_training_bit_for_bit(recipe: Fp8Recipe, layout: str):
    """On the stand-in, whose replays rerun the work: counts per step equal eager ones."""
    parallel = GRAPH_LAYOUTS[layout]
    optim = OptimConfig(lr=1e-2, warmup_steps=2, bucket_numel=3000)
    graphs = {"eager": CudaGraphConfig(), **GRAPHS}
    model = DENSE if parallel.vpp > 1 else TWO
    runs = {
        name: run_of(recipe, model, parallel=parallel, cuda_graph=graph, optim=optim)
        for name, graph in graphs.items()
    }
    for results in run_distributed(several, runs["eager"].world_size, runs):
        expected = results.pop("eager")
        for name, found in results.items():
            expect_same(found, expected, name)
            assert found["times"] == {STEPS}, name


def quantised_while_recording(rank: int, run: Run) -> list[int]:
    """Weights that each recording of a part of a layer has quantised."""
    engine = engine_of(run, rank)
    record, counts = HostRecorder.record, []

    def counted(self: HostRecorder, work: Any, pool: int) -> Any:
        before = sum(linear.times for linear in fp8_of(engine).linears.values())
        found = record(self, work, pool)
        counts.append(sum(linear.times for linear in fp8_of(engine).linears.values()) - before)
        return found

    with Patches.context() as patch:
        patch.setattr(HostRecorder, "record", counted)
        train_steps(run, engine, STEPS)
    assert engine.recorder.recordings
    engine.release()
    return counts


@pytest.mark.parametrize("name", ["attn", "layer"])
def test_graphs_of_parts_hold_no_quantising_of_weights(name: str):
    """It is done in front of them, once per update, and not by each of their replays."""
    run = run_of(Fp8Recipe.current, TWO, train=TWO_MICROBATCHES, cuda_graph=GRAPHS[name])
    (counts,) = run_distributed(quantised_while_recording, 1, run)
    assert counts and not any(counts)


BY_LIBRARY = {
    "attn": captured(GraphImpl.transformer_engine, GraphScope.attn),
    "layer": captured(GraphImpl.transformer_engine),
    "layer by slot": captured(GraphImpl.transformer_engine, key=GraphKey.slot),
}
LIBRARY_LAYOUTS = {
    "one rank": ParallelConfig(),
    "pp2": ParallelConfig(pp=2),
    "pp2 vpp2": ParallelConfig(pp=2, vpp=2),
    "dp2": ParallelConfig(dp=2),
}
LIBRARY_CASES = [*itertools.product(RECIPES, LIBRARY_LAYOUTS)]
LIBRARY_QUICK = [
    (Fp8Recipe.delayed, "pp2 vpp2"),
    (Fp8Recipe.block, "one rank"),
]


@pytest.mark.full
@pytest.mark.parametrize(("recipe", "layout"), chosen(LIBRARY_CASES, LIBRARY_QUICK))
def test_what_transformer_engine_captures_equals_eager_training(
    recipe: Fp8Recipe, layout: str, monkeypatch: pytest.MonkeyPatch
):
    """On the stand-in, whose trial run computes from garbage: none of it is left in scales, and
    weights are quantised once more for it, and in no graph.
    """
    install(monkeypatch)
    optim = OptimConfig(lr=1e-2, warmup_steps=2, bucket_numel=3000)
    runs = {
        name: run_of(
            recipe, EXPERTS, parallel=LIBRARY_LAYOUTS[layout], cuda_graph=graph, optim=optim
        )
        for name, graph in {"eager": CudaGraphConfig(), **BY_LIBRARY}.items()
    }
    for results in run_distributed(several, runs["eager"].world_size, runs):
        expected = results.pop("eager")
        assert expected["times"] == {STEPS}
        for name, found in results.items():
            expect_same(found, expected, name)
            assert found["times"] == {STEPS + 1}, name


def validated(rank: int, run: Run) -> list[float]:
    """Losses of validations between steps."""
    engine = engine_of(run, rank)
    batches = batches_of(run, 99, engine.groups.dp_rank)
    validation, step = Validation(engine, len(batches)), TrainingStep(engine)
    found = []
    for number in range(STEPS):
        found.append(validation(batches)[0])
        step(batches_of(run, number, engine.groups.dp_rank), 1e-2, 0.1)
    engine.release()
    return found


@pytest.mark.every(2)
@pytest.mark.parametrize("name", ["layer", "full iteration"])
def test_validation_sees_the_weights_of_the_last_update(name: str):
    runs = [
        run_of(Fp8Recipe.current, TWO, train=TWO_MICROBATCHES, cuda_graph=graph)
        for graph in (CudaGraphConfig(), GRAPHS[name])
    ]
    eager, replayed = (run_distributed(validated, 1, run)[0] for run in runs)
    assert eager == replayed and len(set(eager)) == STEPS


def with_experts(recipe: Fp8Recipe, graph: CudaGraphConfig) -> Run:
    """A dense layer and one with experts; all that can be in FP8 is."""
    model = dataclasses.replace(EXPERTS, num_layers=2)
    given = {"precision": in_8(recipe, include=EVERYTHING), "train": TWO_MICROBATCHES}
    return run_of(recipe, model, cuda_graph=graph, **given)


@contextmanager
def replays_as_on_a_gpu(engine: Engine) -> Iterator[None]:
    """Within the block replays quantise what was quantised when they were recorded, and the host
    does not know that they do.
    """
    linears = fp8_of(engine).linears.values()
    record, replay = HostRecorder.record, HostRecording.replay
    recorded: list[tuple[HostRecording, list[bool]]] = []

    def mark(stale: list[bool]) -> None:
        for linear, each in zip(linears, stale, strict=True):
            linear.stale = each

    def noting(recorder: HostRecorder, work: Work, pool: int) -> Any:
        stale = [linear.stale for linear in linears]
        recording, outputs = record(recorder, work, pool)
        recorded.append((recording, stale))
        return recording, outputs

    def kernels_alone(recording: HostRecording) -> Any:
        known = [linear.stale for linear in linears]
        (stale,) = (stale for each, stale in recorded if each is recording)
        mark(stale)
        outputs = replay(recording)
        mark(known)
        return outputs

    with (
        mock.patch.object(HostRecorder, "record", noting),
        mock.patch.object(HostRecording, "replay", kernels_alone),
    ):
        yield


def validated_before_recordings(rank: int, run: Run) -> list[float]:
    """Losses of steps and of validations, some of which are in front of what is recorded."""
    engine = engine_of(run, rank)
    held_out, numbers = batches_of(run, 99, 0), itertools.count()
    step, validation = TrainingStep(engine), Validation(engine, len(held_out))

    def trains() -> float:
        return step(batches_of(run, next(numbers), 0), 1e-2, 0.1)[0].loss

    def validates() -> float:
        return validation(held_out)[0]

    def validates_eagerly() -> float:  # a first one is never recorded
        return Validation(engine, len(held_out))(held_out)[0]

    turns = [trains] * WARMUP
    turns += [validates, trains, trains]  # recorded, replayed
    turns += [validates_eagerly, validates, trains, validates]  # recorded, replayed, replayed
    turns += [trains, validates_eagerly]
    with replays_as_on_a_gpu(engine):
        found = [turn() for turn in turns]
    assert engine.recorder is None or len(engine.recorder.recordings) == 2
    engine.release()
    return found


@pytest.mark.full
@pytest.mark.parametrize("recipe", chosen(RECIPES, [Fp8Recipe.delayed]))
def test_capture_quantises_weights_after_validation(recipe: Fp8Recipe):
    whole = GRAPHS["full iteration"]
    graphs = {
        "eager": CudaGraphConfig(),
        "full iteration": whole,
        "with its update": dataclasses.replace(whole, optimizer=True),
    }
    runs = {name: with_experts(recipe, graph) for name, graph in graphs.items()}
    results = {
        name: run_distributed(validated_before_recordings, 1, run)[0] for name, run in runs.items()
    }
    eager = results.pop("eager")
    assert len(set(eager)) == len(eager) - 1  # two validations see the same weights
    for name, replayed in results.items():
        assert replayed == eager, name


def rolled_back(rank: int, run: Run, folder: Path) -> list[list[float]]:
    """Return results of an engine that trained on and rolled back, and of a new engine."""
    engines = [engine_of(run, rank) for _ in range(2)]
    held_out = batches_of(run, 99, 0)
    steps = [TrainingStep(each) for each in engines]
    validations = [Validation(each, len(held_out)) for each in engines]
    for number in range(2):
        steps[0](batches_of(run, number, 0), 1e-2, 0.1)
    path = save_checkpoint(folder, engines[0], run, Progress(2, 2, 0), {"sequences": 0})
    steps[0](batches_of(run, 2, 0), 1e-2, 0.1)
    before = validations[0](held_out)[0]
    assert not any(linear.stale for linear in fp8_of(engines[0]).linears.values())
    found = []
    for engine, step, validation in zip(engines, steps, validations, strict=True):
        load_checkpoint(path, read_manifest(path), engine)
        # a step may quantise weights whatever has changed, a validation does not
        loss = validation(held_out)[0]
        assert loss != before
        found.append([loss, step(batches_of(run, 2, 0), 1e-2, 0.1)[0].loss])
    return found


@pytest.mark.every(3)
@pytest.mark.parametrize("recipe", RECIPES)
def test_rollback_drops_quantised_copies_of_later_weights(recipe: Fp8Recipe, tmp_path: Path):
    run = with_experts(recipe, CudaGraphConfig())
    ((used, new),) = run_distributed(rolled_back, 1, run, tmp_path)
    assert used == new


@pytest.mark.full
@pytest.mark.parametrize("recipe", chosen(RECIPES, [Fp8Recipe.delayed]))
def test_loss_falls_as_without_fp8(recipe: Fp8Recipe):
    train = TrainConfig(steps=20, seq_len=16, micro_batch=2, global_batch=2)
    runs = (run_of(each, TWO, train=train) for each in (None, recipe))
    wide, narrow = (run_distributed(overfitted, 1, run)[0] for run in runs)
    assert wide[-1] < 0.5 * wide[0]
    assert abs(narrow[-1] - wide[-1]) < 0.1 * wide[0]


@pytest.mark.every(4)
@pytest.mark.parametrize(
    ("recipe", "graph"),
    [("current", "none"), ("block", "full_iteration"), ("delayed", "full_iteration")],
)
def test_resumed_training_repeats_bit_for_bit(recipe: str, graph: str, tmp_path: Any):
    given = (
        *corpus_in(tmp_path / "corpus"),
        "precision=bf16",
        f"precision.fp8.recipe={recipe}",
        f"cuda_graph={graph}",
        "checkpoint.interval=4",
    )
    long, first = tmp_path / "long", tmp_path / "first"
    runs = [
        composed([*given, f"run_dir={long}", "train.steps=8"], 1),
        composed([*given, f"run_dir={first}", "train.steps=4"], 1),
        composed([*given, f"run_dir={first}", "train.steps=8", "resume=auto"], 1),
    ]
    run_distributed(stopped_and_resumed, 1, runs)
    wanted, found = (
        {row["step"]: row.get("loss") for row in untimed(each) if "loss" in row}
        for each in (long, first)
    )
    assert len(wanted) == 8 and found == wanted
