"""Linear layers whose weight is not trained: backward computes the input gradient alone.

`freeze` replaces back ends and modules when a run is built, so that trained layers do not run a
line of this. The input is not saved, and not gathered again over tensor-parallel ranks. Weights of
other modules, such as norms, only lose their gradient: their kernels compute both at once.

Shapes as in `app.model.layers.linear`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from app.model.layers.layer_groups import OptionalGroup, gather_tokens
from app.model.layers.linear import (
    ColumnParallelLinear,
    GroupedLinear,
    GroupedLinearBackend,
    RowParallelLinear,
    TorchLinear,
    VocabParallelEmbedding,
)
from app.model.layers.weight_grads import ComputedGrad, WeightGrad, WeightGradSink


class FrozenLinear(TorchLinear):
    """torch's GEMMs with a weight that has no gradient."""

    def linear(
        self,
        x_BsI: Tensor,
        weight_OI: nn.Parameter,
        group: OptionalGroup,
        sink: WeightGradSink | None,
    ) -> Tensor:
        """See the protocol; autograd saves the weight alone."""
        return F.linear(gather_tokens(x_BsI, group), weight_OI)

    def weight_grad(self, grad: Tensor, x: Tensor) -> WeightGrad:
        """Return a zero, which nothing adds to a gradient."""
        return ComputedGrad(grad.new_zeros(()))


class FrozenGroupedLinear(GroupedLinear):
    """Grouped linear layer whose weights have no gradient, with any back end."""

    @classmethod
    def of(cls, module: GroupedLinear) -> Self:
        """Return the frozen layer with a module's weight and back end."""
        frozen = cls.__new__(cls)
        nn.Module.__init__(frozen)
        frozen.weight, frozen.backend = module.weight, module.backend
        return frozen

    def forward(
        self,
        rows_TI: Tensor,
        ends_E: Tensor,
        sink: WeightGradSink | None = None,
        backend: GroupedLinearBackend | None = None,
    ) -> Tensor:
        """See `GroupedLinear`."""
        backend = backend or self.backend
        out_TO: Tensor = _FrozenGrouped.apply(rows_TI, self.weight, ends_E, backend)
        return out_TO


class _FrozenGrouped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows_TI: Tensor,
        weight_EIO: nn.Parameter,
        ends_E: Tensor,
        backend: GroupedLinearBackend,
    ) -> Tensor:
        ctx.save_for_backward(ends_E)
        ctx.weight_EIO = weight_EIO
        ctx.backend = backend
        return backend.output(rows_TI, weight_EIO, ends_E)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TO: Tensor) -> tuple[Tensor | None, ...]:
        (ends_E,) = ctx.saved_tensors
        backend: GroupedLinearBackend = ctx.backend
        return backend.input_grad(grad_TO.contiguous(), ctx.weight_EIO, ends_E), None, None, None


def freeze(module: nn.Module, params: Mapping[str, nn.Parameter], frozen: frozenset[str]) -> None:
    """Freeze the parameters of these global names; `params` are those of a chunk.

    Call it when parameters have their memory, and before FP8 back ends are chosen.
    """
    for name in frozen.intersection(params):
        params[name].requires_grad_(False)
    for inner in [*module.modules()]:
        for name, layer in [*inner.named_children()]:
            weight = getattr(layer, "weight", None)
            if weight is None or weight.requires_grad:
                continue
            if isinstance(layer, GroupedLinear):
                setattr(inner, name, FrozenGroupedLinear.of(layer))
            elif isinstance(layer, ColumnParallelLinear | RowParallelLinear):
                layer.backend = FrozenLinear()


def start_backward_at(embedding: VocabParallelEmbedding) -> None:
    """Have backward reach the output of a frozen embedding: graphs of layers need its gradient."""
    embedding.lookup = partial(_with_grad, embedding.lookup)  # type: ignore[method-assign]


def _with_grad(lookup: Callable[[Tensor], Tensor], tokens_BS: Tensor) -> Tensor:
    found = lookup(tokens_BS)
    return found.requires_grad_() if torch.is_grad_enabled() else found
