"""Gradients of weights that backward does not hand to autograd: what they are, and where they go.

A `WeightGrad` has the operands of a gradient and computes it when it is wanted; backward pushes it
to a `WeightGradSink`. `WeightGradQueue` lets it wait, so that a pipeline sends its input gradient
first (Qi et al. 2023). `MainGradSink` adds it at once to a sum of more bits than the weight has,
where the kernels allow it inside the product, so that no gradient of one microbatch is stored.

Shapes: T rows, I input width, O output width, E experts; rows of an expert end at its offset in
`ends_E`. J parts of the rows, W values of a weight.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from app.kernels.common import moves_tiles, usable
from app.kernels.grouped_gradient import Operands, add_grouped_gradient
from app.kernels.partial_sums import add_summed, summed
from app.model.clones import ReplicaWeight
from app.torch_versions import add_gemm


class WeightGrad(ABC):
    """The gradient of a weight in one microbatch, computed when it is wanted."""

    @abstractmethod
    def __call__(self) -> Tensor:
        """The gradient as a tensor of its own."""

    def add_to(self, total: Tensor) -> None:
        """total += the gradient; `total` may have more bits."""
        total.add_(self())

    def write_to(self, total: Tensor) -> None:
        """total = the gradient, whatever `total` held."""
        total.zero_()
        self.add_to(total)


@dataclass(frozen=True, slots=True)
class ComputedGrad(WeightGrad):
    """A gradient that is computed already."""

    value: Tensor

    def __call__(self) -> Tensor:
        """The gradient."""
        return self.value


@dataclass(frozen=True, slots=True)
class FetchedGrad(WeightGrad):
    """A gradient whose operands `make` has to fetch first, from other ranks or other memory."""

    make: Callable[[], WeightGrad]

    def __call__(self) -> Tensor:
        """Fetch the operands and compute."""
        return self.make()()

    def add_to(self, total: Tensor) -> None:
        """Fetch the operands and add the gradient to `total`."""
        self.make().add_to(total)

    def write_to(self, total: Tensor) -> None:
        """Fetch the operands and write the gradient to `total`."""
        self.make().write_to(total)


@dataclass(frozen=True, slots=True)
class PartialSums(WeightGrad):
    """What a kernel has summed over parts of the rows, fp32: one more kernel sums these."""

    partial_JW: Tensor
    dtype: torch.dtype  # of the weight

    def __call__(self) -> Tensor:
        """Their sum, rounded to the type of the weight."""
        return summed(self.partial_JW, self.dtype)

    def add_to(self, total: Tensor) -> None:
        """Sums of more bits are added to by the kernel that sums the parts, and rounded once."""
        add_summed(total, self.partial_JW)


@dataclass(frozen=True, slots=True)
class LinearGrad(WeightGrad):
    """A product of two matrices, left · right."""

    left: Tensor
    right: Tensor

    def __call__(self) -> Tensor:
        """left · right, in the type of the matrices."""
        return self.left @ self.right

    def add_to(self, total: Tensor) -> None:
        """On a GPU sums of more bits are added to inside the product, and rounded once."""
        add_gemm(total, self.left, self.right)


@dataclass(frozen=True, slots=True)
class GroupedLinearGrad(WeightGrad):
    """rows[e]ᵀ · grad[e] for every expert e."""

    rows_TI: Tensor
    grad_TO: Tensor
    ends_E: Tensor

    def __call__(self) -> Tensor:
        """[E, I, O] in the type of the rows."""
        return F.grouped_mm(self.rows_TI.T, self.grad_TO, offs=self.ends_E)

    def add_to(
        self, total: Tensor, later: GroupedLinearGrad | None = None, writes: bool = False
    ) -> None:
        """Where Triton and a GPU like Hopper are, sums of more bits are added to inside the
        product, and rounded once, with that of a `later` microbatch. `writes`: as `write_to`.
        """
        wide = total.dtype.itemsize > self.rows_TI.dtype.itemsize
        if wide and usable(total) and moves_tiles(total.device):
            second = None if later is None else later.operands
            add_grouped_gradient(total, *self.operands, adds=not writes, later=second, fills=writes)
            return
        if writes:
            total.copy_(self())
        else:
            total.add_(self())
        if later is not None:
            later.add_to(total)

    def write_to(self, total: Tensor, later: GroupedLinearGrad | None = None) -> None:
        """There, `total` is not read, and zero for experts without rows."""
        self.add_to(total, later, writes=True)

    def with_own_ends(self) -> GroupedLinearGrad:
        """Return the same gradient with a copy of the ends, which others may overwrite."""
        return replace(self, ends_E=self.ends_E.clone())

    @property
    def operands(self) -> Operands:
        """As the kernel takes them."""
        return Operands(self.rows_TI, self.grad_TO, self.ends_E)


@dataclass(frozen=True, slots=True)
class PairedGrad(WeightGrad):
    """The gradient of one grouped weight in two microbatches."""

    earlier: GroupedLinearGrad
    later: GroupedLinearGrad

    def __call__(self) -> Tensor:
        """The sum of both."""
        return self.earlier() + self.later()

    def add_to(self, total: Tensor) -> None:
        """Where a product adds to sums by itself, they are read and written once for both."""
        self.earlier.add_to(total, self.later)

    def write_to(self, total: Tensor) -> None:
        """Or written once."""
        self.earlier.write_to(total, self.later)


@dataclass(frozen=True, slots=True)
class ReplicaGrad:
    """rows[e]ᵀ · grad[e] for every expert e from `first` on, which other ranks have replicas."""

    rows_TI: Tensor
    grad_TO: Tensor
    ends_E: Tensor
    first: int

    def write_to(self, out_GIO: Tensor) -> None:
        """Into fp32 memory, rounded once; undefined for experts without rows."""
        if usable(out_GIO):
            add_grouped_gradient(
                out_GIO,
                self.rows_TI,
                self.grad_TO,
                ends_E=self.ends_E,
                first=self.first,
                adds=False,
            )
            return
        begin = first_row(self.ends_E, self.first)
        ends_G = self.ends_E[self.first :] - begin
        rows_TI, grad_TO = (each[begin:].float() for each in (self.rows_TI, self.grad_TO))
        out_GIO.copy_(F.grouped_mm(rows_TI.T, grad_TO, offs=ends_G))


@dataclass(frozen=True, slots=True)
class GradWithReplicas(WeightGrad):
    """The gradient of this rank's experts, some of whose rows other ranks have."""

    own: WeightGrad
    replicas: ReplicaGrad
    weight: ReplicaWeight

    def __call__(self) -> Tensor:
        """Compute both, exchange what is replicas."""
        total = self.own()
        self._return_replicas(total)
        return total

    def add_to(self, total: Tensor) -> None:
        """Add this rank's part, then what comes home."""
        self.own.add_to(total)
        self._return_replicas(total)

    def write_to(self, total: Tensor) -> None:
        """Write this rank's part, then add what comes home."""
        self.own.write_to(total)
        self._return_replicas(total)

    def _return_replicas(self, total: Tensor) -> None:
        self.replicas.write_to(self.weight.grads())
        self.weight.return_grads(total)


def first_row(ends_E: Tensor, expert: int) -> int:
    """Where the rows of an expert begin; waits for the device."""
    return int(ends_E[expert - 1]) if expert else 0


AddGrad = Callable[[nn.Parameter, WeightGrad], None]  # adds to the gradient sum of a parameter


class WeightGradSink(Protocol):
    """Where backward leaves gradients of weights."""

    @property
    def deferred(self) -> bool:
        """Whether they are computed later than the gradients of inputs."""

    @property
    def at_once(self) -> MainGradSink | None:
        """What takes gradients that are there with those of inputs, and for which nothing is to be
        kept; None: autograd does.
        """

    def push(self, weight: nn.Parameter, gradient: WeightGrad) -> None:
        """Take a weight's gradient in one microbatch."""


@dataclass(frozen=True, slots=True)
class MainGradSink:
    """Adds gradients of weights to their sums during backward, as soon as each is known."""

    push: AddGrad
    deferred: ClassVar[bool] = False

    @property
    def at_once(self) -> MainGradSink:
        """Itself."""
        return self


@dataclass(slots=True)
class WeightGradQueue:
    """Weight gradients of one microbatch in one chunk, left over by the backward of its inputs."""

    at_once: MainGradSink | None = None  # where those go that do not wait
    waiting: list[tuple[nn.Parameter, WeightGrad]] = field(default_factory=list)
    deferred: ClassVar[bool] = True

    def push(self, weight: nn.Parameter, gradient: WeightGrad) -> None:
        """Keep the gradient until `run`."""
        self.waiting.append((weight, gradient))

    @torch.no_grad()
    def run(self, add: AddGrad) -> None:
        """Compute all that wait, in the order of backward, and free what they need."""
        while self.waiting:
            weight, gradient = self.waiting.pop(0)
            add(weight, gradient)


def take_partial(
    weight: nn.Parameter, sink: WeightGradSink | None
) -> Callable[[Tensor], None] | None:
    """What has partial sums J × W of the weight's gradient added to its sum; None: autograd does.

    They never wait: the kernel that makes the input's gradient makes them beside it, and together
    they are much larger than their sum.
    """
    main = None if sink is None else sink.at_once
    if main is None:
        return None
    return lambda partial_JW: main.push(weight, PartialSums(partial_JW, weight.dtype))
