"""Linear attention: the operations of `app.model.attention.linear`, with kernels.

Sizes are bytes.
"""

from __future__ import annotations

from app.choices import Recompute
from app.config import AttentionSpec, LinearAttentionConfig
from app.kernels.tiling import CONVOLVED, cdiv
from app.plan.model.attention import LinearAttentionWeights
from app.plan.parts.linear import column_parallel, norm, row_parallel
from app.plan.parts.trace import Trace, Work

BLOCK = 64  # tokens that are computed by matrices


def linear_attention(
    t: Trace, h: int, spec: AttentionSpec, weights: LinearAttentionWeights, *, saved: bool
) -> int:
    """Gated delta net: two projections, short convolution, delta rule, gated norm of heads."""
    s, linear = t.sizes, spec.linear
    assert linear is not None
    made = column_parallel(t, h, weights.w_in, saved=saved)
    # in FP8 the first projection keeps a copy, unless it gathers its input
    shared = weights.w_in.keeps_input and (s.in_fp8 is None or s.layout.tp > 1)
    with t.in_16_bits():
        decay = column_parallel(t, h, weights.w_beta, saved=saved, shared=shared)
    heads = linear.value_heads // s.layout.tp  # of values, on this rank
    rows = s.tokens * heads
    values = rows * linear.value_head_dim * s.size
    channels = made - values
    with t.rerun(t.reruns(Recompute.attn_core), keeps=made + decay):
        t.op(Work.other, made, made, kernels=2)  # channels and gates of all heads side by side
        # fp32 decays and shares of what is written, and what their gradients need
        t.op(Work.other, decay, rows * (4 + s.size), 3 * 4 * rows, kernels=6)
        # beside an operation: what the projection made, which a rerun keeps, and the gates side by
        # side; their gradient within one of gates and outputs
        held = values + (0 if t.open else made), 2 * values
        # backward: gradients of the sums, stored and read in fp32, and of the taps by every program
        wide = channels // s.size * 4
        scratch = held[0], held[1] + wide + cdiv(wide * linear.conv_width, CONVOLVED)
        moves = 1.0, 1 + 2 * wide / (3 * channels)
        t.op(Work.other, channels, channels, channels, scratch=scratch, kernels=2, moves=moves)
        delta_rule(t, linear, channels, values=values, held=held)
        norm(t, values)
        # gates and outputs side by side, then one pass
        t.op(Work.other, 2 * values, 2 * values)
        t.op(Work.activation, 2 * values, values, 2 * values)
    return row_parallel(t, values, weights.w_out)


def delta_rule(
    t: Trace, linear: LinearAttentionConfig, channels: int, *, values: int, held: tuple[int, int]
) -> None:
    """List the gated delta rule by flash-linear-attention (fla/ops/gated_delta_rule/chunk.py).

    channels, values: bytes of its input and of its output; held: of what else is there, forward and
    backward.
    """
    s = t.sizes
    rows = values // s.size // linear.value_head_dim  # tokens of all value heads
    keys = (channels - values) // 2
    triangle = rows * BLOCK * s.size  # of each block, inverted
    wide = keys * linear.values_per_key  # keys of all value heads
    states = rows // BLOCK * linear.key_head_dim * linear.value_head_dim * s.size
    saves = channels + rows * (4 + s.size) + triangle  # with keys and queries of unit length
    t.op(
        Work.linear_attention,
        channels + rows * (4 + s.size),
        values,
        saves,
        scratch=(
            held[0] + (0 if t.open else saves) + channels + 2 * keys + wide + 2 * values + states,
            held[1]
            + 3 * wide
            + 3 * values
            + 2 * states
            + (keys if linear.values_per_key > 1 else 0),
        ),
        kernels=8,
        flops=rows * delta_flops(linear),
    )


def delta_flops(linear: LinearAttentionConfig) -> int:
    """Return FLOPs of the delta rule's forward for a token of one value head.

    A token reads the state with its query and its key and writes to it, three matmuls of K × V.
    Within a block of C tokens, half of which are masked: scores of queries and of keys, the inverse
    times keys and values, and scores times what is written (arXiv 2412.06464, section 3.3).
    """
    key, value = linear.key_head_dim, linear.value_head_dim
    return 6 * key * value + BLOCK * (3 * key + 2 * value)
