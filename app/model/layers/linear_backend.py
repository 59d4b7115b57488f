"""Back ends that compute a linear layer: its output and the gradients of its input and weight.

The modules (`app.model.layers.linear`) own weights and call their back end. They start with torch's
GEMMs (`linear_backend`, `grouped_linear_backend`); `app.fp8` replaces these where GEMMs run in FP8,
`app.moe.clones` wraps those of experts that have replicas. The loss calls the head's back end
(`app.model.layers.loss`), for one block of logits at a time if no rank may hold all.

Shapes: B sequences, S tokens per sequence of a context-parallel rank, s = S / tp of them here, I
input width, O output width, T rows, E experts; rows of an expert end at its offset in `ends_E`
(int32, on the rows' device), rows behind the last one are not defined.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from app.model.layers.tensor_parallel import (
    OptionalGroup,
    gathered,
    scattered,
    start_gather,
    start_scatter,
)
from app.model.layers.weight_grads import (
    FetchedGrad,
    GroupedLinearGrad,
    LinearGrad,
    WeightGrad,
    WeightGradSink,
)


class LinearBackend(Protocol):
    """GEMMs of a layer with one weight, over the last dimension of its input."""

    def linear(
        self,
        x_BsI: Tensor,
        weight_OI: nn.Parameter,
        group: OptionalGroup,
        sink: WeightGradSink | None,
    ) -> Tensor:
        """Return x · weightᵀ for the tokens of all ranks of `group`: B × S × O; None means this
        rank's tokens.

        Differentiable; in new memory that the caller may write to (no view for autograd). The
        gradient of the weight goes to `sink`, or to autograd without one.
        """

    def output(self, x: Tensor, weight_OI: Tensor) -> Tensor:
        """Return x · weightᵀ of this rank's tokens."""

    def gradients(
        self, grad: Tensor, x: Tensor, weight_OI: Tensor, out: Tensor | None = None
    ) -> tuple[Tensor, WeightGrad]:
        """Return grad · weight, written to `out` if given, and gradᵀ · x over all rows, O × I, as
        operands that are not multiplied yet.
        """


class GroupedLinearBackend(Protocol):
    """The three grouped GEMMs of a layer with one weight per expert."""

    @property
    def differentiable(self) -> bool:
        """True if autograd differentiates `output`."""

    @property
    def input_grad_first(self) -> bool:
        """True if backward computes the input gradient before the weight gradient."""

    def output(self, rows_TI: Tensor, weight_EIO: Tensor, ends_E: Tensor) -> Tensor:
        """Return the rows of expert e times weight[e]."""

    def input_grad(self, grad_TO: Tensor, weight_EIO: Tensor, ends_E: Tensor) -> Tensor:
        """Return the rows of the contiguous output gradient of expert e times weight[e]ᵀ."""

    def weight_grad(self, grad_TO: Tensor, rows_TI: Tensor, ends_E: Tensor) -> WeightGrad:
        """Return rows[e]ᵀ · grad[e] for every expert e, E × I × O, as operands that are not
        multiplied yet; `grad_TO` is contiguous.
        """


class TorchLinear:
    """torch's GEMMs on plain tensors, in the dtype of the weight."""

    def linear(
        self,
        x_BsI: Tensor,
        weight_OI: nn.Parameter,
        group: OptionalGroup,
        sink: WeightGradSink | None,
    ) -> Tensor:
        """See the protocol."""
        if sink is None and group is None:
            return self.output(x_BsI, weight_OI)
        out_BSO: Tensor = _Linear.apply(x_BsI, weight_OI, group, self, sink)
        return out_BSO

    def output(self, x: Tensor, weight_OI: Tensor) -> Tensor:
        """See the protocol."""
        return F.linear(x, weight_OI)

    def gradients(
        self, grad: Tensor, x: Tensor, weight_OI: Tensor, out: Tensor | None = None
    ) -> tuple[Tensor, WeightGrad]:
        """See the protocol."""
        return self.input_grad(grad, weight_OI, out), self.weight_grad(grad, x)

    def input_grad(self, grad: Tensor, weight_OI: Tensor, out: Tensor | None = None) -> Tensor:
        """Return grad · weight."""
        return torch.matmul(grad, weight_OI, out=out)

    def weight_grad(self, grad: Tensor, x: Tensor) -> WeightGrad:
        """Return gradᵀ · x over all rows, O × I."""
        return LinearGrad(grad.flatten(0, -2).T, x.flatten(0, -2))


class _Linear(torch.autograd.Function):
    """x · weightᵀ for the tokens of all ranks of `group`; of this rank only if `group` is None."""

    @staticmethod
    def forward(
        ctx: Any,
        x_BsI: Tensor,
        weight_OI: nn.Parameter,
        group: OptionalGroup,
        backend: TorchLinear,
        sink: WeightGradSink | None,
    ) -> Tensor:
        ctx.save_for_backward(x_BsI)
        ctx.weight_OI = weight_OI
        ctx.group = group
        ctx.backend = backend
        ctx.sink = sink
        return backend.output(x_BsI if group is None else gathered(x_BsI, group), weight_OI)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BSO: Tensor) -> tuple[Tensor | None, ...]:
        (x_BsI,) = ctx.saved_tensors
        weight_OI, group = ctx.weight_OI, ctx.group
        backend: TorchLinear = ctx.backend
        sink: WeightGradSink | None = ctx.sink
        if group is None:
            gradient = backend.weight_grad(grad_BSO, x_BsI)
            weight_grad = None
            if sink is None:
                weight_grad = gradient()
            else:
                sink.push(weight_OI, gradient)
            return backend.input_grad(grad_BSO, weight_OI), weight_grad, None, None, None
        if sink is not None and sink.deferred:
            of_gathered = partial(_of_gathered, backend, grad_BSO, x_BsI, group=group)
            sink.push(weight_OI, FetchedGrad(of_gathered))
            grad_BSI = backend.input_grad(grad_BSO, weight_OI)
            return scattered(grad_BSI, group), None, None, None, None
        # overlap: the all-gather with the first GEMM, the reduce-scatter with the second
        x_BSI = start_gather(x_BsI, group)
        grad_BsI = start_scatter(backend.input_grad(grad_BSO, weight_OI), group)
        weight_grad = pushed(sink, weight_OI, backend.weight_grad(grad_BSO, x_BSI()))
        return grad_BsI(), weight_grad, None, None, None


def pushed(
    sink: WeightGradSink | None, weight: nn.Parameter, gradient: WeightGrad
) -> Tensor | None:
    """Push a gradient to its sink; return it for autograd if there is none."""
    if sink is None:
        return gradient()
    sink.push(weight, gradient)
    return None


def _of_gathered(
    backend: TorchLinear, grad_BSO: Tensor, x_BsI: Tensor, *, group: OptionalGroup
) -> WeightGrad:
    """Return the weight gradient after gathering the input over `group`."""
    return backend.weight_grad(grad_BSO, gathered(x_BsI, group))


class TorchGroupedLinear:
    """torch's grouped GEMMs, which read group sizes on the device.

    fp32, bf16 and fp16; I·itemsize and O·itemsize must be multiples of 16 bytes (RuntimeError).
    """

    differentiable = True
    input_grad_first = False

    def output(self, rows_TI: Tensor, weight_EIO: Tensor, ends_E: Tensor) -> Tensor:
        """See the protocol."""
        out_TO: Tensor = F.grouped_mm(rows_TI, weight_EIO, offs=ends_E)
        if out_TO.requires_grad:
            # its backward refuses expanded gradients, such as a sum's
            out_TO.register_hook(torch.Tensor.contiguous)
        return out_TO

    def input_grad(self, grad_TO: Tensor, weight_EIO: Tensor, ends_E: Tensor) -> Tensor:
        """See the protocol."""
        grad_TI: Tensor = F.grouped_mm(grad_TO, weight_EIO.transpose(1, 2), offs=ends_E)
        return grad_TI

    def weight_grad(self, grad_TO: Tensor, rows_TI: Tensor, ends_E: Tensor) -> WeightGrad:
        """See the protocol."""
        return GroupedLinearGrad(rows_TI, grad_TO, ends_E)


def linear_backend() -> LinearBackend:
    """Return the back end with which a column- or row-parallel layer starts."""
    return TorchLinear()


def grouped_linear_backend() -> GroupedLinearBackend:
    """Return the back end with which a grouped layer starts."""
    return TorchGroupedLinear()
