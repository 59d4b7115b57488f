"""The plan of FP8, on a host without Transformer Engine."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from app.choices import (
    DispatcherKind,
    Dtype,
    Fp8Part,
    Fp8Recipe,
    GraphImpl,
    ScheduleName,
)
from app.cli.options.compose import load_overrides
from app.cli.plan import main
from app.config import (
    CudaGraphConfig,
    Fp8Config,
    ModelConfig,
    MoEConfig,
    ParallelConfig,
    PrecisionConfig,
    Run,
    ScheduleConfig,
    TrainConfig,
)
from app.plan.cost.flops import PLANNED_PEAK, stage_flops
from app.plan.cost.times import QUANTISED, PartTimes, stage_times
from app.plan.layout import select_layout
from app.plan.memory.activations import MicrobatchMemory, chunk_activations
from app.plan.memory.overheads import FP8_WORKSPACE
from app.plan.memory.rank_memory import RankMemory
from app.plan.parts.fp8 import EXPERTS_SPEEDUP, RECIPES, fp8_copy
from app.plan.parts.stage import (
    LayerPart,
    StageEnd,
    StagePart,
    part_operations,
    sizes_of,
    stage_parts,
)
from app.plan.parts.trace import Work
from app.plan.stages import Stage
from app.planner.plan import Plan
from app.planner.summary import summary_lines
from app.rules import check

ROOT = Path(__file__).parent.parent.parent
MODEL = ModelConfig(
    num_layers=4,
    hidden_size=512,
    ffn_hidden_size=1024,
    num_heads=8,
    num_kv_heads=8,
    vocab_size=4096,
)
TOKENS = 2 * 1024
LAYER = 4 * 512 * 512 + 3 * 512 * 1024  # elements of a layer's matrices
# widths of what is quantised forward and backward: what comes into all matrices and the head, and
# gradients of what they make
INPUTS, GRADS = 4 * (3 * 512 + 1024) + 512, 4 * (1536 + 512 + 2048 + 512) + 4096
WHOLE = Stage((0, 1, 2, 3), embedding=True, head=True)
LAST = Stage((2, 3), embedding=False, head=True)
BOTH = (Fp8Part.linear, Fp8Part.head)


def run_of(fp8: Fp8Config | None = None, model: ModelConfig = MODEL, **sections: object) -> Run:
    train = TrainConfig(seq_len=1024, micro_batch=2, global_batch=8)
    precision = PrecisionConfig(Dtype.bfloat16, fp8=fp8 or Fp8Config())
    given = {"train": train, "precision": precision, **sections}
    return check(Run(model, **given))  # type: ignore[arg-type]


def parts_of(run: Run, rank: int = 0) -> dict[str, int]:
    memory: RankMemory = Plan(run).memory[rank]
    return {part.name: part.bytes for part in memory.parts}


def in_fp8(recipe: Fp8Recipe = Fp8Recipe.current, **choices: object) -> Fp8Config:
    return Fp8Config(recipe, **choices)  # type: ignore[arg-type]


def test_weights_have_two_copies():
    plain, narrow = parts_of(run_of()), parts_of(run_of(in_fp8()))
    assert "weights in FP8" not in plain
    # two copies of each of four layers
    assert narrow["weights in FP8"] == 4 * 2 * LAYER
    assert narrow["library workspaces"] - plain["library workspaces"] == FP8_WORKSPACE
    with_head = parts_of(run_of(in_fp8(include=BOTH)))
    assert with_head["weights in FP8"] == 4 * 2 * LAYER + 2 * 4096 * 512
    for name in ("parameters", "gradients", "optimizer"):
        assert plain[name] == narrow[name]
    halves = parts_of(run_of(in_fp8(), parallel=ParallelConfig(tp=2)))
    assert halves["weights in FP8"] == 4 * LAYER
    stage = parts_of(run_of(in_fp8(first_layers=1), parallel=ParallelConfig(pp=2)))
    assert stage["weights in FP8"] == 2 * LAYER


def test_blocks_have_scales():
    assert fp8_copy(Fp8Recipe.block, 2048 * 512) == 2048 * 512 + 4 * 4 * 2048
    assert fp8_copy(Fp8Recipe.current, 2048 * 512) == 2048 * 512


def test_inputs_are_kept_in_a_byte_per_element():
    """Inputs of a layer's four linear layers take one byte instead of two.

    Those are hidden states twice, heads, and the feed-forward's inner width. All else is unchanged.
    """
    plain, narrow = (microbatch(run_of(fp8)).kept for fp8 in (None, in_fp8()))
    attn = TOKENS * (512 + 512)
    # attention has kept its result for itself already: in FP8 it is there besides
    assert plain["attn"] - narrow["attn"] == 4 * (attn - 2 * TOKENS * 512)
    assert plain["mlp"] - narrow["mlp"] == 4 * TOKENS * (512 + 1024)
    assert plain["head"] == narrow["head"]


def microbatch(run: Run, stage: Stage = WHOLE) -> MicrobatchMemory:
    return chunk_activations(run, stage, select_layout(run)).usual


def parts_of_stage(model: ModelConfig, stage: Stage, fp8: Fp8Config) -> list[StagePart]:
    return stage_parts(Run(model, precision=PrecisionConfig(fp8=fp8)), stage)


def test_layers_left_out_are_planned_as_before():
    parts = parts_of_stage(MODEL, WHOLE, in_fp8(first_layers=1, last_layers=1))
    wide = LayerPart(MODEL.layer_specs[0])
    narrow = dataclasses.replace(wide, in_fp8=True)
    assert parts == [StageEnd.embedding, wide, narrow, narrow, wide, StageEnd.head]
    moe = dataclasses.replace(MODEL, moe=MoEConfig(first_k_dense=1))
    dense, routed, *_ = moe.layer_specs
    assert parts_of_stage(moe, Stage((0, 1), False, False), in_fp8()) == [
        LayerPart(dense, in_fp8=True),
        LayerPart(routed, in_fp8=True),
    ]
    assert parts_of_stage(moe, Stage((1,), False, False), in_fp8(include=(Fp8Part.head,))) == [
        LayerPart(routed)
    ]


def test_gradients_that_wait_take_half():
    schedule = ScheduleConfig(name=ScheduleName.zero_bubble_h1)
    waiting = [
        microbatch(run_of(fp8, parallel=ParallelConfig(pp=2), schedule=schedule), LAST).waiting
        for fp8 in (None, in_fp8(include=BOTH), in_fp8(Fp8Recipe.block, include=BOTH))
    ]
    # one byte per element in place of two, and scales
    assert waiting[1] == waiting[0] / 2
    assert waiting[1] < waiting[2] < 0.53 * waiting[0]


@pytest.mark.full
def test_the_command_plans_without_torch_or_the_library():
    code = (
        "import sys\n"
        "for name in ('torch', 'transformer_engine'): sys.modules[name] = None\n"
        "from app.cli.plan import main\n"
        "main(['what=memory', 'model=llama3_8b', 'parallel.dp=8', 'train.global_batch=64', "
        "'precision=bf16', 'precision.fp8.recipe=current', 'out=null'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "weights in FP8" in done.stdout and "two copies of 6.98 B" in done.stdout


def test_times_are_those_of_faster_gemms_and_operations_stay():
    """Attention's scores are no linear layer's product."""
    plain, narrow, block = (
        run_of(fp8) for fp8 in (None, in_fp8(include=BOTH), in_fp8(Fp8Recipe.block, include=BOTH))
    )
    assert stage_flops(plain, [WHOLE], select_layout(plain)) == stage_flops(
        narrow, [WHOLE], select_layout(narrow)
    )
    (before,), (after,), (blocks,) = (Plan(run).stage_seconds for run in (plain, narrow, block))
    rate = PLANNED_PEAK * 1e12 * plain.hardware.efficiency
    gemms = 2 * TOKENS * (4 * LAYER + 4096 * 512) / rate
    speeds = RECIPES[Fp8Recipe.current].speedup, RECIPES[Fp8Recipe.block].speedup
    assert 1 < speeds[1] < speeds[0] < 2  # twice the GEMM speed, less the time for quantization
    for found, speedup in zip((after, blocks), speeds, strict=True):
        saved = gemms * (1 - 1 / speedup)
        assert before.forward - found.forward == pytest.approx(saved)
        assert before.backward_weight - found.backward_weight == pytest.approx(saved)
        assert before.backward_input - found.backward_input == pytest.approx(saved)


def with_profile(run: Run, **changed: float | None) -> Run:
    hardware = load_overrides(["hardware=h200"]).hardware
    assert hardware.profile is not None
    profile = dataclasses.replace(hardware.profile, **changed)
    return dataclasses.replace(run, hardware=dataclasses.replace(hardware, profile=profile))


def times_of(run: Run, **changed: float | None) -> PartTimes:
    own = with_profile(run, **changed)
    assert own.hardware.profile is not None
    return stage_times(own, [WHOLE], select_layout(own), own.hardware.profile)[0]


@pytest.mark.full
@pytest.mark.parametrize(
    ("recipe", "launches"), [("current", 2.7), ("delayed", 1.7), ("block", 1.7)]
)
def test_what_quantising_takes_the_host(recipe: str, launches: float):
    """Launches for each product outside of graphs, as eager steps of `small` took on an H200."""

    def host(fp8: Fp8Config | None, graph: GraphImpl = GraphImpl.none) -> float:
        run = run_of(fp8, cuda_graph=CudaGraphConfig(graph))
        return times_of(run, launch_us=1.0).forward_host

    matrices = 4 * 4
    chosen = in_fp8(Fp8Recipe(recipe))
    assert host(chosen) - host(None) == pytest.approx(matrices * launches * 1e-6)
    assert host(chosen, GraphImpl.local) == pytest.approx(host(None, GraphImpl.local)) != 0
    assert host(chosen, GraphImpl.full_iteration) == 0


@pytest.mark.every(3)
@pytest.mark.parametrize(("recipe", "moved"), [("current", 6), ("delayed", 4), ("block", 6)])
def test_measured_speeds_of_gemms_and_of_quantising(recipe: str, moved: int):
    """Each product quantises its input in forward and its output's gradient in backward."""
    run = run_of(in_fp8(Fp8Recipe(recipe), include=BOTH))
    given = {f"fp8_{recipe}_tflops": 500.0, "fp8_quantise_gb_s": 100.0}
    found = times_of(run, kernel_us=0.0, gemm_memory=0.0, sums_gb_s=1e5, **given)
    gemms = 2 * TOKENS * (4 * LAYER + 4096 * 512) / 500e12
    assert found.forward["GEMMs"] == pytest.approx(gemms)
    assert found.backward_input["GEMMs"] == pytest.approx(gemms)
    assert found.forward[QUANTISED] == pytest.approx(TOKENS * INPUTS * moved / 100e9)
    assert found.backward_input[QUANTISED] == pytest.approx(TOKENS * GRADS * moved / 100e9)
    plan, plain = Plan(with_profile(run, **given)), Plan(with_profile(run_of()))
    weights = 4 * LAYER + 4096 * 512
    assert plan.tail.optimizer - plain.tail.optimizer == pytest.approx(weights * moved / 100e9)


def test_measured_speeds_of_experts():
    """Products of outputs and of inputs' gradients are as fast as measured, and rows quantised for
    both; the gradient of the weight stays as it is.
    """
    fp8 = in_fp8(include=(Fp8Part.linear, Fp8Part.experts))
    bare = {"gemm_memory": 0.0, "kernel_us": 0.0, "grouped_tflops": 400.0}
    bare["fp8_grouped_tflops"] = 800.0
    plain = times_of(run_of(in_fp8(include=(Fp8Part.linear,)), model=MOE), **bare)
    found = times_of(run_of(fp8, model=MOE), **bare)
    for name in ("forward", "backward_input"):
        own, before = getattr(found, name), getattr(plain, name)
        assert own["grouped GEMMs"] == pytest.approx(before["grouped GEMMs"] / 2)
        assert own[QUANTISED] > before[QUANTISED]
    assert found.backward_weight == pytest.approx(plain.backward_weight)


def test_without_measured_speeds_gemms_are_as_many_times_faster(capsys):
    """And the command says so; with them it says nothing."""
    names = ("current_tflops", "delayed_tflops", "block_tflops", "quantise_gb_s")
    bare = dict.fromkeys(f"fp8_{name}" for name in names)
    plain, narrow = (
        times_of(run_of(fp8), gemm_memory=0.0, **bare) for fp8 in (None, in_fp8(include=BOTH))
    )
    gemms = 2 * TOKENS * (4 * LAYER + 4096 * 512) / 790e12
    saved = gemms * (1 - 1 / RECIPES[Fp8Recipe.current].speedup)
    gone = plain.backward_weight["GEMMs"] - narrow.backward_weight["GEMMs"]
    assert gone == pytest.approx(saved) and not narrow.forward[QUANTISED]
    typed = ["what=schedule", "model=llama3_8b", "parallel.dp=8", "train.global_batch=64"]
    typed += ["precision=bf16", "precision.fp8.recipe=current", "hardware=h200", "out=null"]
    assert main(typed) == 0
    assert "1.65 times" not in capsys.readouterr().out
    assert main([*typed, *(f"hardware.profile.{key}=null" for key in bare)]) == 0
    assert "1.65 times as fast as others" in " ".join(capsys.readouterr().out.split())


MOE = dataclasses.replace(
    MODEL, moe=MoEConfig(num_experts=8, top_k=2, ffn_hidden_size=256, first_k_dense=1)
)
EXPERT = 3 * 512 * 256  # elements of one expert
EXPERTS = (Fp8Part.experts,)


def moe_run(include: tuple[Fp8Part, ...], first_layers: int = 0, **sections: object) -> Run:
    """Parts in FP8; none: none are."""
    fp8 = in_fp8(include=include, first_layers=first_layers) if include else None
    return run_of(fp8, MOE, **sections)


def test_the_first_line_names_what_is_in_fp8():
    """Also that nothing is, where a choice of it lacks the recipe."""
    lines = {
        None: "bfloat16",
        in_fp8(include=BOTH): "bfloat16, linear and head in FP8 (current)",
        Fp8Config(include=BOTH): "bfloat16, nothing in FP8: no precision.fp8.recipe",
    }
    for fp8, line in lines.items():
        assert dict(summary_lines(Plan(run_of(fp8))))["model"].endswith(f" layers, {line}")


def test_weights_of_experts_have_two_copies():
    layers = 3 * 8 * 2 * EXPERT
    plain, narrow = parts_of(moe_run(())), parts_of(moe_run(EXPERTS))
    assert narrow["weights in FP8"] == layers
    assert narrow["library workspaces"] == plain["library workspaces"]  # torch's own GEMM
    ranks = moe_run(EXPERTS, parallel=ParallelConfig(dp=2, ep=2))
    assert parts_of(ranks)["weights in FP8"] == layers // 2
    part = moe_run(EXPERTS, parallel=ParallelConfig(tp=2))
    assert parts_of(part)["weights in FP8"] == 3 * 8 * EXPERT
    both = parts_of(moe_run((Fp8Part.linear, Fp8Part.experts)))["weights in FP8"]
    linear = parts_of(moe_run((Fp8Part.linear,)))["weights in FP8"]
    assert both == layers + linear
    assert parts_of(moe_run(EXPERTS, first_layers=3))["weights in FP8"] == layers // 3


def test_rows_of_experts_are_kept_as_they_come():
    plain, narrow = (microbatch(moe_run(include)) for include in ((), EXPERTS))
    assert plain.kept == narrow.kept and plain.waiting == narrow.waiting


def test_only_layers_with_experts_change_where_only_experts_do():
    parts = parts_of_stage(MOE, Stage((0, 1), False, False), in_fp8(include=EXPERTS))
    assert parts == [LayerPart(MOE.layer_specs[0]), LayerPart(MOE.layer_specs[1], in_fp8=True)]
    s = sizes_of(moe_run(EXPERTS), select_layout(moe_run(EXPERTS)))
    ops = part_operations(s, parts[1], s.recompute.usual)
    rows = 2 * TOKENS
    grouped = [op for op in ops if op.work is Work.grouped]
    assert [op.scratch for op in grouped] == [
        (rows * 512, rows * 2 * 256),
        (rows * 256, rows * 512),
    ]
    assert [op.kernels for op in grouped] == [1, 1]  # their rows come in FP8
    faster = [op for op in ops if op.fp8 is not None]
    assert faster == grouped
    assert {op.fp8.speedups for op in faster} == {(EXPERTS_SPEEDUP, 1.0)}
    assert [(op.fp8.inputs, op.fp8.grads) for op in faster] == [
        (rows * 512, rows * 2 * 256),
        (rows * 256, rows * 512),
    ]


@pytest.mark.full
def test_a_step_with_experts_in_fp8_has_a_measured_time():
    """Quantising the weights of linear layers is part of it, at speeds of a recipe; that of experts
    has none.
    """
    found = {
        include: Plan(with_profile(moe_run(include)))
        for include in ((), EXPERTS, (Fp8Part.linear,), (Fp8Part.linear, Fp8Part.experts))
    }
    updates = [plan.tail.optimizer for plan in found.values()]
    assert updates[0] == updates[1] < updates[2] == updates[3]
    assert all(plan.step_seconds > 0 for plan in found.values())


def test_gradients_of_experts_weights_take_their_time():
    (before,), (after,) = (Plan(moe_run(include)).stage_seconds for include in ((), EXPERTS))
    rate = PLANNED_PEAK * 1e12 * moe_run(()).hardware.efficiency
    gemms = 2 * 2 * TOKENS * 3 * EXPERT / rate  # of two experts per token, in three layers
    saved = gemms * (1 - 1 / EXPERTS_SPEEDUP)
    assert before.forward - after.forward == pytest.approx(saved)
    assert before.backward_input - after.backward_input == pytest.approx(saved)
    assert before.backward_weight == after.backward_weight
    hardware = load_overrides(["hardware=h200"]).hardware
    assert hardware.profile is not None
    plain, narrow = (
        stage_times(run, [WHOLE], select_layout(run), hardware.profile)[0]
        for run in (moe_run(include, hardware=hardware) for include in ((), EXPERTS))
    )
    assert plain.backward_weight == narrow.backward_weight
    kind = Work.grouped.value
    assert narrow.backward_input[kind] < plain.backward_input[kind]


@pytest.mark.parametrize(
    ("choices", "launches"),
    [
        ({"dispatcher": DispatcherKind.static}, [1, 1]),
        ({"dispatcher": DispatcherKind.all_to_all}, [2, 1]),
    ],
)
def test_rows_without_fused_quantization_take_a_kernel(
    choices: dict[str, Any], launches: list[int]
):
    model = dataclasses.replace(MOE, moe=dataclasses.replace(MOE.moe, **choices))
    run = run_of(in_fp8(include=EXPERTS), model, parallel=ParallelConfig(dp=2, ep=2))
    s = sizes_of(run, select_layout(run))
    part = LayerPart(model.layer_specs[1], in_fp8=True)
    ops = part_operations(s, part, s.recompute.usual)
    assert [op.kernels for op in ops if op.work is Work.grouped] == launches
