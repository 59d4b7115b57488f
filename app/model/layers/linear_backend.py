"""Back ends that compute a linear layer: its output and the gradients of its input and weight.

A back end has three GEMMs and the operand format they read; one operand serves two of them. The
modules (`app.model.layers.linear`) gather and scatter tokens, save tensors for backward and send
the weight gradient to its sink, in the same way for all back ends. Modules start with torch's GEMMs
(`linear_backend`, `grouped_linear_backend`); `app.model.fp8` replaces them where GEMMs run in FP8.
The loss calls the head's back end (`app.model.layers.loss`), for one block of logits at a time if
no rank may hold all.

Shapes: I input width, O output width, T rows, E experts; rows of an expert end at its offset in
`ends_E` (int32, on the rows' device), rows behind the last one are not defined; G of these experts
in a separate weight.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from app.kernels.common import usable
from app.kernels.grouped_gemm import grouped_gemm
from app.model.layers.quantised import Operand
from app.model.layers.ready import ReadyRows
from app.model.layers.weight_grads import (
    GroupedLinearGrad,
    LinearGrad,
    WeightGrad,
    first_row,
)


class LinearBackend(Protocol):
    """The three GEMMs of a layer with one weight, over the last dimension of the input."""

    @property
    def differentiable(self) -> bool:
        """True if the GEMMs read plain tensors. `output` is then differentiated by autograd, unless
        backward has anything else to do.
        """

    def input_operand(self, x: Tensor) -> Operand:
        """Return the input in the format that `output` and `weight_grad` read."""

    def grad_operand(self, grad: Tensor) -> Operand:
        """Return the output gradient in the format that `input_grad` and `weight_grad` read."""

    def output(self, x: Operand, weight_OI: Tensor) -> Tensor:
        """Return x · weightᵀ in new memory that the caller may write to (no view for autograd)."""

    def input_grad(self, grad: Operand, weight_OI: Tensor, out: Tensor | None = None) -> Tensor:
        """Return grad · weight from the output gradient; written to `out` if given."""

    def weight_grad(self, grad: Operand, x: Operand) -> WeightGrad:
        """Return gradᵀ · x over all rows, O × I, as operands that are not multiplied yet."""


class GroupedLinearBackend(Protocol):
    """The three grouped GEMMs of a layer with one weight per expert."""

    @property
    def differentiable(self) -> bool:
        """See `LinearBackend`."""

    @property
    def ready_rows(self) -> type[ReadyRows] | None:
        """Return the type in which a preceding kernel may leave rows quantised for this back end;
        None if the GEMMs read plain tensors.
        """

    def output(self, rows_TI: Operand, weight_EIO: Tensor, ends_E: Tensor) -> Tensor:
        """Return the rows of expert e times weight[e]."""

    def input_grad(self, grad_TO: Operand, weight_EIO: Tensor, ends_E: Tensor) -> Tensor:
        """Return the rows of the contiguous output gradient of expert e times weight[e]ᵀ."""

    def weight_grad(self, grad_TO: Tensor, rows_TI: Tensor, ends_E: Tensor) -> WeightGrad:
        """Return rows[e]ᵀ · grad[e] for every expert e, E × I × O, as operands that are not
        multiplied yet; `grad_TO` is contiguous.
        """


class TorchLinear:
    """torch's GEMMs on plain tensors, in the dtype of the weight."""

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
    """torch's grouped GEMMs, which read group sizes on the device.

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
    """Return the back end with which a column- or row-parallel layer starts."""
    return TorchLinear()


def grouped_linear_backend() -> GroupedLinearBackend:
    """Return the back end with which a grouped layer starts."""
    return TorchGroupedLinear()


def add_groups(
    out_TO: Tensor,
    rows_TI: Tensor,
    weight_GIO: Tensor,
    *,
    ends_E: Tensor,
    transposed: bool = False,
) -> None:
    """Write to `out` the outputs of the last G experts, whose weights lie in another tensor; uses
    weight[g]ᵀ if `transposed`.

    On Hopper and newer GPUs a kernel reads the groups' offsets on the device.
    """
    first = len(ends_E) - len(weight_GIO)
    if usable(out_TO):
        grouped_gemm(out_TO, rows_TI, weight_GIO, ends_E=ends_E, first=first, transposed=transposed)
        return
    matrix_GIO = weight_GIO.transpose(1, 2) if transposed else weight_GIO
    begin = first_row(ends_E, first)
    out_TO[begin:] = F.grouped_mm(rows_TI[begin:], matrix_GIO, offs=ends_E[first:] - begin)
