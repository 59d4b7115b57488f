"""Linear attention: a gated delta net (Yang et al. 2024, arXiv 2412.06464) as Qwen3-Next has it.

Shapes: as in `app.model.attention.delta_rule`; s = S / tp of the tokens between matrices, D hidden;
G and H are this rank's heads, F its channels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from app.choices import Recompute
from app.config import AttentionSpec, LinearAttentionConfig
from app.model.attention.delta_rule import (
    DeltaRule,
    by_torch,
    document_numbers,
    forgetting,
    short_convolution,
)
from app.model.layers.layer_groups import ALONE, LayerGroups, size
from app.model.layers.layers import Context, RMSNorm, swiglu
from app.model.layers.linear import ColumnParallelLinear, RowParallelLinear
from app.plan.model.attention import LinearAttentionWeights


@dataclass(frozen=True, slots=True)
class LinearHeads:
    """Inputs of the gated delta rule before the convolution, of this rank's heads."""

    channels: Tensor  # … × F: per key head its query, its key, its value heads
    gate: Tensor  # … × H × V: of the outputs
    beta: Tensor  # … × H: share of a correction that is written
    g: Tensor  # … × H: logarithm of what is left of the state, fp32


class LinearAttention(nn.Module):
    """Gated delta net: short convolution, delta rule, gated norm of every value head's output."""

    def __init__(
        self,
        spec: AttentionSpec,
        linear: LinearAttentionConfig,
        layer_groups: LayerGroups = ALONE,
    ) -> None:
        super().__init__()
        self.linear = linear
        self.key_heads = linear.key_heads // size(layer_groups.tp)
        self.value_heads = self.key_heads * linear.values_per_key
        weights = LinearAttentionWeights.of(spec, linear)
        shape = layer_groups.coords.shape
        self.a_log = nn.Parameter(torch.empty(shape(weights.a_log)))
        self.dt_bias = nn.Parameter(torch.empty(shape(weights.dt_bias)))
        self.conv = nn.Parameter(torch.empty(shape(weights.conv)))
        self.w_in = ColumnParallelLinear(weights.w_in, layer_groups)
        self.w_beta = ColumnParallelLinear(weights.w_beta, layer_groups)
        self.norm = RMSNorm(weights.norm, spec.eps)
        self.w_out = RowParallelLinear(weights.w_out, layer_groups)
        self.delta_rule: DeltaRule = by_torch  # replaced where a run has kernels for it

    def forward(self, x_BsD: Tensor, context: Context) -> Tensor:
        """Map B × s × D -> B × s × D, without the residual."""
        made = self.w_in.forward(x_BsD, context.sink)
        decay = self.w_beta.forward(x_BsD, context.sink)
        out = context.recompute.checkpoint(Recompute.attn_core, self._core, made, decay, context)
        return self.w_out.forward(out, context.sink)

    def heads(self, made: Tensor, decay: Tensor) -> LinearHeads:
        """Split what both projections have made of a token."""
        linear, values = self.linear, self.linear.values_per_key * self.linear.value_head_dim
        per_head = made.unflatten(-1, (self.key_heads, -1))
        channels, gate = per_head.split((2 * linear.key_head_dim + values, values), dim=-1)
        write, forget = decay.unflatten(-1, (self.key_heads, 2, -1)).unbind(-2)
        rate = F.softplus(forget.flatten(-2).float() + self.dt_bias.float())
        return LinearHeads(
            channels.flatten(-2),
            gate.flatten(-2).unflatten(-1, (self.value_heads, -1)),
            write.flatten(-2).sigmoid(),
            -self.a_log.float().exp() * rate,
        )

    def split(self, convolved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries and keys … × G × K, values … × H × V."""
        linear, key = self.linear, self.linear.key_head_dim
        per_head = convolved.unflatten(-1, (self.key_heads, -1))
        sizes = key, key, linear.values_per_key * linear.value_head_dim
        q, k, v = per_head.split(sizes, dim=-1)
        return q, k, v.flatten(-2).unflatten(-1, (self.value_heads, -1))

    def gated(self, out: Tensor, gate: Tensor) -> Tensor:
        """Return the normalised outputs of value heads times SiLU of their gates: … × H·V."""
        return swiglu(torch.cat((gate, self.norm(out)), dim=-1)).flatten(-2)

    def _core(self, made: Tensor, decay: Tensor, context: Context) -> Tensor:
        heads, g, numbers = self.heads(made, decay), None, None
        if context.documents is not None:
            batch, tokens = made.shape[:2]
            numbers = document_numbers(context.documents[0].queries, batch, tokens)
            g = forgetting(heads.g, numbers)
        q, k, v = self.split(short_convolution(heads.channels, self.conv, numbers))
        g = heads.g if g is None else g
        out = self.delta_rule(q, k, v, g_BSH=g, beta_BSH=heads.beta)
        return self.gated(out, heads.gate)
