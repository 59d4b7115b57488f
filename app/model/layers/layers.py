"""Building blocks of the transformer: RMSNorm, rotary positions, SwiGLU.

Shapes: B sequences, S tokens per sequence of a context-parallel rank, s = S / tp of them between
matrices, K tokens of a whole sequence, N heads, H head width, D hidden; G key/value heads of this
rank, P query heads for each, F = G·(P + 2)·H; R = B × S numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from app.choices import ActivationKind, Recompute
from app.collectives import all_reduce
from app.config import ModelConfig
from app.config.attention import Llama3RopeConfig, Rope
from app.kernels.common import usable
from app.kernels.rms_norm import rms_norm, rms_norm_beside
from app.kernels.swiglu import geglu as geglu_kernel
from app.kernels.swiglu import swiglu as swiglu_kernel
from app.model.layers.attend import BY_TORCH, Attend, DocumentOffsets
from app.model.layers.layer_groups import ALONE, LayerGroups
from app.model.layers.linear import ColumnParallelLinear, RowParallelLinear
from app.model.layers.recompute import Recomputation
from app.model.layers.weight_grads import WeightGradSink, take_partial
from app.plan.model.mlp import MlpWeights
from app.plan.model.norm import NormWeights

HEADS = (-3, -2, -1)  # dimensions of a token's heads, in queries and keys


class RMSNorm(nn.Module):
    """x / rms(x) · weight over the last dimension (Zhang & Sennrich 2019), computed in fp32.

    If a kernel computes it and a sink is given, the weight gradient goes to the sink.
    """

    def __init__(self, weights: NormWeights, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(weights.weight.shape))
        self.eps = eps

    def forward(self, x: Tensor, sink: WeightGradSink | None = None) -> Tensor:
        """Normalise the last dimension; keeps shape and dtype."""
        if usable(x, self.weight):
            return rms_norm(x, self.weight, self.eps, take_partial(self.weight, sink))
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)

    def beside(
        self, x: Tensor, recompute: Recomputation, sink: WeightGradSink | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return (x, norm(x)): `x` for the residual connection, and a norm that may be recomputed.

        The fused backward, if a kernel is available, adds the residual's gradient.
        """
        if usable(x, self.weight):
            take = take_partial(self.weight, sink)
            beside, out = rms_norm_beside(x, self.weight, self.eps, take)
        else:
            beside, out = x, F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        if recompute.recomputes(Recompute.norm):
            recompute.discard_output(Recompute.norm, out, self, x)
        return beside, out


class WholeNorm(nn.Module):
    """Weight of an RMSNorm over all query or all key heads; a rank holds the part of its own
    heads.
    """

    def __init__(self, weights: NormWeights, layer_groups: LayerGroups) -> None:
        super().__init__()
        self.width = weights.weight.numel  # over all ranks
        self.weight = nn.Parameter(torch.empty(layer_groups.coords.shape(weights.weight)))


def norm_all_heads(
    qkv_BSF: Tensor,
    query: WholeNorm,
    key: WholeNorm,
    *,
    num_kv_heads: int,
    eps: float,
    group: dist.ProcessGroup | None,
) -> Tensor:
    """Return `qkv_BSF` with queries and keys normalised over all heads; values are unchanged.

    RMSNorm over all query heads together, and over all key heads (OLMoE). `qkv_BSF` holds, per
    key/value head, its query heads, its key, its value. `group` has the ranks with the other heads;
    it all-reduces two fp32 sums of squares per token, and two numbers in backward. Saves `qkv_BSF`.
    """
    queries, keys = query.weight.numel(), key.weight.numel()
    shape = (num_kv_heads, queries // keys, keys // num_kv_heads)
    out_BSF: Tensor = _NormAllHeads.apply(
        qkv_BSF, query.weight, key.weight, shape, (query.width, key.width), eps, group
    )
    return out_BSF


def _parts(qkv_BSF: Tensor, shape: tuple[int, int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return views of queries B × S × G × P × H, keys and values B × S × G × 1 × H."""
    groups, queries, width = shape
    grouped = qkv_BSF.unflatten(-1, (groups, queries + 2, width))
    q, k, v = grouped.split((queries, 1, 1), dim=3)
    return q, k, v


class _NormAllHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv_BSF: Tensor,
        query_F: Tensor,
        key_F: Tensor,
        shape: tuple[int, int, int],
        widths: tuple[int, int],
        eps: float,
        group: dist.ProcessGroup | None,
    ) -> Tensor:
        q, k, v = _parts(qkv_BSF, shape)
        squares_2R = torch.stack(
            [torch.linalg.vector_norm(x, dim=HEADS, dtype=torch.float32).square() for x in (q, k)]
        )
        if group is not None:
            all_reduce(squares_2R, group)
        for squares_R, width in zip(squares_2R, widths, strict=True):
            squares_R.div_(width).add_(eps).rsqrt_()
        ctx.save_for_backward(qkv_BSF, query_F, key_F, squares_2R)
        ctx.shape, ctx.widths, ctx.group = shape, widths, group
        out_BSF = torch.empty_like(qkv_BSF)
        *normed, same = _parts(out_BSF, shape)
        same.copy_(v)
        for x, weight, factor_R, out in zip(
            (q, k), (query_F, key_F), squares_2R, normed, strict=True
        ):
            out.copy_(x * factor_R[..., None, None, None])
            out.mul_(weight.view(x.shape[2:]))
        return out_BSF

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BSF: Tensor) -> tuple[Tensor | None, ...]:
        qkv_BSF, query_F, key_F, factors_2R = ctx.saved_tensors
        parts, grads = _parts(qkv_BSF, ctx.shape), _parts(grad_BSF, ctx.shape)
        made_BSF = torch.empty_like(qkv_BSF)
        made = _parts(made_BSF, ctx.shape)
        made[2].copy_(grads[2])
        dots_2R = torch.empty_like(factors_2R)
        weight_grads = []
        for number, weight in enumerate((query_F, key_F)):
            x, grad = parts[number], grads[number]
            gemm = grad.float() * x
            heads = weight.view(x.shape[2:]).float()
            torch.sum(gemm * heads, dim=HEADS, out=dots_2R[number])
            gemm *= factors_2R[number][..., None, None, None]
            weight_grads.append(gemm.sum((0, 1)).flatten().to(weight.dtype))
        if ctx.group is not None:
            all_reduce(dots_2R, ctx.group)
        for number, weight in enumerate((query_F, key_F)):
            x, grad, factor_R = parts[number], grads[number], factors_2R[number]
            found = grad.float() * weight.view(x.shape[2:])
            slope_R = factor_R.square() * dots_2R[number] / ctx.widths[number]
            found -= x * slope_R[..., None, None, None]
            found *= factor_R[..., None, None, None]
            made[number].copy_(found)
        return made_BSF, *weight_grads, None, None, None, None


@dataclass(frozen=True, slots=True)
class RotaryTable:
    """Cosines and sines of a microbatch's positions, by which heads are rotated."""

    cos_BS1H: Tensor  # fp32; B may be 1
    sin_BS1H: Tensor

    @classmethod
    def of(cls, positions_BS: Tensor, rope: Rope, length: int = 0) -> RotaryTable:
        """Compute it (Su et al. 2021, two halves of a head) for sequences of `length` tokens; 0
        means at most the original length, where scaling depends on it.
        """
        frequencies_H = _frequencies(rope, positions_BS.device, length)
        angles_BSH = (positions_BS[..., None].float() * frequencies_H).repeat(1, 1, 2)
        cos_BSH, sin_BSH = angles_BSH.cos(), angles_BSH.sin()
        if (scaling := rope.yarn or rope.longrope) is not None:
            growth = scaling.growth_of_heads
            cos_BSH, sin_BSH = cos_BSH * growth, sin_BSH * growth
        return cls(cos_BSH[:, :, None], sin_BSH[:, :, None])

    def moved(self, name: str, move: Callable[[str, Tensor], Tensor]) -> RotaryTable:
        """Return a copy of which `move` has made each tensor, given a name and the tensor."""
        return RotaryTable(move(f"{name}: cos", self.cos_BS1H), move(f"{name}: sin", self.sin_BS1H))


@dataclass(frozen=True, slots=True)
class Context:
    """Inputs that all layers of a chunk share for one microbatch."""

    rotary: Mapping[Rope, RotaryTable]  # one for each kind of positions in the chunk
    # of each call of `attend` in a layer; None where whole sequences attend
    documents: Sequence[DocumentOffsets] | None
    attend: Attend = BY_TORCH  # implementation of softmax attention
    sink: WeightGradSink | None = None  # takes weight gradients; None leaves them to autograd
    recompute: Recomputation = field(default_factory=Recomputation)  # parts to recompute
    extras: Mapping[str, Tensor] = field(default_factory=dict)  # inputs of features, by name


def layer_context(
    positions_BS: Tensor,
    documents: Sequence[DocumentOffsets] | None,
    ropes: Iterable[Rope],
    attend: Attend = BY_TORCH,
    sink: WeightGradSink | None = None,
    recompute: Recomputation | None = None,
    length: int = 0,
    extras: Mapping[str, Tensor] | None = None,
) -> Context:
    """Build the context of a microbatch, with a rotary table for each of `ropes`; `length` as
    `RotaryTable.of`.
    """
    return Context(
        {rope: RotaryTable.of(positions_BS, rope, length) for rope in ropes},
        documents,
        attend=attend,
        sink=sink,
        recompute=recompute or Recomputation(),
        extras=extras or {},
    )


def _frequencies(rope: Rope, device: torch.device, length: int) -> Tensor:
    """Return the rotary frequency of each pair of values, radians per token: fp32 [width / 2].

    YaRN divides low frequencies by its factor, keeps high ones, and interpolates between the pairs
    that make `beta_fast` and `beta_slow` turns over the original length. Llama 3.1 interpolates by
    the number of turns itself.
    """
    even = torch.arange(0, rope.width, 2, device=device, dtype=torch.float32)
    exponent = even / rope.width
    theta = rope.theta
    if rope.dynamic is not None:
        theta = rope.dynamic.base(theta, rope.width, length)
    plain_H: Tensor = theta**-exponent
    yarn = rope.yarn
    if rope.longrope is not None and (factors := rope.longrope.factors(length)):
        return plain_H / _on_device(factors, device)
    if rope.llama3 is not None:
        return _mixed(plain_H, rope.llama3)
    if yarn is None:
        return plain_H if rope.factor == 1 else plain_H / rope.factor

    def pair(turns: float) -> float:
        """Return the (fractional) index of the pair that makes this many turns; 0 is the
        fastest.
        """
        length = yarn.original_length / (2 * math.pi * turns)
        return rope.width * math.log(length) / (2 * math.log(rope.theta))

    low, high = pair(yarn.beta_fast), pair(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    first, last = max(low, 0), min(high, rope.width - 1)
    # `last` may be below `first` where the base is small: then all pairs are slow, as in
    # `transformers`.
    slow_H = ((even / 2 - first) / (last - first or 0.001)).clamp(0, 1)
    mixed_H: Tensor = plain_H * (1 - slow_H) + plain_H / yarn.factor * slow_H
    return mixed_H


@cache
def _on_device(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Return values as a tensor, made once: CUDA graphs cannot capture copies from the host."""
    return torch.tensor(values, device=device)


def _mixed(plain_H: Tensor, llama3: Llama3RopeConfig) -> Tensor:
    """Return Llama 3.1's interpolated frequencies."""
    turns_H = plain_H * (llama3.original_length / (2 * math.pi))
    kept_H = (turns_H - llama3.low_turns) / (llama3.high_turns - llama3.low_turns)
    kept_H = kept_H.clamp(0, 1)
    mixed_H: Tensor = plain_H * kept_H + plain_H / llama3.factor * (1 - kept_H)
    return mixed_H


def interleaved_to_halves(x: Tensor) -> Tensor:
    """Reorder the last dimension to 0, 2, 4, …, 1, 3, 5, …

    Neighbouring pairs become pairs across two halves, the layout that `rotate` takes.
    """
    halves: Tensor = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return halves


def rotate(x_BSNH: Tensor, table: RotaryTable) -> Tensor:
    """Apply rotary positions to every head."""
    half = x_BSNH.shape[-1] // 2
    rotated = torch.cat((-x_BSNH[..., half:], x_BSNH[..., :half]), dim=-1)
    return (x_BSNH * table.cos_BS1H + rotated * table.sin_BS1H).to(x_BSNH.dtype)


def rotate_part(x_BSNH: Tensor, table: RotaryTable) -> Tensor:
    """Apply rotary positions to the first values of every head, as many as the table has."""
    width = table.cos_BS1H.shape[-1]
    return torch.cat((rotate(x_BSNH[..., :width], table), x_BSNH[..., width:]), dim=-1)


class Mlp(nn.Module):
    """SwiGLU of a dense layer or shared expert: silu(x·gate) · (x·up) · down (Shazeer 2020), or
    another activation.

    The first half of `w_up` is the gate; with tensor parallelism, this rank's part of it.
    `activation` takes gate and up as two halves of the last dimension, or up alone in models
    without a gate.
    """

    def __init__(
        self,
        weights: MlpWeights,
        layer_groups: LayerGroups = ALONE,
        activation: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.activation = activation or swiglu
        self.w_up = ColumnParallelLinear(weights.w_up, layer_groups)
        self.w_down = RowParallelLinear(weights.w_down, layer_groups)

    def forward(
        self,
        x_BsD: Tensor,
        sink: WeightGradSink | None = None,
        recompute: Recomputation | None = None,
    ) -> Tensor:
        """Map B × s × D -> B × s × D; `recompute` may discard the activation and recompute it in
        backward.
        """
        both = self.w_up.forward(x_BsD, sink)
        act = (
            self.activation(both)
            if recompute is None
            else recompute.checkpoint_and_discard(Recompute.mlp_act, self.activation, both)
        )
        return self.w_down.forward(act, sink)


class BiasedMlp(Mlp):
    """SwiGLU with biases; every rank adds all of that of `w_down` to its own tokens."""

    def __init__(
        self,
        weights: MlpWeights,
        layer_groups: LayerGroups = ALONE,
        activation: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__(weights, layer_groups, activation)
        assert weights.b_up is not None and weights.b_down is not None
        self.b_up = nn.Parameter(torch.empty(layer_groups.coords.shape(weights.b_up)))
        self.b_down = nn.Parameter(torch.empty(layer_groups.coords.shape(weights.b_down)))

    def forward(
        self,
        x_BsD: Tensor,
        sink: WeightGradSink | None = None,
        recompute: Recomputation | None = None,
    ) -> Tensor:
        """See `Mlp`."""
        # in place is safe: autograd has not saved it
        both = self.w_up.forward(x_BsD, sink).add_(self.b_up)
        act = (
            self.activation(both)
            if recompute is None
            else recompute.checkpoint_and_discard(Recompute.mlp_act, self.activation, both)
        )
        return self.w_down.forward(act, sink).add_(self.b_down)


def build_mlp(
    weights: MlpWeights,
    layer_groups: LayerGroups = ALONE,
    activation: Callable[[Tensor], Tensor] | None = None,
) -> Mlp:
    """Build a feed-forward of the kind that has these weights."""
    kind = Mlp if weights.b_up is None else BiasedMlp
    return kind(weights, layer_groups, activation)


def mlp(model: ModelConfig, weights: MlpWeights, layer_groups: LayerGroups) -> Mlp:
    """Build the feed-forward of a dense layer, with the model's activation."""
    activations = ACTIVATIONS if model.mlp_gate else UNGATED
    return build_mlp(weights, layer_groups, activations[model.activation])


def swiglu(both: Tensor) -> Tensor:
    """Return silu(gate) · up of the two halves of the last dimension."""
    if usable(both):
        return swiglu_kernel(both, None)
    gate, up = both.chunk(2, dim=-1)
    return F.silu(gate) * up


def geglu(both: Tensor) -> Tensor:
    """Return gelu(gate) · up of the two halves of the last dimension, by the tanh approximation."""
    if usable(both):
        return geglu_kernel(both)
    gate, up = both.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def gelu_tanh(up: Tensor) -> Tensor:
    """Return gelu(up) by the tanh approximation."""
    return F.gelu(up, approximate="tanh")


def relu2(up: Tensor) -> Tensor:
    """Return the square of relu(up); saves one tensor of that size."""
    return F.relu(up).square()


ACTIVATIONS = {ActivationKind.silu: swiglu, ActivationKind.gelu_tanh: geglu}  # of two halves
UNGATED: dict[ActivationKind, Callable[[Tensor], Tensor]] = {
    ActivationKind.silu: F.silu,
    ActivationKind.gelu_tanh: gelu_tanh,
    ActivationKind.gelu: F.gelu,
    ActivationKind.relu2: relu2,
}


def expert_swiglu(both_R2F: Tensor, used: Tensor) -> Tensor:
    """Return silu(gate) · up of experts' rows, of which only the first `used` (int32 [1], on the
    device) need to be computed: R × F.
    """
    return swiglu_kernel(both_R2F, used) if usable(both_R2F) else swiglu(both_R2F)
