"""Training with experts in FP8: layouts, dispatchers, schedules, recomputation and graphs
change no bits, or no more than other sums explain; weights are quantised once per update.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from app.choices import (
    DispatcherKind,
    Dtype,
    Fp8Part,
    Fp8Recipe,
    GraphImpl,
    GraphScope,
    Recompute,
    ScheduleName,
)
from app.config import (
    CudaGraphConfig,
    Fp8Config,
    MoEConfig,
    OptimConfig,
    ParallelConfig,
    PrecisionConfig,
    RecomputeConfig,
    Run,
    ScheduleConfig,
)
from app.config.experts import StaticConfig
from app.rules import check
from tests.cases import chosen
from tests.distributed import run_distributed
from tests.processes.fp8_training import (
    STEPS,
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
from tests.runs import TINY, make_run
from tests.training import composed, corpus_in, untimed

ALONE = (Fp8Part.experts,)
ALL = (Fp8Part.linear, Fp8Part.head, Fp8Part.experts)
MOE = dataclasses.replace(TINY.moe, ffn_hidden_size=32, first_k_dense=0, z_loss_coeff=0.0)
PLAIN = OptimConfig(lr=1e-2, warmup_steps=2, clip_norm=0.0)


def run_of(
    include: tuple[Fp8Part, ...] = ALL,
    params: Dtype = Dtype.bfloat16,
    moe: MoEConfig = MOE,
    **sections: Any,
) -> Run:
    """With no parts, in the type of parameters alone."""
    parallel = sections.get("parallel", ParallelConfig())
    layers = max(2, parallel.pp * parallel.vpp)
    model = dataclasses.replace(TINY, num_layers=layers, ffn_hidden_size=64, moe=moe)
    fp8 = Fp8Config(Fp8Recipe.current, include=include) if include else Fp8Config()
    return make_run(model, **({"precision": PrecisionConfig(params, fp8=fp8)} | sections))


def static(**choices: Any) -> MoEConfig:
    return dataclasses.replace(
        MOE, dispatcher=DispatcherKind.static, static=StaticConfig(**choices)
    )


PARTS = (Recompute.attn_core, Recompute.norm, Recompute.shared, Recompute.experts_act)
ONE_STAGE: dict[str, dict[str, Any]] = {
    "recompute everything": {"recompute": RecomputeConfig(full=True)},
    "recompute parts": {"recompute": RecomputeConfig(phases=PARTS)},
    "recompute experts": {"recompute": RecomputeConfig(phases=(Recompute.moe,))},
    "one bucket per parameter": {"optim": dataclasses.replace(PLAIN, bucket_numel=1)},
}


@pytest.mark.full
def test_recomputation_and_buckets_change_no_bits():
    runs = {
        name: run_of(**({"optim": PLAIN} | sections))
        for name, sections in {"plain": {}, **ONE_STAGE}.items()
    }
    (results,) = run_distributed(several, 1, runs)
    expected = results.pop("plain")
    for name, found in results.items():
        expect_same(found, expected, name)
        assert found["times"] == {STEPS}, name


STAGES = {
    "1f1b": (ParallelConfig(pp=2), ScheduleName.auto),
    "zero_bubble_h1": (ParallelConfig(pp=2), ScheduleName.zero_bubble_h1),
    "zero_bubble_v": (ParallelConfig(pp=2, vpp=2), ScheduleName.zero_bubble_v),
}


@pytest.mark.full
@pytest.mark.parametrize("schedule", chosen(STAGES, ["zero_bubble_v"]))
def test_stages_change_no_bits(schedule: str):
    parallel, name = STAGES[schedule]
    run = run_of(parallel=parallel, schedule=ScheduleConfig(name=name), optim=PLAIN)
    alone = dataclasses.replace(run, parallel=ParallelConfig(), schedule=ScheduleConfig())
    one = run_distributed(trained, 1, check(alone))[0]
    for found in run_distributed(trained, 2, run):
        for weight, grad in one["grads"].items():
            assert (found["grads"][weight] == grad).all(), weight
        assert found["times"] == {STEPS}


LAYOUTS: dict[str, tuple[MoEConfig, ParallelConfig]] = {
    "ep2": (MOE, ParallelConfig(dp=2, ep=2)),
    "ep2 static": (static(), ParallelConfig(dp=2, ep=2)),
    "etp2": (MOE, ParallelConfig(tp=2)),
    "tp2 ep2": (MOE, ParallelConfig(tp=2, ep=2, etp=1)),
    "dp2": (MOE, ParallelConfig(dp=2)),
}


@pytest.mark.parametrize("layout", chosen(LAYOUTS, ["ep2 static", "etp2"]))
def test_layouts_are_as_near_to_fp64_as_one_process(layout: str):
    """Ranks that have parts of an expert's width scale their own; a row's scale is its own."""
    fp32 = Dtype.float32
    exact = run_distributed(exact_step, 1, run_of((), fp32))[0]
    one = run_distributed(first_step, 1, run_of(ALONE, fp32))[0]
    moe, parallel = LAYOUTS[layout]
    run = run_of(ALONE, fp32, moe, parallel=parallel)
    noise = distance(one, exact)
    assert 1e-3 < noise < 0.25  # steps of 2⁻⁴ in every GEMM of experts
    for found in run_distributed(first_step, run.world_size, run):
        assert distance(found, exact) < 1.25 * noise
        assert abs(found["losses"][0] - exact["losses"][0]) < 1e-2


LAYER = captured(GraphImpl.local)
STEP = captured(GraphImpl.full_iteration)
ROUTER = captured(GraphImpl.local, GraphScope.attn, GraphScope.moe_router)
UP_TO_DISPATCH = dataclasses.replace(
    ROUTER, scope=(GraphScope.attn, GraphScope.moe_router, GraphScope.moe_preprocess)
)
EXPERTS = captured(GraphImpl.local, GraphScope.moe)
GRAPHS: dict[str, tuple[MoEConfig, dict[str, Any], dict[str, CudaGraphConfig]]] = {
    "one rank": (MOE, {}, {"layer": LAYER, "experts": EXPERTS, "step": STEP}),
    "ep2": (MOE, {"parallel": ParallelConfig(dp=2, ep=2)}, {"partial": UP_TO_DISPATCH}),
    "ep2 static": (
        static(),
        {"parallel": ParallelConfig(dp=2, ep=2)},
        {"layer": LAYER, "experts": EXPERTS, "step": STEP},
    ),
    "pp2 zero-bubble": (
        MOE,
        {
            "parallel": ParallelConfig(pp=2),
            "schedule": ScheduleConfig(name=ScheduleName.zero_bubble_h1),
        },
        {"step": STEP},
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("layout", chosen(GRAPHS, ["ep2 static"]))
def test_captured_training_equals_eager_training_bit_for_bit(layout: str):
    """On the stand-in, whose replays rerun the work: counts per step equal eager ones."""
    moe, sections, graphs = GRAPHS[layout]
    runs = {
        name: run_of(moe=moe, cuda_graph=graph, **sections)
        for name, graph in {"eager": CudaGraphConfig(), **graphs}.items()
    }
    for results in run_distributed(several, runs["eager"].world_size, runs):
        expected = results.pop("eager")
        for name, found in results.items():
            expect_same(found, expected, name)
            assert found["times"] == {STEPS}, name


@pytest.mark.full
def test_loss_falls_as_without_fp8():
    wide, narrow = (run_distributed(overfitted, 1, run_of(each))[0] for each in ((), ALL))
    assert wide[-1] < 0.5 * wide[0]
    assert abs(narrow[-1] - wide[-1]) < 0.1 * wide[0]


@pytest.mark.full
@pytest.mark.parametrize("graph", ["none", "full_iteration"])
def test_resumed_training_repeats_bit_for_bit(graph: str, tmp_path: Any):
    given = (
        *corpus_in(tmp_path / "corpus"),
        "model=moe_tiny",
        "precision=bf16",
        "precision.fp8.recipe=current",
        "precision.fp8.include=[linear,experts]",
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
