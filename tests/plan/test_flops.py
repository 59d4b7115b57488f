from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from app.choices import Recompute
from app.cli.options.compose import load_overrides
from app.config import (
    HardwareConfig,
    LossConfig,
    ModelConfig,
    MoEConfig,
    ParallelConfig,
    RecomputeConfig,
    Run,
    TrainConfig,
)
from app.plan.cost.flops import (
    Flops,
    StageSeconds,
    flops_per_token,
    parameter_count,
    peak_tflops,
    run_flops_per_token,
    stage_flops,
    stage_seconds,
)
from app.plan.layout import ParallelLayout, select_layout
from app.plan.parts.dispatcher import busiest_load
from app.plan.select import select_stages
from app.plan.stages import Stage
from app.rules import check
from tests.training import composed

QWEN3_30B_A3B = ModelConfig(
    num_layers=48,
    hidden_size=2048,
    num_heads=32,
    num_kv_heads=4,
    head_dim=128,
    vocab_size=151936,
    qk_norm=True,
    moe=MoEConfig(num_experts=128, top_k=8, ffn_hidden_size=768),
)
LLAMA3_8B = ModelConfig(
    num_layers=32,
    hidden_size=4096,
    ffn_hidden_size=14336,
    num_heads=32,
    num_kv_heads=8,
    vocab_size=128256,
)
MIXTRAL_8X7B = ModelConfig(
    num_layers=32,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=8,
    vocab_size=32000,
    moe=MoEConfig(num_experts=8, top_k=2, ffn_hidden_size=14336),
)
# published with biases on queries, keys and values: 24 layers of 3·2048 elements
QWEN15_MOE_A27B = ModelConfig(
    num_layers=24,
    hidden_size=2048,
    num_heads=16,
    num_kv_heads=16,
    vocab_size=151936,
    moe=MoEConfig(
        num_experts=60, top_k=4, ffn_hidden_size=1408, shared_ffn_hidden_size=5632, shared_gate=True
    ),
)


@pytest.mark.parametrize(
    ("model", "total", "active"),
    [
        (LLAMA3_8B, 8_030_261_248, 8_030_261_248),
        (MIXTRAL_8X7B, 46_702_792_704, 12_879_925_248),
        (QWEN3_30B_A3B, 30_532_122_624, 3_353_032_704),
        (QWEN15_MOE_A27B, 14_315_784_192 - 24 * 3 * 2048, 2_689_173_504 - 24 * 3 * 2048),
    ],
    ids=["llama3-8b", "mixtral-8x7b", "qwen3-30b-a3b", "qwen1.5-moe-a2.7b"],
)
def test_published_models_have_their_published_sizes(model: ModelConfig, total: int, active: int):
    count = parameter_count(model)
    assert (count.total, count.active) == (total, active)


@pytest.mark.every(4)
@pytest.mark.parametrize(
    ("preset", "total", "active"),
    [
        # published with the biases of 58 layers' 256 experts; 37 B
        ("deepseek_v3_like", 671_026_419_200 - 58 * 256, 37_552_282_624),
        # 2.4 B, which do not count the embedding
        ("deepseek_v2_lite", 15_706_484_224, 2_451_435_008 + 102400 * 2048),
        # published with the biases of 60 layers' 384 experts
        ("kimi_k2", 1_026_408_232_448 - 60 * 384, 32_861_477_888),
        # published with a layer that predicts further tokens, its projection, norms and a copy of
        # embedding and head, and biases of 47 layers' 64 experts
        (
            "glm4_7_flash",
            31_221_488_576 - 635_311_360 - 2 * 2048**2 - 3 * 2048 - 2 * 154880 * 2048 - 47 * 64,
            3_896_763_136,
        ),
        ("starcoder2_3b", 3_030_371_328, 3_030_371_328),
        ("minitron_4b", 4_190_509_056, 4_190_509_056),
        ("pythia_1b", 1_011_781_632, 1_011_781_632),
        ("phi4_mini", 3_836_021_760, 3_836_021_760),
        ("granite3_8b", 8_170_864_640, 8_170_864_640),
        ("granite3_1b_a400m", 1_334_628_352, 428_658_688),
        # as glm4_7_flash, with biases of 46 layers' 128 experts
        (
            "glm4_5_air",
            110_468_824_832 - 2_341_492_736 - 2 * 4096**2 - 3 * 4096 - 2 * 151552 * 4096 - 46 * 128,
            13_424_123_904,
        ),
        # 230 B and 10 B, which do not count embedding and head
        ("minimax_m2", 228_689_748_992, 11_030_537_216),
        # published with biases of 27 layers' 64 experts; 3 B, which do not count the embedding
        ("ernie4_5_21b_a3b", 21_825_437_888 - 27 * 64, 3_352_148_480),
        ("mistral_7b", 7_241_732_096, 7_241_732_096),
        ("qwen3_8b", 8_190_735_360, 8_190_735_360),
        ("smollm3_3b", 3_075_098_624, 3_075_098_624),
        ("seed_oss_36b", 36_151_104_512, 36_151_104_512),
        ("qwen2_57b_a14b", 57_408_658_944, 14_249_270_784),
        ("olmo2_7b", 7_298_617_344, 7_298_617_344),
        ("olmo3_7b", 7_298_011_136, 7_298_011_136),
        ("gemma2_9b", 9_241_705_984, 9_241_705_984),
        ("gemma3_1b", 999_885_952, 999_885_952),
        ("exaone4_32b", 32_003_216_384, 32_003_216_384),
        ("command_r7b", 8_028_033_024, 8_028_033_024),
        # 20.9 B and 116.8 B; of 3.6 B and 5.1 B the embedding is not counted
        ("gpt_oss_20b", 20_914_757_184, 4_187_440_704),
        ("gpt_oss_120b", 116_829_156_672, 5_711_982_912),
    ],
)
def test_published_presets_have_their_published_sizes(preset: str, total: int, active: int):
    count = parameter_count(composed([f"model={preset}"], 1).model)
    assert (count.total, count.active) == (total, active)


@pytest.mark.parametrize(
    ("preset", "millions"), [("gemma3_4b", 3_209), ("gemma3_12b", 10_759), ("gemma3_27b", 25_600)]
)
def test_gemma3_has_its_published_size_without_embedding(preset: str, millions: int):
    """Table 1 of arXiv 2503.19786."""
    count = parameter_count(composed([f"model={preset}"], 1).model)
    assert round((count.total - count.embedding) / 1e6) == millions


def test_latent_attention_of_the_documentation():
    """DeepSeek-V2-Lite at 4096: weights of projections, norms left out, and two products of 192
    and 128 a head and pair of tokens, of which causality leaves half.
    """
    model = composed(["model=deepseek_v2_lite"], 1).model
    weights, norms, scores = 371_602_944, 27 * 512, 566_231_040
    count = parameter_count(model)
    per_token = flops_per_token(model, 4096)
    assert stated_counts("deepseek_v2_lite") == (count.total, count.active, per_token)
    router, experts = 26 * 64 * 2048, 26 * 3 * 2048 * (6 * 1408 + 2816)
    others = 3 * 2048 * 10944 + router + experts + 102400 * 2048
    assert per_token == 3 * (2 * (weights - norms + others) + scores)
    # one rank of several does its part of it
    assert (
        sum(
            flops.forward
            for flops in stage_flops(
                Run(
                    model,
                    ParallelConfig(tp=2, cp=2),
                    train=TrainConfig(seq_len=4096, micro_batch=1),
                ),
                [Stage(tuple(range(27)), embedding=True, head=True)],
                ParallelLayout(4, tp=2, cp=2, etp=1),
            )
        )
        * 4
        * 3
        == 4096 * per_token
    )


def test_parts_of_the_count():
    sizes = {
        "num_layers": 2,
        "hidden_size": 8,
        "ffn_hidden_size": 16,
        "num_heads": 2,
        "num_kv_heads": 1,
        "vocab_size": 32,
    }
    tied = ModelConfig(**sizes, tie_embeddings=True)
    count = parameter_count(tied)
    # (2 + 2·1) heads of width 4, output, SwiGLU, two norms
    layer = 4 * 4 * 8 + 8 * 8 + 3 * 8 * 16 + 2 * 8
    assert (count.total, count.embedding, count.head, count.experts) == (
        2 * layer + 8 + 32 * 8,
        32 * 8,
        0,
        0,
    )
    mixed = ModelConfig(
        num_layers=5,
        moe=MoEConfig(num_experts=5, top_k=2, ffn_hidden_size=8, first_k_dense=1, every_n=2),
    )
    assert parameter_count(mixed).experts == 2 * 5 * 3 * 128 * 8  # layers 1 and 3 of 0 … 4
    assert parameter_count(mixed).total - parameter_count(mixed).active == 2 * 3 * 3 * 128 * 8


def test_flops_per_token_match_the_formula():
    # norms and the looked-up table are not multiplied
    vectors = 33 * 4096 + 32 * 4096 + LLAMA3_8B.vocab_size * 4096
    assert (
        flops_per_token(LLAMA3_8B, 8192) == 6 * (8_030_261_248 - vectors) + 3 * 32 * 2 * 8192 * 4096
    )
    short, long = (flops_per_token(QWEN3_30B_A3B, seq_len) for seq_len in (1024, 2048))
    assert long - short == 3 * 48 * 2 * 1024 * 32 * 128


def test_tied_embeddings_still_pay_for_the_head():
    args = {"num_layers": 2, "hidden_size": 64, "num_heads": 4, "num_kv_heads": 4}
    assert flops_per_token(ModelConfig(**args, tie_embeddings=True), 128) == flops_per_token(
        ModelConfig(**args), 128
    )


def worked_example_of_a_rank() -> dict[str, int]:
    """The last of four pipeline ranks, tp 2, ep 8, micro-batch 2: its rows of the table, from
    layer sizes alone.
    """
    layers, tokens = 12, 2 * 4096 // 2
    routed = layers * 2 * 8 * 3 * 2048 * 768
    others = layers * 2 * (18_874_368 + 262_144) + 2 * 311_164_928
    scores = layers * 33_554_432
    return {
        "forward, mean": tokens * (others + scores + routed),
        "forward, busiest": tokens * (others + scores + routed * 3 // 2),
        "gradients of activations, busiest": tokens * (others + 2 * scores + routed * 3 // 2),
        "gradients of weights, busiest": tokens * (others + routed * 3 // 2),
        "computed again, busiest": tokens * scores,
    }


def stated_counts(model: str) -> tuple[float, ...]:
    """Parameters, active ones and FLOPs per token that docs/planning.md states of a model."""
    page = (Path(__file__).parents[2] / "docs" / "planning.md").read_text()
    row = re.compile(rf"^\| `{model}` \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \|$", re.MULTILINE)
    (cells,) = row.findall(page)
    return tuple(float(cell.replace(",", "")) for cell in cells)


def test_the_counts_of_the_documentation():
    count = parameter_count(QWEN3_30B_A3B)
    assert count.experts == 28_991_029_248
    per_token = flops_per_token(QWEN3_30B_A3B, 4096)
    assert stated_counts("qwen3_30b_a3b") == (count.total, count.active, per_token)
    matrices = 48 * (18_874_368 + 262_144 + 37_748_736) + 311_164_928
    assert per_token == 3 * (2 * matrices + 48 * 33_554_432)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H100 NVL", 835.0),
        ("NVIDIA H200", 989.0),
        ("NVIDIA GH200 480GB", 989.0),
        ("NVIDIA H20", 148.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA A10G", 70.0),
        ("Some Other GPU", None),
        ("NVIDIA H1000", None),
        ("", None),
    ],
)
def test_peaks_are_known_by_name(name: str, peak: float | None):
    assert peak_tflops(name) == peak


def planned(model: ModelConfig, world: int = 64, seq_len: int = 4096, **chosen: object) -> Run:
    """A checked run of 4 microbatches of 2 sequences; other keyword arguments are fields of
    `parallel`, or sections.
    """
    sections = {name: chosen.pop(name) for name in ("recompute", "hardware") if name in chosen}
    parallel = ParallelConfig(world_size=world, **chosen)
    dp = world // (parallel.tp * parallel.cp * parallel.pp)
    return check(
        Run(
            model,
            parallel,
            train=TrainConfig(seq_len=seq_len, micro_batch=2, global_batch=8 * dp),
            **sections,
        )
    )


MIXED = ModelConfig(  # dense layers, MoE layers, a shared expert with a gate and tied embeddings
    num_layers=7,
    hidden_size=64,
    ffn_hidden_size=96,
    num_heads=4,
    num_kv_heads=4,
    vocab_size=128,
    tie_embeddings=True,
    moe=MoEConfig(
        num_experts=8,
        top_k=3,
        ffn_hidden_size=32,
        first_k_dense=2,
        every_n=2,
        shared_ffn_hidden_size=64,
        shared_gate=True,
    ),
)


def flops_of(run: Run, stage: Stage, layout: ParallelLayout, load: float = 1.0) -> Flops:
    (flops,) = stage_flops(run, [stage], layout, load=load)
    return flops


def seconds_of(run: Run, stage: Stage, layout: ParallelLayout) -> StageSeconds:
    (seconds,) = stage_seconds(run, [stage], layout)
    return seconds


def test_a_rank_of_the_worked_example():
    run = planned(
        QWEN3_30B_A3B,
        tp=2,
        pp=4,
        ep=8,
        etp=1,
        recompute=RecomputeConfig(phases=(Recompute.attn_core, Recompute.norm)),
    )
    last = select_stages(run).stages[3][0]
    mean, busiest = (
        flops_of(run, last, select_layout(run), load=load) for load in (1.0, busiest_load(run))
    )
    expected = list(worked_example_of_a_rank().values())
    assert [mean.forward, busiest.forward] == expected[:2]
    assert [busiest.backward_input, busiest.backward_weight, busiest.recompute] == expected[2:]


@pytest.mark.parametrize(
    ("model", "chosen"),
    [
        (LLAMA3_8B, {}),
        (LLAMA3_8B, {"tp": 8, "cp": 2, "pp": 4}),
        (QWEN3_30B_A3B, {"tp": 4, "pp": 4, "ep": 16, "etp": 1}),
        (MIXTRAL_8X7B, {"tp": 2, "pp": 2, "vpp": 4, "ep": 4, "etp": 4}),
        (
            MIXED,
            {
                "tp": 2,
                "cp": 2,
                "ep": 2,
                "pp": 3,
                "layout": "Ett|ttt|ttL",
                "world": 12,
                "seq_len": 64,
            },
        ),
    ],
    ids=["replicas", "dense", "moe", "interleaved", "mixed"],
)
def test_all_ranks_together_do_the_models_work_once(model: ModelConfig, chosen: dict):
    run = planned(model, **chosen)
    layout = select_layout(run)
    work = [
        flops_of(run, stage, layout) for chunks in select_stages(run).stages for stage in chunks
    ]
    # each stage's work is done: by its ranks, per microbatch
    times = run.world_size // run.parallel.pp * run.num_microbatches
    done = times * sum(flops.forward + flops.backward for flops in work)
    assert (
        done
        == int(flops_per_token(model, run.train.seq_len))
        * run.train.global_batch
        * run.train.seq_len
    )
    assert all(flops.backward == 2 * flops.forward for flops in work)


def test_backward_of_scores_has_no_gradient_of_weights():
    short, long = (
        flops_of(run, Stage((3,), False, False), select_layout(run))
        for run in (planned(LLAMA3_8B, seq_len=2048), planned(LLAMA3_8B, seq_len=4096))
    )
    scores = 2 * 4096 * 2 * 4096 * 32 * 128  # tokens · two products, half masked
    assert (
        long.backward_weight
        == 2 * short.backward_weight
        == 2 * 4096 * 2 * (41_943_040 + 3 * 4096 * 14336)
    )
    assert long.forward == long.backward_weight + scores
    assert long.backward_input == long.backward_weight + 2 * scores


@pytest.mark.parametrize(
    ("choice", "again"),
    [
        ({}, "nothing"),
        ({"phases": ("norm", "mlp_act", "experts_act")}, "nothing"),
        ({"phases": ("attn_core",)}, "scores"),
        ({"phases": ("shared",)}, "shared"),
        ({"phases": ("moe", "shared")}, "moe"),
        ({"phases": ("moe", "attn_core")}, "both"),
        ({"full": True}, "layers"),
        ({"full": True, "phases": ("attn_core", "moe"), "partial_microbatches": 1}, "layers"),
    ],
)
def test_recomputation_by_part(choice: dict, again: str):
    choice = choice | {"phases": tuple(map(Recompute, choice.get("phases", ())))}
    run = planned(MIXED, world=1, seq_len=32, recompute=RecomputeConfig(**choice))
    # a dense and an MoE layer, and the head
    flops = flops_of(run, Stage((1, 2), False, True), select_layout(run))
    scores, shared = 2 * 2 * 32 * 64, 2 * (3 * 64 * 64 + 64)
    moe = 2 * 8 * 64 + 2 * 3 * 3 * 64 * 32 + shared
    layers = scores + 2 * 2 * 4 * 64 * 64 + 2 * 3 * 64 * 96 + moe
    parts = {
        "nothing": 0,
        "scores": scores,
        "shared": shared,
        "moe": moe,
        "both": scores + moe,
        "layers": layers,
    }
    assert flops.recompute == 64 * parts[again]
    assert flops.forward == 64 * (layers + 2 * 128 * 64)


def test_an_unbalanced_rank_does_more_of_the_experts_work_alone():
    run = planned(MIXED, world=4, seq_len=64, ep=4)
    stage, layout = Stage((1, 2), True, False), select_layout(run)
    assert busiest_load(run) == 1.5
    mean, busiest = (flops_of(run, stage, layout, load=load) for load in (1.0, 1.5))
    assert busiest.forward - mean.forward == 128 * 2 * 3 * 3 * 64 * 32 // 2
    assert busiest.backward - mean.backward == 2 * (busiest.forward - mean.forward)
    assert (
        busiest_load(planned(MIXED, world=4, seq_len=64)) == busiest_load(planned(LLAMA3_8B)) == 1
    )
    uneven = ModelConfig(moe=MoEConfig(num_experts=8, planned_imbalance=3))
    assert [busiest_load(planned(uneven, world=4, seq_len=64, ep=ep)) for ep in (1, 2, 4)] == [
        1,
        2,
        3,
    ]
    worst = ModelConfig(moe=MoEConfig(num_experts=8, top_k=4, planned_imbalance=9))
    # E/K: all different
    assert [busiest_load(planned(worst, world=8, seq_len=64, ep=ep)) for ep in (1, 2, 4, 8)] == [
        1,
        2,
        2,
        2,
    ]


def test_a_capacity_bounds_the_rows_of_experts():
    """128 tokens of a rank have 256 choices of 8 experts, 32 each: a factor of 1.3 leaves
    ceil(41.6) of them at most.
    """

    def load(ep: int, **choices: object) -> float:
        model = ModelConfig(moe=MoEConfig(num_experts=8, top_k=2, **choices))
        return busiest_load(planned(model, world=4, seq_len=64, ep=ep))

    assert (
        load(4, capacity_factor=1.3) == 42 / 32
        and load(4, capacity_factor=1.3, planned_imbalance=1.1) == 1.1
    )
    assert [load(ep, capacity_factor=1.3, pad_to_capacity=True) for ep in (1, 4)] == [42 / 32] * 2
    assert [load(ep, capacity_factor=0.5) for ep in (1, 4)] == [0.5, 0.5]
    # no expert has more than all tokens
    assert load(1, capacity_factor=9.0, pad_to_capacity=True) == 8 * 128 / 256


def test_a_loss_by_chunks_does_the_heads_gemm_twice():
    run = planned(MIXED, world=1, seq_len=32)
    chunked = dataclasses.replace(run, loss=LossConfig(chunk_tokens=16))
    for stage in (Stage((1,), False, False), Stage((1,), False, True)):
        plain, again = (flops_of(each, stage, select_layout(run)) for each in (run, chunked))
        assert again.recompute - plain.recompute == stage.head * 64 * 2 * 128 * 64
        assert (again.forward, again.backward) == (plain.forward, plain.backward)


def test_seconds_are_operations_over_the_expected_rate():
    dense, recompute = Stage((0,), False, False), RecomputeConfig(full=True)
    run = planned(
        LLAMA3_8B, recompute=recompute, hardware=HardwareConfig(peak_tflops=500, efficiency=0.5)
    )
    flops, seconds = (
        flops_of(run, dense, select_layout(run)),
        seconds_of(run, dense, select_layout(run)),
    )
    assert seconds.forward == pytest.approx(flops.forward / 250e12)
    assert seconds.backward_weight == pytest.approx(flops.backward_weight / 250e12)
    # the forward twice
    assert seconds.total == pytest.approx((2 * flops.forward + flops.backward) / 250e12)
    h100 = planned(LLAMA3_8B, recompute=recompute)
    assert seconds_of(h100, dense, select_layout(h100)).total == pytest.approx(
        seconds.total * 250 / (989 * 0.4)
    )
    moe, experts = planned(MIXED, world=4, seq_len=64, ep=4), Stage((2,), False, False)
    busiest = flops_of(moe, experts, select_layout(moe), load=1.5)
    assert seconds_of(moe, experts, select_layout(moe)).forward == pytest.approx(
        busiest.forward / 395.6e12
    )


def test_frozen_parameters_save_gradients():
    """Where the head alone is trained: a forward, and both gradients of the head's GEMM."""
    run = load_overrides(["model=llama3_8b", "train.frozen=['*','!head']", "train.seq_len=8192"], 1)
    forward = flops_per_token(run.model, 8192) / 3
    assert run_flops_per_token(run) == pytest.approx(forward + 4 * parameter_count(run.model).head)
    plain = dataclasses.replace(run, train=dataclasses.replace(run.train, frozen=()))
    assert run_flops_per_token(plain) == flops_per_token(run.model, 8192)
