"""Matrix products whose weight gradients go elsewhere than to autograd.

Into a queue, where they wait: what lets a pipeline send its input gradient first (Qi et al. 2023). Or straight into sums of
more bits than the weights have: the product itself adds to them, and no gradient of one microbatch is ever stored.

Shapes: T rows, I input width, O output width, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

AddGrad = Callable[[nn.Parameter, Tensor], None]  # adds to the gradient sum of a parameter


@dataclass(frozen=True, slots=True)
class Product:
    """A gradient that is a product of two matrices, left · right."""

    left: Tensor
    right: Tensor

    def __call__(self) -> Tensor:
        """The gradient in the type of the matrices."""
        return self.left @ self.right


class Later(Protocol):
    """Where backward leaves gradients of weights."""

    waits: bool  # whether they are computed later than the gradients of inputs

    def push(self, weight: nn.Parameter, gradient: Callable[[], Tensor]) -> None:
        """Take a weight's gradient in one microbatch."""


@dataclass(frozen=True, slots=True)
class DirectSums:
    """Computes them at once, into their sums."""

    add: AddGrad
    add_product: Callable[[nn.Parameter, Tensor, Tensor], None]  # adds left · right to the gradient sum of a parameter
    waits: ClassVar[bool] = False

    def push(self, weight: nn.Parameter, gradient: Callable[[], Tensor]) -> None:
        """Add a gradient."""
        if isinstance(gradient, Product):
            self.add_product(weight, gradient.left, gradient.right)
        else:
            self.add(weight, gradient())


@dataclass(slots=True)
class WeightQueue:
    """Weight gradients of one microbatch in one chunk, left over by the backward of its inputs."""

    waiting: list[tuple[nn.Parameter, Callable[[], Tensor]]] = field(default_factory=list)
    waits: ClassVar[bool] = True

    def push(self, weight: nn.Parameter, gradient: Callable[[], Tensor]) -> None:
        """Leave a gradient for later."""
        self.waiting.append((weight, gradient))

    @torch.no_grad()
    def run(self, add: AddGrad) -> None:
        """Compute all that wait, in the order of backward, and free what they need."""
        while self.waiting:
            weight, gradient = self.waiting.pop(0)
            add(weight, gradient())


def linear(x: Tensor, weight_OI: nn.Parameter, later: Later | None) -> Tensor:
    """x · weightᵀ over the last dimension; with `later`, backward leaves the weight's gradient there."""
    return F.linear(x, weight_OI) if later is None else _Linear.apply(x, weight_OI, later)


def grouped_linear(rows_TI: Tensor, weight_EIO: nn.Parameter, ends_E: Tensor, later: Later | None) -> Tensor:
    """Rows of expert e, up to its end offset, times weight[e]; with `later` as `linear`."""
    if later is not None:
        return _GroupedLinear.apply(rows_TI, weight_EIO, ends_E, later)
    out_TO = F.grouped_mm(rows_TI, weight_EIO, offs=ends_E)
    if out_TO.requires_grad:
        out_TO.register_hook(torch.Tensor.contiguous)  # its backward refuses expanded gradients, such as a sum's
    return out_TO


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OI: nn.Parameter, later: Later) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight_OI, ctx.later = weight_OI, later
        return F.linear(x, weight_OI)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        ctx.later.push(ctx.weight_OI, Product(grad.flatten(0, -2).T, x.flatten(0, -2)))
        return grad @ ctx.weight_OI, None, None


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_TI: Tensor, weight_EIO: nn.Parameter, ends_E: Tensor, later: Later) -> Tensor:
        ctx.save_for_backward(rows_TI, ends_E)
        ctx.weight_EIO, ctx.later = weight_EIO, later
        return F.grouped_mm(rows_TI, weight_EIO, offs=ends_E)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TO: Tensor) -> tuple[Tensor, None, None, None]:
        rows_TI, ends_E = ctx.saved_tensors
        grad_TO = grad_TO.contiguous()
        ctx.later.push(ctx.weight_EIO, lambda: F.grouped_mm(rows_TI.T, grad_TO, offs=ends_E))
        return F.grouped_mm(grad_TO, ctx.weight_EIO.transpose(1, 2), offs=ends_E), None, None, None
