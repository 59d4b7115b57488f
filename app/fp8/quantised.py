"""FP8 matrices, the interface that quantises and multiplies them, and FP8 copies of weights.

Two GEMMs read each of a linear layer's three matrices, along one dimension or the other. Entries
are scaled along the dimension that a GEMM sums over, and some GPUs' tensor cores need that
dimension contiguous. So there may be two copies.

Shapes: T rows, I input width, O output width, R × C any of these.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn

Four = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


@dataclass(frozen=True, slots=True)
class Quantised:
    """FP8 matrix of R rows and C columns with its scales, readable by the `Fp8Arithmetic` that made
    it.
    """

    by_rows: Tensor | None  # R × C, scaled along rows
    row_scales: Tensor | None
    by_columns: Tensor | None  # C × R, scaled along columns; None if by_rows serves for both
    column_scales: Tensor | None
    # leading dimensions of the tensor that was quantised; they may hold fewer than R rows, since
    # rows of zeros may pad the matrix
    lead: torch.Size

    def tensors(self) -> Four:
        """Return its tensors, for autograd to save."""
        return self.by_rows, self.row_scales, self.by_columns, self.column_scales

    def with_tensors(self, tensors: Four) -> Quantised:
        """Return a matrix of the same shape with these tensors."""
        return Quantised(*tensors, lead=self.lead)

    def with_lead(self, lead: torch.Size) -> Quantised:
        """Return the matrix with other leading dimensions."""
        return replace(self, lead=lead)

    def for_weight_grad(self) -> Quantised:
        """Return the copy that the weight gradient reads, which sums over rows."""
        if self.by_columns is None:
            return self
        return replace(self, by_rows=None, row_scales=None)

    def empty(self) -> Quantised:
        """Return it without tensors, to be restored by `with_tensors`."""
        return self.with_tensors((None, None, None, None))


Operand = Tensor | Quantised  # operand of a linear layer's GEMM


class QuantisesWeights(Protocol):
    """Quantizer of weights."""

    def weight(self, weight: Tensor, /) -> Quantised:
        """Quantise for output and input gradient, into new memory."""

    def update_weight(self, weight: Tensor, held: Quantised, /) -> None:
        """Quantise into the memory of `held`, which `weight` returned."""


class Fp8Arithmetic(QuantisesWeights, Protocol):
    """Quantises the matrices of linear layers by one recipe, and multiplies them.

    Accumulates in fp32; results have the dtype asked for.
    """

    def input(self, x_TI: Tensor) -> Quantised:
        """Quantise the input of a layer, for its output and its weight gradient."""

    def grad(self, grad_TO: Tensor) -> Quantised:
        """Quantise an output gradient, for the gradients of input and weight."""

    def output(self, x: Quantised, weight: Quantised, dtype: torch.dtype) -> Tensor:
        """Return x · weightᵀ, T × O."""

    def input_grad(self, grad: Quantised, weight: Quantised, dtype: torch.dtype) -> Tensor:
        """Return grad · weight, T × I."""

    def weight_grad(self, grad: Quantised, x: Quantised, dtype: torch.dtype) -> Tensor:
        """Return gradᵀ · x over all rows, O × I."""

    def add_weight_grad(self, grad: Quantised, x: Quantised, total_OI: Tensor) -> None:
        """Add gradᵀ · x to `total_OI`, rounded once if that is fp32."""


class HeldWeight:
    """Base of FP8 back ends: quantises the weight once per update, into fixed memory, so that
    captured graphs read the current copies.
    """

    def __init__(self, quantises: QuantisesWeights, weight: nn.Parameter) -> None:
        self._quantises = quantises
        self.weight = weight
        with torch.no_grad():
            self.held = quantises.weight(weight)
        self.stale = True  # True if the weight has changed since it was quantised
        self.times = 0  # how often the weight has been quantised

    def refresh(self) -> None:
        """Quantise the weight if it has changed."""
        if self.stale:
            with torch.no_grad():
                self._quantises.update_weight(self.weight, self.held)
            self.stale = False
            self.times += 1
