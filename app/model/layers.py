"""Small pieces of the transformer: RMSNorm, rotary positions, SwiGLU.

Shapes: B sequences, S tokens per sequence of a context-parallel rank, s = S / tp of them between
matrices, K tokens of a whole sequence, N heads, H head width, D hidden.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from app.choices import Recompute
from app.config.attention import Llama3RopeConfig, Rope
from app.kernels.common import usable
from app.kernels.rms_norm import rms_norm
from app.kernels.swiglu import swiglu as swiglu_kernel
from app.model.linear import ColumnParallelLinear, RowParallelLinear
from app.model.peers import ALONE, Peers
from app.model.recompute import Recomputation
from app.model.weight_grads import WeightGradSink
from app.plan.model.mlp import MlpWeights
from app.plan.model.norm import NormWeights


class RMSNorm(nn.Module):
    """x / rms(x) · weight over the last dimension (Zhang & Sennrich 2019), computed in fp32."""

    def __init__(self, weights: NormWeights, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(weights.weight.shape))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Any shape ending in the weight's -> the same shape and dtype."""
        if usable(x, self.weight):
            return rms_norm(x, self.weight, self.eps)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class Context:
    """What every layer of a chunk shares for one microbatch."""

    cos_BS1H: Tensor  # fp32; B may be 1
    sin_BS1H: Tensor
    mask_B1SK: Tensor | None  # True where a query may look at a key; None: plain causal
    deterministic: bool = True  # only kernels whose gradients repeat bit for bit
    sink: WeightGradSink | None = None  # takes gradients of weights; None: autograd does
    recompute: Recomputation = field(default_factory=Recomputation)  # what backward computes again


def layer_context(
    positions_BS: Tensor,
    mask_B1SK: Tensor | None,
    rope: Rope,
    deterministic: bool = True,
    sink: WeightGradSink | None = None,
    recompute: Recomputation | None = None,
) -> Context:
    """The mask and rotary tables (Su et al. 2021, two halves of a head) of a microbatch."""
    frequencies_H = _frequencies(rope, positions_BS.device)
    angles_BSH = (positions_BS[..., None].float() * frequencies_H).repeat(1, 1, 2)
    cos_BSH, sin_BSH = angles_BSH.cos(), angles_BSH.sin()
    if rope.yarn is not None:
        growth = rope.yarn.growth(rope.yarn.mscale) / rope.yarn.growth(rope.yarn.mscale_all_dim)
        cos_BSH, sin_BSH = cos_BSH * growth, sin_BSH * growth
    return Context(
        cos_BSH[:, :, None],
        sin_BSH[:, :, None],
        mask_B1SK,
        deterministic=deterministic,
        sink=sink,
        recompute=recompute or Recomputation(),
    )


def _frequencies(rope: Rope, device: torch.device) -> Tensor:
    """Of each pair of values that turn together, in radians per token: fp32 [width / 2].

    YaRN divides slow ones by its factor, leaves fast ones as they are, and goes over from one to
    the other between the pairs that turn `beta_fast` and `beta_slow` times in the original length.
    Llama 3.1 does likewise, and goes over by how often a pair turns.
    """
    even = torch.arange(0, rope.width, 2, device=device, dtype=torch.float32)
    exponent = even / rope.width
    plain_H: Tensor = rope.theta**-exponent
    yarn = rope.yarn
    if rope.llama3 is not None:
        return _mixed(plain_H, rope.llama3)
    if yarn is None:
        return plain_H

    def pair(turns: float) -> float:
        """Which pair turns so often, counted from the fastest."""
        length = yarn.original_length / (2 * math.pi * turns)
        return rope.width * math.log(length) / (2 * math.log(rope.theta))

    first = max(math.floor(pair(yarn.beta_fast)), 0)
    last = min(math.ceil(pair(yarn.beta_slow)), rope.width - 1)
    slow_H = ((even / 2 - first) / max(last - first, 0.001)).clamp(0, 1)
    mixed_H: Tensor = plain_H * (1 - slow_H) + plain_H / yarn.factor * slow_H
    return mixed_H


def _mixed(plain_H: Tensor, llama3: Llama3RopeConfig) -> Tensor:
    """Frequencies as in Llama 3.1."""
    turns_H = plain_H * (llama3.original_length / (2 * math.pi))
    kept_H = (turns_H - llama3.low_turns) / (llama3.high_turns - llama3.low_turns)
    kept_H = kept_H.clamp(0, 1)
    mixed_H: Tensor = plain_H * kept_H + plain_H / llama3.factor * (1 - kept_H)
    return mixed_H


def interleaved_to_halves(x: Tensor) -> Tensor:
    """Values 0, 2, 4, … of the last dimension, then 1, 3, 5, …: neighbours that turn together
    become places of two halves, as `rotate` takes them.
    """
    halves: Tensor = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return halves


def document_mask(documents_BK: Tensor, places_S: Tensor) -> Tensor:
    """Mask of B × 1 × S × K, bool: causal, and every query stays within its document."""
    keys_K = torch.arange(documents_BK.shape[1], device=documents_BK.device)
    same_BSK = documents_BK[:, places_S, None] == documents_BK[:, None, :]
    return (same_BSK & (keys_K <= places_S[:, None]))[:, None]


def rotate(x_BSNH: Tensor, context: Context) -> Tensor:
    """Apply rotary positions to every head."""
    half = x_BSNH.shape[-1] // 2
    turned = torch.cat((-x_BSNH[..., half:], x_BSNH[..., :half]), dim=-1)
    return (x_BSNH * context.cos_BS1H + turned * context.sin_BS1H).to(x_BSNH.dtype)


class Mlp(nn.Module):
    """SwiGLU of a dense layer or shared expert: silu(x·gate) · (x·up) · down (Shazeer 2020).

    The first half of `w_up` is the gate, with tensor parallelism this rank's part of it.
    """

    def __init__(self, weights: MlpWeights, peers: Peers = ALONE) -> None:
        super().__init__()
        self.w_up = ColumnParallelLinear(weights.w_up, peers)
        self.w_down = RowParallelLinear(weights.w_down, peers)

    def forward(
        self,
        x_BsD: Tensor,
        sink: WeightGradSink | None = None,
        recompute: Recomputation | None = None,
    ) -> Tensor:
        """B × s × D -> B × s × D; `recompute` may have backward compute the activation again."""
        both = self.w_up.forward(x_BsD, sink)
        act = (
            swiglu(both)
            if recompute is None
            else recompute.checkpoint_and_discard(Recompute.mlp_act, swiglu, both)
        )
        return self.w_down.forward(act, sink)


def swiglu(both: Tensor, used: Tensor | None = None) -> Tensor:
    """silu(gate) · up of the two halves of the last dimension; of the rows only as many as `used`
    says (int32 [1], on the device) need be computed.
    """
    if usable(both):
        return swiglu_kernel(both, used)
    gate, up = both.chunk(2, dim=-1)
    return F.silu(gate) * up
