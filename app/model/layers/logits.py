"""Padding of rows, a scale and a softcap between the head's GEMM and the loss.

Shapes: C tokens, V rows of this rank of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from app.config import ModelConfig
from app.model.layers.layer_groups import OptionalGroup
from app.model.layers.linear import LinearBackend
from app.model.layers.loss import PLAIN, ROWS, PlainLogits, into_gradient
from app.model.layers.weight_grads import WeightGrad, WeightGradSink
from app.plan.model.vocabulary import logits_stride


@dataclass(frozen=True, slots=True)
class MappedLogits(PlainLogits):
    """Logits times a scale, then capped."""

    scale: float
    softcap: float | None

    def of(self, logits: Tensor) -> Tensor:
        """See `PlainLogits`."""
        scaled = logits if self.scale == 1 else logits * self.scale
        return scaled if self.softcap is None else (scaled / self.softcap).tanh() * self.softcap

    def backend(self, of_head: LinearBackend) -> LinearBackend:
        """See `PlainLogits`."""
        return _MappedBackend(of_head, self)

    def in_place(self, logits: Tensor) -> Tensor:
        """Return `of` in the memory of the head's output."""
        if self.scale != 1:
            logits.mul_(self.scale)
        return (
            logits if self.softcap is None else logits.div_(self.softcap).tanh_().mul_(self.softcap)
        )

    def into_gradient(
        self, logits_CV: Tensor, row_C: Tensor, lse_C: Tensor, weight_C: Tensor
    ) -> None:
        """See `PlainLogits`; fp32 copies exist of ROWS tokens at a time."""
        parts = (part.split(ROWS) for part in (logits_CV, row_C, lse_C, weight_C))
        for logits, row, lse, weight in zip(*parts, strict=True):
            slope = self._slope(logits)
            into_gradient(logits, row, lse, weight)
            logits.mul_(slope)

    def _slope(self, logits: Tensor) -> Tensor | float:
        """Return the derivative of the model's logits by those of the GEMM."""
        if self.softcap is None:
            return self.scale
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return (1 - (wide / self.softcap).square_()).mul_(self.scale)


@dataclass(frozen=True, slots=True)
class _MappedBackend:
    """Back end of the head whose output is mapped (`LinearBackend`); gradients are those of its
    GEMM.
    """

    inner: LinearBackend
    logits: MappedLogits

    def linear(
        self,
        x_BsI: Tensor,
        weight_OI: nn.Parameter,
        group: OptionalGroup,
        sink: WeightGradSink | None,
    ) -> Tensor:
        """See the protocol."""
        return self.logits.of(self.inner.linear(x_BsI, weight_OI, group, sink))

    def output(self, x: Tensor, weight_OI: Tensor) -> Tensor:
        """See the protocol."""
        return self.logits.in_place(self.inner.output(x, weight_OI))

    def gradients(
        self, grad: Tensor, x: Tensor, weight_OI: Tensor, out: Tensor | None = None
    ) -> tuple[Tensor, WeightGrad]:
        """See the protocol."""
        return self.inner.gradients(grad, x, weight_OI, out)


@dataclass(frozen=True, slots=True)
class PaddedLogits(PlainLogits):
    """Logits in rows that are longer than the vocabulary, mapped by `inner`."""

    inner: PlainLogits

    def of(self, logits: Tensor) -> Tensor:
        """See `PlainLogits`."""
        return self.inner.of(logits)

    def backend(self, of_head: LinearBackend) -> LinearBackend:
        """See `PlainLogits`."""
        return self.inner.backend(_PaddedBackend(of_head))

    def into_gradient(
        self, logits_CV: Tensor, row_C: Tensor, lse_C: Tensor, weight_C: Tensor
    ) -> None:
        """See `PlainLogits`."""
        self.inner.into_gradient(logits_CV, row_C, lse_C, weight_C)


@dataclass(frozen=True, slots=True)
class _PaddedBackend:
    """Back end of a head in 16 or 32 bits whose output is a view of padded rows (`LinearBackend`).

    GEMMs take such a view, as output and as operand of backward, without a copy.
    """

    inner: LinearBackend

    def linear(
        self,
        x_BsI: Tensor,
        weight_OI: nn.Parameter,
        group: OptionalGroup,
        sink: WeightGradSink | None,
    ) -> Tensor:
        """See the protocol; rows are not padded."""
        return self.inner.linear(x_BsI, weight_OI, group, sink)

    def output(self, x: Tensor, weight_OI: Tensor) -> Tensor:
        """See the protocol; `x` is T × I, and nothing is differentiated."""
        width = len(weight_OI)
        out_TO = x.new_empty(len(x), logits_stride(width))[:, :width]
        return torch.mm(x, weight_OI.T, out=out_TO)

    def gradients(
        self, grad: Tensor, x: Tensor, weight_OI: Tensor, out: Tensor | None = None
    ) -> tuple[Tensor, WeightGrad]:
        """See the protocol."""
        return self.inner.gradients(grad, x, weight_OI, out)


def logits_of(model: ModelConfig, rows: int) -> PlainLogits:
    """Return what is done with the logits of a model whose head has `rows` rows on this rank."""
    mapped = PLAIN
    if model.logit_scale is not None or model.logit_softcap is not None:
        scale = 1.0 if model.logit_scale is None else model.logit_scale
        mapped = MappedLogits(scale, model.logit_softcap)
    return mapped if logits_stride(rows) == rows else PaddedLogits(mapped)
