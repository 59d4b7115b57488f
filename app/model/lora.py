"""Adapters beside frozen linear layers and experts (LoRA, arXiv 2106.09685): x·weightᵀ + scale ·
(x·aᵀ)·bᵀ.

`add_adapters` wraps the layers' back ends when a run is built, so that other runs do not execute a
line of it. If tensor parallelism divides a layer's outputs, it divides those of `b`: a rank
multiplies its own tokens by `a` and gathers the r values of each. If it divides the inputs, it
divides those of `a`, and the outputs are partial sums like the layer's own, which one
reduce-scatter adds up. Each rank then has part of the gradient of the matrix that is whole on all;
the optimizer adds these up. Experts are alike over expert tensor parallelism.

Shapes as in `app.model.layers.linear`; r rank, P adapters of one weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from app.choices import BaseKind
from app.config import LoraConfig
from app.model.adapter_dropout import AdapterDropout
from app.model.chunk import Chunk
from app.model.layers.frozen import FrozenGroupedLinear
from app.model.layers.held import KINDS, HeldGroupedLinear, HeldLinear
from app.model.layers.layer_groups import OptionalGroup, gather_tokens
from app.model.layers.linear import (
    ColumnParallelLinear,
    GroupedLinear,
    GroupedLinearBackend,
    LinearBackend,
    LinearModule,
    RowParallelLinear,
    TorchGroupedLinear,
)
from app.model.layers.weight_grads import WeightGrad, WeightGradSink
from app.plan.model.held import is_held
from app.plan.model.weight import Adapter
from app.plan.sharding.blocks import ShardCoords


class AdapterPair(nn.Module):
    """Both matrices of an adapter: this rank's part."""

    def __init__(
        self,
        adapter: Adapter,
        coords: ShardCoords,
        like: Tensor,
        device: torch.device | None = None,
    ) -> None:
        """`device`: None is that of `like`."""
        super().__init__()
        self.adapter = adapter
        self.a = nn.Parameter(like.new_empty(coords.shape(adapter.a), device=device))
        self.b = nn.Parameter(like.new_empty(coords.shape(adapter.b), device=device))


def adapted_outputs(adapter: Adapter, out: Tensor) -> Tensor:
    """Return a view of an adapter's outputs among those of a weight, in two last dimensions."""
    period, start, stop = adapter.outputs(out.shape[-1])
    own: Tensor = out.unflatten(-1, (-1, period))[..., start:stop]
    return own


class LoraLinear:
    """Back end of a frozen linear layer with adapters."""

    def __init__(self, base: LinearBackend, pairs: Sequence[AdapterPair], scale: float) -> None:
        self.base = base
        self.pairs = tuple(pairs)
        self.scale = scale

    def linear(
        self,
        x_BsI: Tensor,
        weight_OI: nn.Parameter,
        group: OptionalGroup,
        sink: WeightGradSink | None,
    ) -> Tensor:
        """See the protocol."""
        out_BSO = self.base.linear(x_BsI, weight_OI, group, sink)
        return self._added(out_BSO, x_BsI, group)

    def output(self, x: Tensor, weight_OI: Tensor) -> Tensor:
        """See the protocol."""
        return self._added(self.base.output(x, weight_OI), x, None)

    def gradients(
        self, grad: Tensor, x: Tensor, weight_OI: Tensor, out: Tensor | None = None
    ) -> tuple[Tensor, WeightGrad]:
        """Only a loss asks for them, of a head."""
        raise AssertionError("no target is a head")

    def _added(self, out: Tensor, x: Tensor, group: OptionalGroup) -> Tensor:
        mid = gather_tokens(self._middle(x), group)
        added: Tensor = _Added.apply(out, mid, None, self, *(pair.b for pair in self.pairs))
        return added

    def _middle(self, x: Tensor) -> Tensor:
        """Return x · aᵀ of all adapters, side by side."""
        a: list[Tensor] = [pair.a for pair in self.pairs]
        return F.linear(x, a[0] if len(a) == 1 else torch.cat(a))


class DroppingLoraLinear(LoraLinear):
    """`LoraLinear` whose adapters drop some of their inputs in training, each others.

    `first`: token of this rank that inputs begin with; `channels`: keys of each adapter's inputs.
    """

    def __init__(
        self,
        base: LinearBackend,
        pairs: Sequence[AdapterPair],
        scale: float,
        dropout: AdapterDropout,
        first: int,
        channels: Sequence[Tensor],
    ) -> None:
        super().__init__(base, pairs, scale)
        self.dropout = dropout
        self.first = first
        self.channels = tuple(channels)

    def dropped(self, x_BsI: Tensor, nth: int) -> Tensor:
        """Return the input of the n-th adapter, not scaled."""
        return self.dropout.dropped(x_BsI, self.first, self.channels[nth])

    def _middle(self, x: Tensor) -> Tensor:
        if not self.dropout.active:
            return super()._middle(x)
        mid: Tensor = _DroppedMiddle.apply(x, self, *(pair.a for pair in self.pairs))
        return mid


class _DroppedMiddle(torch.autograd.Function):
    """x · aᵀ of all adapters, of what each keeps of x; backward makes the masks again."""

    @staticmethod
    def forward(ctx: Any, x_BsI: Tensor, layer: DroppingLoraLinear, *a: nn.Parameter) -> Tensor:
        ctx.save_for_backward(x_BsI)
        ctx.layer, ctx.a = layer, a
        mid = [F.linear(layer.dropped(x_BsI, nth), each) for nth, each in enumerate(a)]
        return torch.cat(mid, dim=-1).div_(layer.dropout.keep)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x_BsI,) = ctx.saved_tensors
        layer: DroppingLoraLinear = ctx.layer
        to_x, to_a = None, []
        parts = (grad / layer.dropout.keep).chunk(len(ctx.a), dim=-1)
        for nth, (matrix, part) in enumerate(zip(ctx.a, parts, strict=True)):
            to_a.append(part.flatten(0, -2).T @ layer.dropped(x_BsI, nth).flatten(0, -2))
            if ctx.needs_input_grad[0]:
                own = layer.dropped(part @ matrix, nth)
                to_x = own if to_x is None else to_x.add_(own)
        return to_x, None, *to_a


class LoraGroupedLinear(FrozenGroupedLinear):
    """Frozen grouped linear layer with a pair of matrices per expert."""

    pairs: tuple[AdapterPair, ...]
    scale: float

    def forward(
        self,
        rows_TI: Tensor,
        ends_E: Tensor,
        sink: WeightGradSink | None = None,
        backend: GroupedLinearBackend | None = None,
    ) -> Tensor:
        """See `GroupedLinear`."""
        out_TO = super().forward(rows_TI, ends_E, sink, backend)
        a: list[Tensor] = [pair.a for pair in self.pairs]
        a_EIR = a[0] if len(a) == 1 else torch.cat(a, dim=-1)
        mid = GEMMS.output(rows_TI, a_EIR, ends_E)
        added: Tensor = _Added.apply(out_TO, mid, ends_E, self, *(pair.b for pair in self.pairs))
        return added


GEMMS = TorchGroupedLinear()


class _Added(torch.autograd.Function):
    """Add adapters' outputs to those of a layer, in place; backward passes its gradient on.

    One GEMM multiplies the middle values of all adapters by one matrix, which is zero where an
    adapter has no outputs: outputs and their gradient are read and written once, in order.
    `ends_E`: ends of experts' rows; None for a linear layer.
    """

    @staticmethod
    def forward(
        ctx: Any,
        out: Tensor,
        mid: Tensor,
        ends_E: Tensor | None,
        layer: LoraLinear | LoraGroupedLinear,
        *b: nn.Parameter,
    ) -> Tensor:
        ctx.save_for_backward(mid, ends_E)
        ctx.layer, ctx.b = layer, b
        ctx.mark_dirty(out)
        if ends_E is None:
            second_OR = side_by_side(layer.pairs, b, out.shape[-1])
            out.view(-1, out.shape[-1]).addmm_(_rows(mid), second_OR.T, alpha=layer.scale)
        else:
            second_ERO = side_by_side(layer.pairs, b, out.shape[-1])
            out.add_(GEMMS.output(mid, second_ERO, ends_E), alpha=layer.scale)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        mid, ends_E = ctx.saved_tensors
        layer: LoraLinear | LoraGroupedLinear = ctx.layer
        grad = grad.contiguous()
        second = side_by_side(layer.pairs, ctx.b, grad.shape[-1])
        if ends_E is None:
            rows, nothing = _rows(grad), grad.new_empty(())
            to_mid = torch.addmm(nothing, rows, second, beta=0, alpha=layer.scale).view_as(mid)
            made = torch.addmm(nothing, rows.T, _rows(mid), beta=0, alpha=layer.scale)
        else:
            to_mid = GEMMS.input_grad(grad, second, ends_E).mul_(layer.scale)
            made = GEMMS.weight_grad(grad, mid, ends_E)().mul_(layer.scale)
        return grad, to_mid, None, None, *apart(layer.pairs, made)


def _rows(x: Tensor) -> Tensor:
    """Return the last dimension's rows as a matrix."""
    return x.flatten(0, -2)


def side_by_side(pairs: Sequence[AdapterPair], b: Sequence[Tensor], outputs: int) -> Tensor:
    """Return the second matrices of all adapters of a weight as one: O × R, and E × R × O of
    experts, for R ranks together; zero where an adapter has no outputs.
    """
    if len(pairs) == 1 and pairs[0].adapter.of == 1:
        return b[0]
    experts = pairs[0].adapter.a.expert
    count = sum(each.shape[-2 if experts else -1] for each in b)
    whole = b[0].new_zeros((b[0].shape[0], count, outputs) if experts else (outputs, count))
    for pair, matrix, part in zip(pairs, b, _parts(whole, b, experts), strict=True):
        own = adapted_outputs(pair.adapter, part)
        own.copy_((matrix if experts else matrix.T).unflatten(-1, own.shape[-2:]))
    return whole


def apart(pairs: Sequence[AdapterPair], whole: Tensor) -> list[Tensor]:
    """Return each adapter's part of the gradient of `side_by_side`'s matrix, in its own shape."""
    if len(pairs) == 1 and pairs[0].adapter.of == 1:
        return [whole]
    experts = pairs[0].adapter.a.expert
    found = []
    for pair, part in zip(pairs, _parts(whole, [p.b for p in pairs], experts), strict=True):
        own = adapted_outputs(pair.adapter, part).flatten(-2)
        found.append(own if experts else own.T)
    return found


def _parts(whole: Tensor, b: Sequence[Tensor], experts: bool) -> Iterator[Tensor]:
    """Yield views of each adapter's ranks, with outputs last."""
    start = 0
    for each in b:
        stop = start + each.shape[-2 if experts else -1]
        yield whole[:, start:stop] if experts else whole[:, start:stop].T
        start = stop


def _with_adapter(
    logits: Callable[[Tensor], Tensor], pair: AdapterPair, scale: float, x_TD: Tensor
) -> Tensor:
    """Return a router's logits, fp32, with those of its adapter."""
    added_TE = F.linear(F.linear(x_TD.to(pair.a.dtype), pair.a), pair.b)
    return logits(x_TD) + scale * added_TE.float()


def add_adapters(
    chunk: Chunk,
    lora: LoraConfig,
    dropout: AdapterDropout | None = None,
    device: torch.device | None = None,
) -> None:
    """Add a run's adapters to the layers of a chunk, which are frozen and have their memory.

    The adapters' values are not set. With `dropout` they drop some of their inputs in training.
    `device`: of the adapters; None is that of the layers.
    """
    chunk.lora = lora
    coords = chunk.layer_groups.coords
    for name, adapters in chunk.adapted():
        path, _, last = name.rpartition(".")
        if last == "weight":
            _add_to_router(chunk.get_submodule(path), adapters, coords, scale=lora.scale)
            continue
        layer = chunk.get_submodule(name)
        assert isinstance(layer, LinearModule), f"{name} is not linear"
        like = layer.weight.detach()
        pairs = [AdapterPair(each, coords, like, device) for each in adapters]
        if isinstance(layer, GroupedLinear):
            grouped = LoraGroupedLinear.of(layer)
            grouped.pairs, grouped.scale = tuple(pairs), lora.scale
            setattr(chunk.get_submodule(path), last, grouped)
            layer = grouped
        else:
            assert isinstance(layer, ColumnParallelLinear | RowParallelLinear)
            layer.backend = _backend(name, layer, pairs, lora.scale, coords.tp, dropout)
        for pair in pairs:
            layer.add_module(pair.adapter.name, pair)


def hold_base(chunk: Chunk, kind: BaseKind, device: torch.device) -> None:
    """Quantise the frozen linear layers of a chunk, whose weights are set, and move them to the
    device.
    """
    for named, param in chunk.weights():
        if not is_held(named.weight):
            continue
        layer = chunk.get_submodule(named.name)
        held = KINDS[kind](param.data.to(device))
        param.data = held.codes
        if isinstance(layer, GroupedLinear):
            layer.backend = HeldGroupedLinear(held)
        else:
            assert isinstance(layer, ColumnParallelLinear | RowParallelLinear)
            adapted = layer.backend
            if isinstance(adapted, LoraLinear):
                adapted.base = HeldLinear(held)
            else:
                layer.backend = HeldLinear(held)


def _backend(
    name: str,
    layer: ColumnParallelLinear | RowParallelLinear,
    pairs: Sequence[AdapterPair],
    scale: float,
    tp: tuple[int, int],
    dropout: AdapterDropout | None,
) -> LinearBackend:
    """Return a layer's back end with its adapters, on rank tp[0] of tp[1]."""
    if dropout is None:
        return LoraLinear(layer.backend, pairs, scale)
    (index, ranks), inputs = tp, layer.weight.shape[1]
    own = dropout.keys_BS.shape[1] // ranks  # tokens
    # a layer with part of the width has all tokens; others have their part of these
    narrow = any(pair.adapter.a.tp is not None for pair in pairs)
    first, start = (0, index * inputs) if narrow else (index * own, 0)
    channels = [dropout.channels(f"{name}.{pair.adapter.name}", start, inputs) for pair in pairs]
    return DroppingLoraLinear(layer.backend, pairs, scale, dropout, first, channels)


def _add_to_router(
    router: nn.Module, adapters: Sequence[Adapter], coords: ShardCoords, *, scale: float
) -> None:
    (adapter,) = adapters
    weight = router.weight
    assert isinstance(weight, nn.Parameter)
    pair = AdapterPair(adapter, coords, weight.detach())
    router.add_module(adapter.name, pair)
    router.logits = partial(  # type: ignore[assignment]
        _with_adapter, cast(Callable[[Tensor], Tensor], router.logits), pair, scale
    )


def adapter_delta(pairs: Sequence[tuple[Adapter, Tensor, Tensor]], scale: float) -> Tensor:
    """Return what the adapters (a, b) of one weight add to it: fp32, O × I; E × I × O of experts.

    Of parts of a and b over tensor-parallel ranks, what they add to the part of the weight.
    """
    first, a, b = pairs[0]
    grouped = first.a.expert
    outputs = first.all_outputs(b[0, 0].numel() if grouped else b.shape[0])
    inputs = a.shape[1:2]
    out = a.new_zeros((*a.shape[:grouped], *inputs, outputs), dtype=torch.float32)
    for adapter, a, b in pairs:
        own = adapted_outputs(adapter, out)
        made = a.float() @ b.float().flatten(2) if grouped else (b.float() @ a.float()).T
        own += made.reshape(own.shape) * scale
    return out if grouped else out.T


def merged(layer: ColumnParallelLinear) -> Tensor:
    """Return the weight of a layer with its adapters added, if it has any."""
    backend = layer.backend
    base = backend.base if isinstance(backend, LoraLinear) else backend
    weight = base.held.restored(layer.weight) if isinstance(base, HeldLinear) else layer.weight
    if not isinstance(backend, LoraLinear):
        return weight
    pairs = [(pair.adapter, pair.a, pair.b) for pair in backend.pairs]
    return weight + adapter_delta(pairs, backend.scale).to(weight.dtype)
