"""What computes a linear layer: its output, and the gradients of its input and of its weight.

A back end is the three products, and the form in which they read what they are given: once made,
an operand serves two of them. Where tokens are gathered and scattered, what is kept for backward
and where the weight's gradient goes is the modules' business (`app.model.linear`), and the same for
all of them. `linear_backend` and `grouped_linear_backend` say what a module begins with, torch's
products; `app.model.fp8` puts another in its place where products are to be in FP8. The loss
asks the head's back end for its products (`app.model.loss`), chunk by chunk where no rank is to
have all logits.

Shapes: I input width, O output width, T rows, E experts; rows of an expert end at its offset in
`ends_E` (int32, on the rows' device), rows behind the last one are not defined.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from app.kernels.common import usable
from app.kernels.grouped_gemm import grouped_gemm
from app.model.fp8.quantised import Operand
from app.model.fp8.ready import ReadyRows
from app.model.weight_grads import (
    GroupedLinearGrad,
    LinearGrad,
    WeightGrad,
    first_row,
)


class LinearBackend(Protocol):
    """The products of a layer with one weight, over the last dimension of what comes in."""

    @property
    def differentiable(self) -> bool:
        """Whether products read tensors as they are; autograd differentiates `output` then, where
        nothing else is to be done in backward.
        """

    def input_operand(self, x: Tensor) -> Operand:
        """What comes in as `output` and `weight_grad` read it."""

    def grad_operand(self, grad: Tensor) -> Operand:
        """The output's gradient as `input_grad` and `weight_grad` read it."""

    def output(self, x: Operand, weight_OI: Tensor) -> Tensor:
        """Return x · weightᵀ in new memory, which the caller may write to: no view to autograd."""

    def input_grad(self, grad: Operand, weight_OI: Tensor, out: Tensor | None = None) -> Tensor:
        """grad · weight, of the output's gradient; in the memory of `out` if there is one."""

    def weight_grad(self, grad: Operand, x: Operand) -> WeightGrad:
        """gradᵀ · x over all rows, O × I: its operands, nothing is computed yet."""


class GroupedLinearBackend(Protocol):
    """The products of a layer with a weight per expert."""

    @property
    def differentiable(self) -> bool:
        """As of `LinearBackend`."""

    @property
    def ready_rows(self) -> type[ReadyRows] | None:
        """Where who makes rows may leave them as products read them; None: these read tensors."""

    def output(self, rows_TI: Operand, weight_EIO: Tensor, ends_E: Tensor) -> Tensor:
        """Rows of expert e times weight[e]."""

    def input_grad(self, grad_TO: Operand, weight_EIO: Tensor, ends_E: Tensor) -> Tensor:
        """Rows of expert e of the output's gradient, contiguous, times weight[e]ᵀ."""

    def weight_grad(self, grad_TO: Tensor, rows_TI: Tensor, ends_E: Tensor) -> WeightGrad:
        """rows[e]ᵀ · grad[e] of every expert e, E × I × O: its operands, nothing is computed yet;
        `grad_TO` is contiguous.
        """


class TorchLinear:
    """torch's own products, in the type of the weight, of tensors as they are."""

    differentiable = True

    def input_operand(self, x: Tensor) -> Tensor:
        """See the protocol."""
        return x

    def grad_operand(self, grad: Tensor) -> Tensor:
        """See the protocol."""
        return grad

    def output(self, x: Operand, weight_OI: Tensor) -> Tensor:
        """See the protocol."""
        assert isinstance(x, Tensor)
        return F.linear(x, weight_OI)

    def input_grad(self, grad: Operand, weight_OI: Tensor, out: Tensor | None = None) -> Tensor:
        """See the protocol."""
        assert isinstance(grad, Tensor)
        return torch.matmul(grad, weight_OI, out=out)

    def weight_grad(self, grad: Operand, x: Operand) -> WeightGrad:
        """See the protocol."""
        assert isinstance(grad, Tensor) and isinstance(x, Tensor)
        return LinearGrad(grad.flatten(0, -2).T, x.flatten(0, -2))


class TorchGroupedLinear:
    """torch's grouped products, whose group sizes are read on the device.

    fp32, bf16 and fp16; I·itemsize and O·itemsize must be multiples of 16 bytes (RuntimeError).
    """

    differentiable = True
    ready_rows = None

    def output(self, rows_TI: Operand, weight_EIO: Tensor, ends_E: Tensor) -> Tensor:
        """See the protocol."""
        assert isinstance(rows_TI, Tensor)
        out_TO: Tensor = F.grouped_mm(rows_TI, weight_EIO, offs=ends_E)
        if out_TO.requires_grad:
            # its backward refuses expanded gradients, such as a sum's
            out_TO.register_hook(torch.Tensor.contiguous)
        return out_TO

    def input_grad(self, grad_TO: Operand, weight_EIO: Tensor, ends_E: Tensor) -> Tensor:
        """See the protocol."""
        assert isinstance(grad_TO, Tensor)
        grad_TI: Tensor = F.grouped_mm(grad_TO, weight_EIO.transpose(1, 2), offs=ends_E)
        return grad_TI

    def weight_grad(self, grad_TO: Tensor, rows_TI: Tensor, ends_E: Tensor) -> WeightGrad:
        """See the protocol."""
        return GroupedLinearGrad(rows_TI, grad_TO, ends_E)


def linear_backend() -> LinearBackend:
    """What a column- or row-parallel layer computes with, unless it is given another."""
    return TorchLinear()


def grouped_linear_backend() -> GroupedLinearBackend:
    """What a layer of experts computes with."""
    return TorchGroupedLinear()


def add_groups(
    out_TO: Tensor,
    rows_TI: Tensor,
    weight_GIO: Tensor,
    *,
    ends_E: Tensor,
    transposed: bool = False,
) -> None:
    """Put into `out` what the last G experts make of their rows, whose weights lie elsewhere than
    those of the others; `transposed`: with weight[g]ᵀ.

    On a GPU like Hopper by a kernel that reads where the rows begin.
    """
    first = len(ends_E) - len(weight_GIO)
    if usable(out_TO):
        grouped_gemm(out_TO, rows_TI, weight_GIO, ends_E=ends_E, first=first, transposed=transposed)
        return
    matrix_GIO = weight_GIO.transpose(1, 2) if transposed else weight_GIO
    begin = first_row(ends_E, first)
    out_TO[begin:] = F.grouped_mm(rows_TI[begin:], matrix_GIO, offs=ends_E[first:] - begin)
