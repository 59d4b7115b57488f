"""A matrix in FP8, what quantises and multiplies such matrices, and a weight that is kept as
one beside the parameter it is made of.

Each of a linear layer's three matrices is read by two products, along one dimension or the other:
its entries are scaled along the dimension that a product sums over, and tensor cores of some GPUs
take no other order in memory. So there may be two copies.

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
    """A matrix of R rows and C columns in FP8, and what its entries are to be multiplied
    with; only `Fp8Arithmetic` that has made it reads it.
    """

    by_rows: Tensor | None  # R × C, scaled along rows
    row_scales: Tensor | None
    by_columns: Tensor | None  # C × R, scaled along columns; None: by_rows serves for both
    column_scales: Tensor | None
    # dimensions in front of the last one of what has been quantised, R elements or fewer: the
    # last rows may be zeros that fill a matrix up
    lead: torch.Size

    def tensors(self) -> Four:
        """What it holds, for autograd to keep."""
        return self.by_rows, self.row_scales, self.by_columns, self.column_scales

    def with_tensors(self, tensors: Four) -> Quantised:
        """The same in other memory."""
        return Quantised(*tensors, lead=self.lead)

    def with_lead(self, lead: torch.Size) -> Quantised:
        """The same of something with other dimensions in front."""
        return replace(self, lead=lead)

    def for_weight_grad(self) -> Quantised:
        """What the gradient of the weight reads, which sums over rows."""
        if self.by_columns is None:
            return self
        return replace(self, by_rows=None, row_scales=None)

    def empty(self) -> Quantised:
        """Without any memory, to be filled by `with_tensors`."""
        return self.with_tensors((None, None, None, None))


Operand = Tensor | Quantised  # what a product of a linear layer reads


class QuantisesWeights(Protocol):
    """What makes a weight's copies in FP8."""

    def weight(self, weight: Tensor, /) -> Quantised:
        """In new memory, for the output and for the gradient of the input."""

    def update_weight(self, weight: Tensor, held: Quantised, /) -> None:
        """The same in the memory of `held`, which `weight` has made."""


class Fp8Arithmetic(QuantisesWeights, Protocol):
    """Quantises the matrices of linear layers by one recipe, and multiplies them.

    Sums are fp32, results of the type asked for.
    """

    def input(self, x_TI: Tensor) -> Quantised:
        """What comes into a layer, for its output and for the gradient of its weight."""

    def grad(self, grad_TO: Tensor) -> Quantised:
        """An output's gradient, for the gradients of the input and of the weight."""

    def output(self, x: Quantised, weight: Quantised, dtype: torch.dtype) -> Tensor:
        """x · weightᵀ, T × O."""

    def input_grad(self, grad: Quantised, weight: Quantised, dtype: torch.dtype) -> Tensor:
        """grad · weight, T × I."""

    def weight_grad(self, grad: Quantised, x: Quantised, dtype: torch.dtype) -> Tensor:
        """gradᵀ · x over all rows, O × I."""

    def add_weight_grad(self, grad: Quantised, x: Quantised, total_OI: Tensor) -> None:
        """total += gradᵀ · x, rounded once where `total` is fp32."""


class HeldWeight:
    """What layers in FP8 share: the weight is quantised once per update, in memory that
    never moves, so that captured graphs read what it holds now.
    """

    def __init__(self, quantises: QuantisesWeights, weight: nn.Parameter) -> None:
        self._quantises = quantises
        self.weight = weight
        with torch.no_grad():
            self.held = quantises.weight(weight)
        self.stale = True  # the weight has changed since
        self.times = 0  # that the weight has been quantised since

    def refresh(self) -> None:
        """Quantise the weight, if it has changed."""
        if self.stale:
            with torch.no_grad():
                self._quantises.update_weight(self.weight, self.held)
            self.stale = False
            self.times += 1
            self.refreshed()

    def refreshed(self) -> None:
        """The copies are new."""
