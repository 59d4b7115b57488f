from __future__ import annotations

import re
from pathlib import Path

import pytest

from app.config import ModelConfig, MoEConfig
from app.plan.flops import flops_per_token, parameter_count, peak_tflops

QWEN3_30B_A3B = ModelConfig(
    num_layers=48, hidden_size=2048, num_heads=32, num_kv_heads=4, head_dim=128, vocab_size=151936, qk_norm=True,
    moe=MoEConfig(num_experts=128, top_k=8, ffn_hidden_size=768),
)
LLAMA3_8B = ModelConfig(num_layers=32, hidden_size=4096, ffn_hidden_size=14336, num_heads=32, num_kv_heads=8, vocab_size=128256)
MIXTRAL_8X7B = ModelConfig(
    num_layers=32, hidden_size=4096, num_heads=32, num_kv_heads=8, vocab_size=32000,
    moe=MoEConfig(num_experts=8, top_k=2, ffn_hidden_size=14336),
)
QWEN15_MOE_A27B = ModelConfig(  # published with biases on queries, keys and values: 24 layers of 3·2048 elements
    num_layers=24, hidden_size=2048, num_heads=16, num_kv_heads=16, vocab_size=151936,
    moe=MoEConfig(num_experts=60, top_k=4, ffn_hidden_size=1408, shared_ffn_hidden_size=5632, shared_gate=True),
)


@pytest.mark.parametrize(("model", "total", "active"), [
    (LLAMA3_8B, 8_030_261_248, 8_030_261_248),
    (MIXTRAL_8X7B, 46_702_792_704, 12_879_925_248),
    (QWEN3_30B_A3B, 30_532_122_624, 3_353_032_704),
    (QWEN15_MOE_A27B, 14_315_784_192 - 24 * 3 * 2048, 2_689_173_504 - 24 * 3 * 2048),
], ids=["llama3-8b", "mixtral-8x7b", "qwen3-30b-a3b", "qwen1.5-moe-a2.7b"])
def test_published_models_have_their_published_sizes(model: ModelConfig, total: int, active: int):
    count = parameter_count(model)
    assert (count.total, count.active) == (total, active)


def test_parts_of_the_count():
    sizes = {"num_layers": 2, "hidden_size": 8, "ffn_hidden_size": 16, "num_heads": 2, "num_kv_heads": 1, "vocab_size": 32}
    tied = ModelConfig(**sizes, tie_embeddings=True)
    count = parameter_count(tied)
    layer = 4 * 4 * 8 + 8 * 8 + 3 * 8 * 16 + 2 * 8  # (2 + 2·1) heads of width 4, output, SwiGLU, two norms
    assert (count.total, count.embedding, count.head, count.experts) == (2 * layer + 8 + 32 * 8, 32 * 8, 0, 0)
    mixed = ModelConfig(num_layers=5, moe=MoEConfig(num_experts=5, top_k=2, ffn_hidden_size=8, first_k_dense=1, every_n=2))
    assert parameter_count(mixed).experts == 2 * 5 * 3 * 128 * 8  # layers 1 and 3 of 0 … 4
    assert parameter_count(mixed).total - parameter_count(mixed).active == 2 * 3 * 3 * 128 * 8


def test_flops_are_six_per_active_matrix_element_and_half_the_attention_square():
    vectors = 33 * 4096 + 32 * 4096 + LLAMA3_8B.vocab_size * 4096  # norms and the looked-up table are not multiplied
    assert flops_per_token(LLAMA3_8B, 8192) == 6 * (8_030_261_248 - vectors) + 3 * 32 * 2 * 8192 * 4096
    short, long = (flops_per_token(QWEN3_30B_A3B, seq_len) for seq_len in (1024, 2048))
    assert long - short == 3 * 48 * 2 * 1024 * 32 * 128


def test_tied_embeddings_still_pay_for_the_head():
    args = {"num_layers": 2, "hidden_size": 64, "num_heads": 4, "num_kv_heads": 4}
    assert flops_per_token(ModelConfig(**args, tie_embeddings=True), 128) == flops_per_token(ModelConfig(**args), 128)


def test_the_worked_example_of_the_documentation():
    text = (Path(__file__).parents[2] / "docs" / "flops.md").read_text()
    row = re.compile(r"^\| (.+?) \|.*\| ([\d,.]+) \|$", re.MULTILINE)
    stated = {name: float(number.replace(",", "")) for name, number in row.findall(text)}
    count = parameter_count(QWEN3_30B_A3B)
    assert stated == {
        "parameters, total": count.total, "parameters, active": count.active, "parameters, routed experts": count.experts,
        "attention projections": 48 * 18_874_368, "router": 48 * 262_144, "experts": 48 * 37_748_736, "head": 311_164_928,
        "scores and values": 48 * 33_554_432, "forward and backward": flops_per_token(QWEN3_30B_A3B, 4096),
    }
    matrices = sum(stated[name] for name in ("attention projections", "router", "experts", "head"))
    assert stated["forward and backward"] == 3 * (2 * matrices + stated["scores and values"])


@pytest.mark.parametrize(("name", "peak"), [
    ("NVIDIA H100 80GB HBM3", 989.0), ("NVIDIA H100 PCIe", 756.0), ("NVIDIA H100 NVL", 835.0), ("NVIDIA H200", 989.0),
    ("NVIDIA GH200 480GB", 989.0), ("NVIDIA H20", 148.0), ("NVIDIA A100-SXM4-80GB", 312.0), ("NVIDIA B200", 2250.0),
    ("NVIDIA L4", 121.0), ("NVIDIA A10G", 70.0), ("Some Other GPU", None), ("NVIDIA H1000", None), ("", None),
])
def test_peaks_are_known_by_name(name: str, peak: float | None):
    assert peak_tflops(name) == peak
