"""Weight gradients that bypass autograd: their operands, and the sinks that take them.

A `WeightGrad` holds the operands of a gradient and computes it on demand; backward pushes it to a
`WeightGradSink`. `WeightGradQueue` defers it, so that a pipeline stage sends its input gradient
first (zero bubble, Qi et al. 2023). `MainGradSink` adds it at once to a main gradient of higher
precision, inside the GEMM where the kernel allows, so that no microbatch's gradient is stored.

Shapes: T rows, I input width, O output width, E experts; rows of an expert end at its offset in
`ends_E`, the cumulative `offs` of `grouped_mm`. J partial sums over rows, W elements of a weight.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from app.kernels.common import moves_tiles, usable
from app.kernels.grouped_gradient import add_grouped_gradient
from app.kernels.partial_sums import add_summed, summed
from app.torch_versions import add_gemm


class WeightGrad(ABC):
    """Gradient of a weight in one microbatch, computed on demand."""

    @abstractmethod
    def __call__(self) -> Tensor:
        """Return the gradient as a new tensor."""

    def add_to(self, total: Tensor) -> None:
        """Add the gradient to `total`, which may have a wider dtype."""
        total.add_(self())

    def write_to(self, total: Tensor) -> None:
        """Overwrite `total` with the gradient."""
        total.zero_()
        self.add_to(total)


@dataclass(frozen=True, slots=True)
class ComputedGrad(WeightGrad):
    """Gradient that is already computed."""

    value: Tensor

    def __call__(self) -> Tensor:
        """Return the gradient."""
        return self.value


@dataclass(frozen=True, slots=True)
class FetchedGrad(WeightGrad):
    """Gradient whose operands `make` first fetches from other ranks or from other memory."""

    make: Callable[[], WeightGrad]

    def __call__(self) -> Tensor:
        """Fetch the operands and compute the gradient."""
        return self.make()()

    def add_to(self, total: Tensor) -> None:
        """Fetch the operands and add the gradient to `total`."""
        self.make().add_to(total)

    def write_to(self, total: Tensor) -> None:
        """Fetch the operands and write the gradient to `total`."""
        self.make().write_to(total)


@dataclass(frozen=True, slots=True)
class PartialSums(WeightGrad):
    """Partial sums of a gradient over blocks of rows, fp32, from a kernel; another kernel adds
    them.
    """

    partial_JW: Tensor
    dtype: torch.dtype  # dtype of the weight

    def __call__(self) -> Tensor:
        """Return their sum in the dtype of the weight."""
        return summed(self.partial_JW, self.dtype)

    def add_to(self, total: Tensor) -> None:
        """Add them to `total`; the summing kernel adds to a wider `total` directly and rounds
        once.
        """
        add_summed(total, self.partial_JW)


@dataclass(frozen=True, slots=True)
class LinearGrad(WeightGrad):
    """Gradient left · right of a linear layer's weight."""

    left: Tensor
    right: Tensor

    def __call__(self) -> Tensor:
        """Return left · right in the dtype of the operands."""
        return self.left @ self.right

    def add_to(self, total: Tensor) -> None:
        """Add left · right to `total`; on a GPU the GEMM accumulates into a wider `total` and
        rounds once.
        """
        add_gemm(total, self.left, self.right)


@dataclass(frozen=True, slots=True)
class GroupedLinearGrad(WeightGrad):
    """Gradient rows[e]ᵀ · grad[e] of every expert e."""

    rows_TI: Tensor
    grad_TO: Tensor
    ends_E: Tensor

    def __call__(self) -> Tensor:
        """Return E × I × O in the dtype of the rows."""
        return F.grouped_mm(self.rows_TI.T, self.grad_TO, offs=self.ends_E)

    def add_to(self, total: Tensor) -> None:
        """Add to `total`; with Triton on Hopper and newer GPUs the grouped GEMM accumulates into a
        wider `total` and rounds once.
        """
        if self._accumulates(total):
            add_grouped_gradient(total, self.rows_TI, self.grad_TO, ends_E=self.ends_E)
        else:
            total.add_(self())

    def write_to(self, total: Tensor) -> None:
        """Overwrite `total` without reading it; experts without rows get zeros."""
        if self._accumulates(total):
            add_grouped_gradient(
                total, self.rows_TI, self.grad_TO, ends_E=self.ends_E, adds=False, fills=True
            )
        else:
            total.copy_(self())

    def _accumulates(self, total: Tensor) -> bool:
        wide = total.dtype.itemsize > self.rows_TI.dtype.itemsize
        return wide and usable(total) and moves_tiles(total.device)


AddGrad = Callable[[nn.Parameter, WeightGrad], None]  # adds to a parameter's main gradient


class WeightGradSink(Protocol):
    """Receiver of weight gradients in backward."""

    @property
    def deferred(self) -> bool:
        """True if weight gradients are computed later than input gradients."""

    @property
    def at_once(self) -> MainGradSink | None:
        """Return the sink for gradients that a kernel computes together with the input gradient, so
        that deferring them would save nothing; None leaves them to autograd.
        """

    def push(self, weight: nn.Parameter, gradient: WeightGrad) -> None:
        """Take the gradient of a weight in one microbatch."""


@dataclass(frozen=True, slots=True)
class MainGradSink:
    """Sink that adds each weight gradient to its main gradient as soon as backward reaches it."""

    push: AddGrad
    deferred: ClassVar[bool] = False

    @property
    def at_once(self) -> MainGradSink:
        """Return this sink."""
        return self


@dataclass(slots=True)
class WeightGradQueue:
    """Weight gradients of one microbatch in one chunk, deferred until its input gradient is
    sent.
    """

    at_once: MainGradSink | None = None  # takes the gradients that are not deferred
    waiting: list[tuple[nn.Parameter, WeightGrad]] = field(default_factory=list)
    deferred: ClassVar[bool] = True

    def push(self, weight: nn.Parameter, gradient: WeightGrad) -> None:
        """Keep the gradient until `run`."""
        self.waiting.append((weight, gradient))

    @torch.no_grad()
    def run(self, add: AddGrad) -> None:
        """Compute all deferred gradients in the order of backward, and free their operands."""
        while self.waiting:
            weight, gradient = self.waiting.pop(0)
            add(weight, gradient)


def take_partial(
    weight: nn.Parameter, sink: WeightGradSink | None
) -> Callable[[Tensor], None] | None:
    """Return the function that adds partial sums J × W to the weight's main gradient; None if
    autograd takes the gradient.

    Partial sums are never deferred: the kernel computes them beside the input gradient, and keeping
    them would take J times the memory of their sum.
    """
    main = None if sink is None else sink.at_once
    if main is None:
        return None
    return lambda partial_JW: main.push(weight, PartialSums(partial_JW, weight.dtype))
