from __future__ import annotations

import dataclasses
import gzip
import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from app.choices import AttentionBackendKind, Dtype, GraphImpl, Recompute, ScheduleName
from app.cli.options.compose import load_overrides
from app.cli.plan import main
from app.config import (
    CudaGraphConfig,
    HardwareConfig,
    HardwareProfile,
    ModelConfig,
    MoEConfig,
    OptimConfig,
    ParallelConfig,
    PrecisionConfig,
    RecomputeConfig,
    Run,
    ScheduleConfig,
    TrainConfig,
)
from app.errors import ConfigError
from app.plan.cost.flops import stage_seconds
from app.plan.cost.part_times import ARITHMETIC, LAUNCHES, OFFLOADED, RECOMPUTED, PartTimes
from app.plan.cost.power import at_clocks, power_bound
from app.plan.cost.rates import CUDNN_ORDERED, FLASH_ANY_ORDER
from app.plan.cost.step_time import IDLE
from app.plan.cost.times import expected_load, stage_times
from app.plan.dependencies import Pipeline
from app.plan.formatting import GIB
from app.plan.parts.trace import Work
from app.planner.plan import Plan
from app.rules import check
from tests.random_runs import random_run

ROOT = Path(__file__).resolve().parents[2]
# speeds that are easy to divide by; nothing takes time but what a test turns on
PROFILE = HardwareProfile(
    format=2,
    gpu="H200",
    source="a test",
    gemm_tflops=1.0,
    sustained_tflops=1.0,
    gemm_memory=0.0,
    router_tflops=1.0,
    grouped_tflops=1.0,
    grouped_tile=0.0,
    attention=[[128, 4096, 4, 2, 1, 0.5], [64, 4096, 2, 1, 1, 0.5]],
    activation_gb_s=(1.0, 2.0),
    heads_gb_s=(1.0, 2.0),
    norm_gb_s=(1.0, 2.0),
    loss_gb_s=(1.0, 2.0),
    rows_gb_s=(1.0, 2.0),
    other_gb_s=(1.0, 2.0),
    sums_gb_s=1.0,
    optimizer_gb_s=1.0,
    kernel_us=0.0,
    launch_us=0.0,
    step_ms=0.0,
    collective_us=0.0,
    ring_gb_s=1.0,
    all_to_all_gb_s=1.0,
    peer_gb_s=1.0,
    send_us=0.0,
    send_gb_s=1.0,
    hidden=1.0,
)
H200 = load_overrides(["hardware=h200"]).hardware.profile
MODEL = ModelConfig(
    num_layers=2,
    hidden_size=256,
    ffn_hidden_size=512,
    num_heads=4,
    num_kv_heads=2,
    vocab_size=1024,
)
MOE = dataclasses.replace(
    MODEL, moe=MoEConfig(num_experts=8, top_k=2, ffn_hidden_size=128, force_balance=True)
)
T, D, F, V, N, G, H, S = 2 * 128, 256, 512, 1024, 4, 2, 64, 128
WHOLE = CudaGraphConfig(GraphImpl.full_iteration)


def run_of(model: ModelConfig = MODEL, profile: HardwareProfile = PROFILE, **sections) -> Run:
    chosen = {
        "train": TrainConfig(seq_len=S, micro_batch=2, global_batch=8, deterministic=False),
        "precision": PrecisionConfig(Dtype.bfloat16),
        "hardware": HardwareConfig(profile=profile),
        "cuda_graph": WHOLE,
    }
    return check(Run(model, **(chosen | sections)))


def kinds_of(run: Run, load: float | None = None) -> dict[str, float]:
    plan = Plan(run)
    profile = run.hardware.profile
    assert profile is not None
    (times,) = stage_times(run, plan.stages.in_order, plan.layout, profile, load=load)
    return times.by_kind()


def test_a_dense_model_by_hand():
    """GEMMs, attention and bytes of two layers and a head, computed independently."""
    found = kinds_of(run_of())
    weights = 2 * (D * (N + 2 * G) * H + N * H * D + 3 * D * F) + D * V
    sums = 8 * weights / 1e9
    assert found[Work.gemm.value] == pytest.approx(3 * 2 * T * weights / 1e12 + sums)
    # scores and values of the causal half: T·S pairs less those ahead, 2·2·H operations each
    forward = 2 * T * (S + 1) / 2 * N * 2 * H
    expected = 2 * (forward / 2e12 + 2 * forward / 1e12)
    assert found[Work.attention.value] == pytest.approx(expected, rel=0.01)
    # SwiGLU reads 2F and writes F; backward reads 2F and F and writes 2F
    assert found[Work.activation.value] == pytest.approx(2 * 2 * T * F * (3 / 1e9 + 5 / 2e9))
    # norms read and write D; backward reads D twice and writes it
    assert found[Work.norm.value] == pytest.approx(2 * T * D * 5 * (2 / 1e9 + 3 / 2e9))
    assert found[Work.loss.value] == pytest.approx(2 * T * V * (1 / 1e9 + 2 / 2e9))
    width = (N + 2 * G) * H
    assert found[Work.heads.value] == pytest.approx(2 * 2 * T * width * (2 / 1e9 + 2 / 2e9))
    assert not found.get(LAUNCHES) and RECOMPUTED not in found


def test_all_passes_together_are_the_stages():
    plan = Plan(run_of(model=MOE, parallel=ParallelConfig(pp=2)))
    for seconds, times in zip(plan.stage_seconds, plan.stage_times, strict=True):
        assert seconds.total == pytest.approx(sum(times.by_kind().values()))


def test_experts_take_as_long_as_their_rows():
    even, skewed = (kinds_of(run_of(model=MOE), load=load) for load in (1.0, 1.5))
    weights = 2 * 8 * 3 * D * 128
    count = run_of(model=MOE).num_microbatches
    sums = 8 * weights * (1 - 1 / (2 * count)) / 1e9  # the first is only written
    key = Work.grouped.value
    assert skewed[key] - sums == pytest.approx(1.5 * (even[key] - sums))
    assert even[key] - sums == pytest.approx(2 * 3 * 2 * T * 2 * 3 * D * 128 / 1e12)


def test_tiles_and_bytes_of_experts():
    tiles = dataclasses.replace(PROFILE, grouped_tile=16.0)
    key = Work.grouped.value
    more = kinds_of(run_of(model=MOE, profile=tiles))[key] - kinds_of(run_of(model=MOE))[key]
    assert more == pytest.approx(2 * 3 * 2 * 16 * 8 * 3 * D * 128 / 1e12)


def test_recompute_costs_a_forward():
    plain = kinds_of(run_of())
    again = kinds_of(run_of(recompute=RecomputeConfig(phases=(Recompute.mlp_act,))))
    assert again[RECOMPUTED] == pytest.approx(2 * 2 * T * F * 3 / 1e9)
    assert {k: v for k, v in again.items() if k != RECOMPUTED} == plain


def test_a_slow_host_is_hidden_by_graphs_alone():
    slow = dataclasses.replace(PROFILE, launch_us=1e4)
    eager = kinds_of(run_of(profile=slow, cuda_graph=CudaGraphConfig()))
    whole = kinds_of(run_of(profile=slow))
    layers = kinds_of(run_of(profile=slow, cuda_graph=CudaGraphConfig(GraphImpl.local)))
    assert eager[LAUNCHES] > 2 * layers[LAUNCHES] > 0 and not whole.get(LAUNCHES)
    fast = dataclasses.replace(PROFILE, launch_us=1e-3)
    assert kinds_of(run_of(profile=fast, cuda_graph=CudaGraphConfig())).get(LAUNCHES, 0) == 0


def test_reduction_and_gathering_by_hand():
    """Without overlap all bytes, n - 1 of n shards; beside compute what it does not cover."""
    parallel = ParallelConfig(dp=2)
    apart = OptimConfig(overlap_grads=False, overlap_params=False)
    plan = Plan(run_of(parallel=parallel, optim=apart))
    numel = plan.buffers[0][0].dense.numel
    assert plan.tail.reduction == pytest.approx(4 * numel / 2 / 1e9)
    assert plan.tail.gathering == pytest.approx(2 * numel / 2 / 1e9)
    fast = dataclasses.replace(PROFILE, ring_gb_s=1000.0)
    hidden = Plan(run_of(parallel=parallel, profile=fast)).tail
    assert hidden.reduction == hidden.gathering == 0.0
    half = dataclasses.replace(fast, hidden=0.5)
    beside = Plan(run_of(parallel=parallel, profile=half)).tail
    assert beside.reduction == pytest.approx(4 * numel / 2 / 1e12 / 2, rel=1e-3)
    assert plan.tail.optimizer == pytest.approx(30 * numel / 2 / 1e9 + 8 * numel / 1e9)


def test_split_backward_reduces_after_weight_gradients():
    """One chunk has nothing left to hide them behind; in a V the other one's last GEMMs are."""
    parallel = ParallelConfig(dp=2, pp=2)
    fast = dataclasses.replace(PROFILE, ring_gb_s=100.0)
    apart = OptimConfig(overlap_grads=False)

    def reduction(name: ScheduleName, optim: OptimConfig, vpp: int = 1) -> float:
        spread = dataclasses.replace(parallel, vpp=vpp)
        model = dataclasses.replace(MODEL, num_layers=4)
        schedule = ScheduleConfig(name)
        run = run_of(model=model, profile=fast, parallel=spread, schedule=schedule, optim=optim)
        return Plan(run).tail.reduction

    h1, v = ScheduleName.zero_bubble_h1, ScheduleName.zero_bubble_v
    assert reduction(ScheduleName("1f1b"), OptimConfig()) == 0 < reduction(h1, OptimConfig())
    assert reduction(h1, OptimConfig()) == pytest.approx(reduction(h1, apart))
    assert 0 < reduction(v, OptimConfig(), vpp=2) < reduction(v, apart, vpp=2)


def test_the_network_is_slower_than_the_node():
    parallel = ParallelConfig(dp=2, gpus_per_node=1)
    apart = OptimConfig(overlap_grads=False, overlap_params=False)
    hardware = HardwareConfig(profile=PROFILE, network_gb_s=0.5)
    far = Plan(run_of(parallel=parallel, optim=apart, hardware=hardware)).tail
    near = Plan(run_of(parallel=ParallelConfig(dp=2), optim=apart)).tail
    assert far.reduction == pytest.approx(2 * near.reduction)


def test_a_step_is_its_pipeline_and_what_follows():
    plan = Plan(run_of(parallel=ParallelConfig(pp=2)))
    assert plan.step_seconds == plan.timeline.makespan + plan.tail.seconds
    assert plan.time_by_kind[IDLE] > 0 and len(plan.times_of_ranks) == 2
    for found in plan.times_of_ranks:
        assert sum(found.values()) == pytest.approx(plan.step_seconds)


def test_loads_of_fresh_routers():
    """Two ranks with 64 of 128 experts each had 1.07 (docs/moe.md); never more than planned."""
    moe = MoEConfig(num_experts=128, top_k=8, ffn_hidden_size=64)
    two = {"parallel": ParallelConfig(dp=2, ep=2), "cuda_graph": CudaGraphConfig()}
    run = run_of(model=dataclasses.replace(MODEL, moe=moe), **two)
    assert expected_load(run) == pytest.approx(1.07, abs=0.03)
    bounded = dataclasses.replace(moe, planned_imbalance=1.0)
    model = dataclasses.replace(MODEL, moe=bounded)
    assert expected_load(run_of(model=model, **two)) == 1.0
    assert expected_load(run_of()) == expected_load(run_of(model=MOE)) == 1.0


def test_data_sheet_is_used_without_a_profile_of_the_dtype():
    fp32 = run_of(precision=PrecisionConfig(Dtype.float32))
    none = run_of(hardware=HardwareConfig())
    for run in (fp32, none):
        plan = Plan(run)
        assert plan.profile is None and plan.tail.seconds == 0 and not plan.time_by_kind
        assert plan.stage_seconds == stage_seconds(run, plan.stages.in_order, plan.layout)


@pytest.mark.full
def test_where_the_time_goes_is_shown(tmp_path: Path, capsys):
    typed = ["+experiment=small", "hardware=h200", "parallel.pp=2", f"out={tmp_path}"]
    assert main(["what=schedule", *typed]) == 0
    out = capsys.readouterr().out
    kinds = json.loads((tmp_path / "plan.json").read_text())["schedule"]["time"]
    shown = [kind for kind, seconds in kinds.items() if seconds > 1e-3 * sum(kinds.values())]
    assert {"GEMMs", "attention", "optimizer", IDLE} <= set(shown)
    assert all(f"\n{kind} " in out for kind in shown) and "by the speeds of H200" in out
    assert main(["what=schedule", "hardware=auto", *typed[:1], "out=null"]) == 0
    assert "Where the time goes" not in capsys.readouterr().out


def load_of(operations: float, arithmetic: float, other: float) -> PartTimes:
    """A stage of so many operations, and seconds that wait for them and for memory."""
    forward = {Work.gemm.value: arithmetic, Work.norm.value: other}
    return PartTimes(forward, {}, {}, forward_host=0.0, backward_host=0.0, operations=operations)


WARM = dataclasses.replace(PROFILE, gemm_tflops=800.0, sustained_tflops=600.0)


def clock_of(stages: list[PartTimes], pp: int = 1) -> list[float]:
    found = at_clocks(stages, Pipeline(pp, len(stages) // pp), WARM)
    key = Work.gemm.value
    for before, after in zip(stages, found, strict=True):
        assert after.forward[Work.norm.value] == before.forward[Work.norm.value]
    return [a.forward[key] / b.forward[key] for a, b in zip(stages, found, strict=True)]


def test_clocks_stay_within_what_power_allows():
    """GEMMs alone slow down to the rate that they sustain; the bound holds with other kernels
    between them; few GEMMs leave the clock alone, and so does a rank that waits.
    """
    bound = power_bound(WARM)
    assert bound == pytest.approx(600e12**3 / 800e12**2)
    (alone,) = clock_of([load_of(800e12, 1.0, 0.0)])
    assert alone == pytest.approx(600 / 800, abs=1e-4)
    (mixed,) = clock_of([load_of(800e12, 1.0, 0.5)])
    assert alone < mixed < 1
    assert 800e12 * mixed**2 == pytest.approx(bound * (0.5 + 1 / mixed), rel=1e-3)
    assert clock_of([load_of(800e12, 1.0, 2.0)]) == [1.0]
    # the first rank waits for the second one, which is slower
    first, second = clock_of([load_of(400e12, 0.5, 0.0), load_of(800e12, 1.0, 0.0)], pp=2)
    assert second == pytest.approx(alone) and first == 1.0
    # two stages of one rank share its clock
    assert clock_of([load_of(400e12, 0.5, 0.0)] * 2) == pytest.approx([alone] * 2)


def test_large_models_are_planned_at_lower_clocks():
    """For llama3_8b compute-bound kernels slow down by one factor, nothing else does.

    The small model's GPU stays at its full clock.
    """
    typed = ["train.micro_batch=1", "train.global_batch=8", "cuda_graph=full_iteration"]
    for words, slower in ((["model=llama3_8b", "model.num_layers=4"], True), ([], False)):
        run = load_overrides(["+experiment=small", *words, *typed, "hardware=h200"])
        plan = Plan(run)
        (full,) = stage_times(run, plan.stages.in_order, plan.layout, H200)
        (own,) = plan.stage_times
        ratios = {kind: own.by_kind()[kind] / time for kind, time in full.by_kind().items() if time}
        clocks = {round(ratio, 9) for kind, ratio in ratios.items() if kind in ARITHMETIC}
        assert len(clocks) == 1 and (1.05 < clocks.pop() < 1.3) is slower
        assert all(ratios[kind] == pytest.approx(1) for kind in ratios.keys() - set(ARITHMETIC))


def test_attention_by_transformer_engine_in_a_fixed_order():
    """Forward as fast as the fastest kernel, backward slower; in any order as torch's."""

    def found(deterministic: bool, backend: AttentionBackendKind) -> dict[str, float]:
        train = TrainConfig(
            seq_len=S,
            micro_batch=2,
            global_batch=8,
            deterministic=deterministic,
            attention_backend=backend,
        )
        return kinds_of(run_of(train=train))

    by_library = AttentionBackendKind.transformer_engine
    fast = found(False, AttentionBackendKind.torch)[Work.attention.value]
    assert found(False, by_library)[Work.attention.value] == fast
    ordered = found(True, by_library)[Work.cudnn_ordered_attention.value]
    # forward at 2 TFLOP/s, backward with twice the work at 1
    slower = dict(CUDNN_ORDERED)[H]
    assert ordered == pytest.approx(fast * (1 / 5 + 4 / 5 / slower))
    assert ordered < found(True, AttentionBackendKind.torch)[Work.ordered_attention.value]


@pytest.mark.parametrize(
    ("model", "layers", "measured_ms"),
    [("gemma2_9b", 4, 286), ("gpt_oss_20b", 2, 125)],
)
def test_steps_with_caps_and_sinks(model: str, layers: int, measured_ms: float):
    """As one graph on an H100 (bench/LOG.md); of capped scores and logits the passes decide."""
    run = load_overrides([
        f"model={model}", f"model.num_layers={layers}", "hardware=h100", "parallel.dp=1",
        "precision=bf16", "train.seq_len=2048", "train.global_batch=4", "train.micro_batch=1",
        "cuda_graph=full_iteration",
    ], 1)  # fmt: skip
    assert Plan(run).step_seconds * 1e3 == pytest.approx(measured_ms, rel=0.1)


def test_attention_to_gathered_keys_takes_flash():
    """Whose rates are the last two of a row; in any order backward is faster."""
    ranks = ParallelConfig(cp=2)

    def found(deterministic: bool) -> dict[str, float]:
        train = TrainConfig(seq_len=S, micro_batch=2, global_batch=8, deterministic=deterministic)
        return kinds_of(run_of(train=train, parallel=ranks))

    any_order = found(False)
    # queries of the first piece have no keys in front of them: by the fastest kernel, twice as fast
    first = 2 * any_order[Work.attention.value]
    others = found(True)[Work.ordered_attention.value] - first
    # forward at 1 TFLOP/s, backward with twice the work at half of one
    expected = others * (1 / 5 + 4 / 5 / FLASH_ANY_ORDER)
    assert any_order[Work.gathered_attention.value] == pytest.approx(expected) and first > 0


def test_head_widths_between_measured_ones():
    def forward(width: int) -> float:
        model = dataclasses.replace(MODEL, head_dim=width)
        return kinds_of(run_of(model=model))[Work.attention.value] / width

    # operations grow with the width, and so do the rates: 2 at 64, 3 at 96, 4 at 128 and beyond
    assert forward(64) == pytest.approx(1.5 * forward(96)) == pytest.approx(2 * forward(128))
    assert forward(32) == pytest.approx(forward(64)) and forward(256) == forward(128)


def test_lengths_between_measured_ones():
    """Rates between lengths by their logarithms: 1 at 64, 2 at 128, 3 at 256 and beyond."""
    rows = [[64, 64, 1, 1, 1, 1], [64, 256, 3, 3, 3, 3], [128, 64, 9, 9, 9, 9]]
    profile = dataclasses.replace(PROFILE, attention=rows)

    def per_pair(length: int) -> float:
        train = TrainConfig(seq_len=length, micro_batch=1, global_batch=8, deterministic=False)
        found = kinds_of(run_of(profile=profile, train=train))[Work.attention.value]
        return found / length**2

    assert per_pair(64) == pytest.approx(2 * per_pair(128))
    assert per_pair(64) == pytest.approx(3 * per_pair(256))
    assert per_pair(512) == pytest.approx(per_pair(256))
    assert per_pair(32) == pytest.approx(per_pair(64))


def test_a_window_takes_the_rate_of_sequences_twice_as_long():
    """Where queries see as many keys on the mean; torch's fastest kernel has no windows."""
    rows = [[64, 64, 9, 9, 1, 1], [64, 256, 9, 9, 3, 3]]
    profile = dataclasses.replace(PROFILE, attention=rows)
    train = TrainConfig(seq_len=256, micro_batch=1, global_batch=8)

    def seconds(window: int | None) -> float:
        model = dataclasses.replace(MODEL, sliding_window=window)
        found = kinds_of(run_of(model=model, profile=profile, train=train))
        return found[Work.ordered_attention.value]

    pairs = sum(min(2 * position + 1, 2 * 32 - 1) for position in range(256))
    assert seconds(32) == pytest.approx(3 * seconds(None) * pairs / 256**2)
    assert seconds(256) == seconds(None)


@pytest.mark.parametrize(
    ("changed", "key", "said"),
    [
        ({"format": 1}, "format", "format 2"),
        ({"gemm_tflops": 0.0}, "gemm_tflops", "above 0"),
        ({"sustained_tflops": 2.0}, "sustained_tflops", "must be at most gemm_tflops"),
        ({"ring_gb_s": float("nan")}, "ring_gb_s", "above 0"),
        ({"norm_gb_s": (1.0, 1e9)}, "norm_gb_s", "100,000"),
        ({"norm_gb_s": (1.0,)}, "norm_gb_s", "a pair"),
        ({"attention": [[128, 1, 1, 1, 1]]}, "attention", "four TFLOP/s"),
        ({"attention": "fast"}, "attention", "four TFLOP/s"),
        ({"attention": [[128, 4096, 1, 1, 1, -1]]}, "attention", "above 0"),
        ({"hidden": 1.5}, "hidden", "from 0 to 1"),
        ({"fp8_block_tflops": -1.0, "fp8_quantise_gb_s": 1.0}, "fp8_block_tflops", "above 0"),
        ({"fp8_block_tflops": 1.0}, "fp8_quantise_gb_s", "is needed"),
        ({"launch_us": -1.0}, "launch_us", "from 0 to"),
    ],
)
def test_impossible_profiles_are_refused_in_a_line(changed: dict, key: str, said: str):
    with pytest.raises(ConfigError) as refused:
        dataclasses.replace(PROFILE, **changed)
    message = str(refused.value)
    assert f"hardware.profile.{key}" in message and said in message and "\n" not in message


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "  hidden: 0.13\n",
            "",
            "hardware.profile.hidden=null: must have a value; measure the GPU",
        ),
        (
            "format: 2",
            "format: 1",
            "this version reads profiles of format 2; measure the GPU again",
        ),
        (
            "norm_gb_s: [3065, 2159]",
            "norm_gb_s: 3400",
            "norm_gb_s=…: must be a pair, of forward and",
        ),
        ("profile:\n", "profile: 3\nother:\n", "hardware.profile=3: is a section"),
        ("profile:\n", "profile: [\n", "no YAML"),
        ("format: 2", "format: 7", "hardware.profile.format=7"),
        (
            "ring_gb_s: 280",
            "ring_gb_s: quick",
            "hardware.profile.ring_gb_s=quick: must be a number, like 1, in hardware/mine",
        ),
        ("hidden: 0.13", "hidden: 0.13\n  speed: 3", "profile.speed=: there is no such key, in"),
    ],
)
def test_a_broken_file_is_refused_in_a_line(tmp_path: Path, capsys, old: str, new: str, said: str):
    text = (ROOT / "conf/hardware/h200.yaml").read_text()
    assert old in text
    (tmp_path / "hardware").mkdir()
    (tmp_path / "hardware/mine.yaml").write_text(text.replace(old, new))
    with pytest.raises(SystemExit) as ended:
        main(["--config-dir", str(tmp_path), "what=schedule", "hardware=mine", "precision=bf16"])
    told = capsys.readouterr().err
    assert ended.value.code == 2 and said in told and told.count("\n") == 1


@pytest.mark.every(9)
@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (
            "norm_gb_s=3000",
            "must be a pair, of forward and backward; nearest that works: [3000,3000]",
        ),
        ("norm_gb_s=[3000]", "must be a pair, of forward and backward"),
        ("gemm_tflops=null", "must have a value; measure the GPU again"),
        ("gemm_tflops=1e9", "no GPU or link has that"),
        ("gemm_tflops=79000", "peak (hardware.peak_tflops=989); at most 989"),
        ("fp8_current_tflops=1980", "peak (hardware.peak_tflops=989); at most 1978"),
        ("attention=[[128,4096,990,366,306,194]]", "at most 989"),
    ],
)
def test_a_typed_speed_is_refused_in_a_line(capsys, typed: str, said: str):
    with pytest.raises(SystemExit) as ended:
        main(["what=schedule", "+experiment=small", "hardware=h200", f"hardware.profile.{typed}"])
    told = capsys.readouterr().err
    assert ended.value.code == 2 and told.count("\n") == 1
    assert f"hardware.profile.{typed.split('=')[0]}=" in told and said in told


def packed(name: str) -> Any:
    """What a file of bench/results has."""
    return json.loads(gzip.decompress((ROOT / f"bench/results/{name}.json.gz").read_bytes()))


@pytest.mark.full
def test_recorded_steps_are_planned_as_the_record_says():
    """Five rows of bench/results/planned_times.json.gz, which docs/planning.md sums up: as the plan
    says today, and within 10 % of what was measured.
    """
    content = packed("planned_times")
    assert {row["half"] for row in content["rows"]} == {"fitted", "aside"}
    recorded = [
        row
        for row in content["rows"]
        if row["file"] == "fp8_steps.jsonl" and "model=llama3_8b" in row["overrides"]
    ]
    assert len(recorded) == 5
    for row in recorded:
        typed = [word for word in row["overrides"] if word != "hardware=h200"]
        plan = Plan(load_overrides([*typed, "hardware=h200"]))
        assert plan.step_seconds * 1e3 == pytest.approx(row["planned_ms"], rel=0.01)
        assert plan.step_seconds * 1e3 == pytest.approx(row["measured_ms"], rel=0.1)


@pytest.mark.full
def test_recorded_memory_is_planned_as_the_record_says():
    """Rows of bench/results/planned_memory.json.gz: as the plan says today, and near what was
    measured; docs/planning.md has the figures of all.
    """
    content = packed("planned_memory")
    listed = [row for row in content["rows"] if row["plan"] == "today"]
    files = ("fp8_steps.jsonl", "step_profile.jsonl", "two_gpus_steps.jsonl")
    again = [row for row in listed if row["file"] in files]
    assert len(again) > 15
    for row in again:
        typed = [word for word in row["overrides"] if word != "hardware=h200"]
        planned = Plan(load_overrides([*typed, "hardware=h200"])).memory[0].allocated
        assert planned / GIB == pytest.approx(row["planned_gib"], abs=0.002)
        assert planned / GIB == pytest.approx(row["measured_gib"], rel=0.03)
    page = (ROOT / "docs/planning.md").read_text()
    for plan, found in content["plans"].items():
        rows = [row for row in content["rows"] if row["plan"] == plan]
        wrong = sorted(abs(row["planned_gib"] / row["measured_gib"] - 1) for row in rows)
        assert len(rows) == found["rows"]
        assert statistics.median(wrong) == pytest.approx(found["median_error"], abs=1e-4)
        assert wrong[-1] == pytest.approx(found["worst_error"], abs=1e-4)
        shares = (found[key] for key in ("median_error", "p90_error", "worst_error"))
        cells = " | ".join(f"{share:.1%}".replace("%", " %") for share in shares)
        label = {"today": "current program", "then": "program of the recording"}[plan]
        assert f"| {label} | {found['rows']} | {cells} |" in page


def test_the_page_states_the_errors_of_planned_times():
    halves = packed("planned_times")["halves"]
    page = (ROOT / "docs/planning.md").read_text()
    for half, label in (("fitted", "fitted"), ("aside", "set aside")):
        found = halves[half]
        shares = (found[key] for key in ("median_error", "p90_error", "pairs_in_order"))
        cells = " | ".join(f"{share:.1%}".replace("%", " %") for share in shares)
        assert f"| {label} | {found['rows']} | {cells} |" in page


@pytest.mark.every(4)
@pytest.mark.parametrize("seed", range(20))
def test_drawn_runs_have_times_that_add_up(seed: int):
    """On every pipeline rank what is done and what is idle make the step; speed costs no time."""
    drawn = random_run(seed, largest=16, wild=True, graphs=seed % 2 == 1).run
    hardware = HardwareConfig(profile=H200)
    run = dataclasses.replace(drawn, hardware=hardware, precision=PrecisionConfig(Dtype.bfloat16))
    plan = Plan(run)
    assert plan.step_seconds > 0
    for found in plan.times_of_ranks:
        assert all(seconds >= 0 for seconds in found.values())
        assert sum(found.values()) == pytest.approx(plan.step_seconds)
    twice = {
        field.name: tuple(2 * value for value in rates) if isinstance(rates, tuple) else 2 * rates
        for field in dataclasses.fields(H200)
        if field.name.endswith(("_gb_s", "_tflops"))
        for rates in [getattr(H200, field.name)]
        if rates is not None
    }
    faster = HardwareConfig(profile=dataclasses.replace(H200, **twice))
    assert Plan(dataclasses.replace(run, hardware=faster)).step_seconds <= plan.step_seconds


def test_offloaded_layers_wait_for_the_profiles_host():
    """Compute hides a part of the copies that does not depend on their speed."""

    def shown(host_gb_s: float) -> float:
        words = "+experiment=small model=llama3_8b model.num_layers=4 hardware=h200"
        rate = f"hardware.profile.host_gb_s={host_gb_s}"
        run = load_overrides([*words.split(), "recompute.offload=[layers]", rate])
        return Plan(run).time_by_kind[OFFLOADED]

    whole = shown(5.0) - shown(10.0)  # of the copies at 10 GB/s
    assert whole > 0 and shown(2.5) == pytest.approx(shown(5.0) + 2 * whole)
