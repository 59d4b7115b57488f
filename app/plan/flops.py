"""Parameters of a model and floating-point operations per token; docs/flops.md derives both with an example.

A matrix product of [m, k] and [k, n] is 2·m·n·k operations, so each weight of a matrix costs 2 per token forward, and
twice that backward. Norms, activations, rotary positions and the embedding lookup are not counted.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from app.config import ModelConfig, MoEConfig

# Dense bf16 tensor-core peaks without sparsity, TFLOP/s per GPU, from the vendors' data sheets: words that the device
# name must contain, and the peak. The first match counts, so variants stand before the plain name.
PEAKS: tuple[tuple[frozenset[str], float], ...] = tuple((frozenset(words.split()), peak) for words, peak in (
    ("GB300", 2500.0), ("B300", 2250.0), ("GB200", 2500.0), ("B200", 2250.0), ("B100", 1750.0),
    ("H100 PCIE", 756.0), ("H100 NVL", 835.0), ("H200 NVL", 835.0),
    ("GH200", 989.0), ("H200", 989.0), ("H100", 989.0), ("H800", 989.0), ("H20", 148.0),
    ("A100", 312.0), ("A800", 312.0), ("A40", 150.0), ("A30", 165.0), ("A10G", 70.0), ("A10", 125.0),
    ("L40S", 362.0), ("L40", 181.0), ("L4", 121.0),
))


@dataclass(frozen=True)
class ParameterCount:
    """Parameters of a model, in elements."""

    total: int  # all of them
    active: int  # those that one token uses: all but the experts it is not sent to
    embedding: int  # rows of the token table; it is the head as well when tied
    head: int  # the head's own matrix; 0 when tied
    experts: int  # routed experts of all layers: what expert parallelism divides


def parameter_count(model: ModelConfig) -> ParameterCount:
    """Parameters of a model; no layer has biases, every layer has two RMSNorm weights and the model a final one."""
    table = model.vocab_size * model.hidden_size
    head = 0 if model.tie_embeddings else table
    norms = 2 * model.hidden_size + (2 * model.head_width if model.qk_norm else 0)
    shared = table + head + model.num_layers * (attention_weights(model) + norms) + model.hidden_size
    total, active = (shared + sum(feed_forward_weights(model, only_active)) for only_active in (False, True))
    moe_layers = sum(model.is_moe_layer(layer) for layer in range(model.num_layers))
    experts = moe_layers * routed_weights(model, model.moe) if model.moe else 0
    return ParameterCount(total, active, table, head, experts)


def flops_per_token(model: ModelConfig, seq_len: int) -> float:
    """Operations of forward and backward per token at sequences of seq_len tokens; backward is twice the forward.

    Recomputed forwards are not counted: this is the numerator of model FLOPs utilisation.
    """
    per_token = sum(feed_forward_weights(model, only_active=True)) + model.num_layers * attention_weights(model)
    head = model.vocab_size * model.hidden_size
    scores_and_values = model.num_layers * 2 * seq_len * model.num_heads * model.head_width  # 2 products, half masked
    return 3.0 * (2 * (per_token + head) + scores_and_values)


def peak_tflops(device_name: str) -> float | None:
    """Dense bf16 peak of a GPU in TFLOP/s by the name its driver reports; None when the name is not known.

    The peak of a card limited in power or clocks is lower: measured ceilings beat these.
    """
    words = set(re.findall(r"[A-Z0-9]+", device_name.upper()))
    return next((peak for needed, peak in PEAKS if needed <= words), None)


def attention_weights(model: ModelConfig) -> int:
    """Matrix elements of one layer's attention: queries, keys and values, then the output."""
    query = model.num_heads * model.head_width
    return model.hidden_size * (query + 2 * model.num_kv_heads * model.head_width) + query * model.hidden_size


def routed_weights(model: ModelConfig, moe: MoEConfig) -> int:
    """Matrix elements of the routed experts of one layer: gate, up and down of each."""
    return moe.num_experts * 3 * model.hidden_size * moe.ffn_hidden_size


def feed_forward_weights(model: ModelConfig, only_active: bool = False) -> list[int]:
    """Matrix elements of each layer's feed-forward: SwiGLU, or router, experts and shared expert.

    only_active: of the routed experts the top_k that a token is sent to.
    """
    layers = [model.moe if model.is_moe_layer(layer) else None for layer in range(model.num_layers)]
    return [_feed_forward(model, moe, only_active) for moe in layers]


def _feed_forward(model: ModelConfig, moe: MoEConfig | None, only_active: bool) -> int:
    if moe is None:
        return 3 * model.hidden_size * model.ffn_hidden_size
    routed = routed_weights(model, moe) // moe.num_experts * (moe.top_k if only_active else moe.num_experts)
    shared = 3 * model.hidden_size * moe.shared_ffn_hidden_size + (model.hidden_size if moe.shared_gate else 0)
    return model.hidden_size * moe.num_experts + routed + shared
