"""GEMMs of replicas of remote experts, beside those of this rank's own experts.

Shapes: T rows, I input width, O output width, E experts with rows here: the L of this rank, then G
replicas; rows of an expert end at its offset in `ends_E`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from app.kernels.common import usable
from app.kernels.grouped_gemm import grouped_gemm
from app.kernels.grouped_gradient import add_grouped_gradient
from app.model.layers.linear import GroupedLinearBackend
from app.model.layers.weight_grads import WeightGrad


class ReplicaWeight(Protocol):
    """Weights I × O of s replicas of remote experts; their rows follow those of this rank's L
    experts.

    The methods communicate within the expert group: all its ranks call the same ones in the same
    order. None synchronizes with the device.
    """

    def fetch(self) -> Tensor:
        """Return the replicas' matrices, s × I × O, and send this rank's to the ranks that
        replicate them.

        Valid until a layer's next call for any kind of matrix that has been fetched before.
        """

    def grads(self) -> Tensor:
        """Return the buffer for the replicas' gradients: fp32, s × I × O."""

    def return_grads(self, total_LIO: Tensor) -> None:
        """Send the gradients to the experts' owner ranks and add those that arrive to
        `total_LIO`.
        """


@dataclass(frozen=True, slots=True)
class GemmsWithReplicas:
    """GEMMs of this rank's experts by `own`, then those of the replicas it hosts
    (`GroupedLinearBackend`).

    Replica weights are fetched before the local GEMM. Otherwise receivers would wait for the GEMM
    of the owner rank, which is overloaded.
    """

    own: GroupedLinearBackend
    replicas: ReplicaWeight
    experts: int  # L
    differentiable: bool = False
    # between fetching replicas and returning gradients, ranks have equal work
    input_grad_first: bool = True

    def output(self, rows_TI: Tensor, weight_EIO: Tensor, ends_E: Tensor) -> Tensor:
        """See the protocol."""
        gemm = partial(self.own.output, rows_TI)
        return self._both(gemm, rows_TI, weight_EIO, ends_E=ends_E)

    def input_grad(self, grad_TO: Tensor, weight_EIO: Tensor, ends_E: Tensor) -> Tensor:
        """See the protocol."""
        gemm = partial(self.own.input_grad, grad_TO)
        return self._both(gemm, grad_TO, weight_EIO, ends_E=ends_E, transposed=True)

    def weight_grad(self, grad_TO: Tensor, rows_TI: Tensor, ends_E: Tensor) -> WeightGrad:
        """See the protocol."""
        own = self.own.weight_grad(grad_TO, rows_TI, ends_E[: self.experts])
        hosted = ReplicaGrad(rows_TI, grad_TO, ends_E, first=self.experts)
        return GradWithReplicas(own, hosted, self.replicas)

    def _both(
        self,
        gemm: Callable[[Tensor, Tensor], Tensor],
        rows: Tensor,
        weight_EIO: Tensor,
        *,
        ends_E: Tensor,
        transposed: bool = False,
    ) -> Tensor:
        replica_GIO = self.replicas.fetch()
        out = gemm(weight_EIO, ends_E[: self.experts])
        add_groups(out, rows, replica_GIO, ends_E=ends_E, transposed=transposed)
        return out


@dataclass(frozen=True, slots=True)
class ReplicaGrad:
    """Gradients rows[e]ᵀ · grad[e] of the replicas on this rank: every expert e from `first` on."""

    rows_TI: Tensor
    grad_TO: Tensor
    ends_E: Tensor
    first: int

    def write_to(self, out_GIO: Tensor) -> None:
        """Write them in fp32, rounded once; undefined for experts without rows."""
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
    """Gradient of this rank's experts, including the rows that replicas on other ranks computed."""

    own: WeightGrad
    replicas: ReplicaGrad
    weight: ReplicaWeight

    def __call__(self) -> Tensor:
        """Compute the gradient of own rows, send back those of hosted replicas and add what
        arrives.
        """
        total = self.own()
        self._return_replicas(total)
        return total

    def add_to(self, total: Tensor) -> None:
        """Add the gradient of own rows, then those that arrive from replicas."""
        self.own.add_to(total)
        self._return_replicas(total)

    def write_to(self, total: Tensor) -> None:
        """Write the gradient of own rows, then add those that arrive from replicas."""
        self.own.write_to(total)
        self._return_replicas(total)

    def _return_replicas(self, total: Tensor) -> None:
        self.replicas.write_to(self.weight.grads())
        self.weight.return_grads(total)


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


def first_row(ends_E: Tensor, expert: int) -> int:
    """Return the index of an expert's first row; synchronizes with the device."""
    return int(ends_E[expert - 1]) if expert else 0
