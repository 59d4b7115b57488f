"""Padding of rows, a scale and a softcap between the head's GEMM and the loss.

Shapes: C tokens, V rows of this rank of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from app.config import ModelConfig
from app.model.layers.layer_groups import OptionalGroup
from app.model.layers.linear import LinearBackend
from app.model.layers.loss import PLAIN, ROWS, PlainLogits, into_gradient
from app.model.layers.weight_grads import ComputedGrad, WeightGrad, WeightGradSink
from app.plan.model.vocabulary import ROW, logits_stride
from app.torch_versions import add_gemm, wide_gemm


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

    GEMMs are fast if sizes and strides are multiples of 16 bytes. So each is one of the blocks of
    ROW rows of the weight, and one of the rows that remain, padded with zeros.
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
        blocks, rest = _blocks(weight_OI), _rest(weight_OI)
        out_TO = x.new_empty(len(x), len(blocks) + ROW)
        torch.mm(x, blocks.T, out=out_TO[:, : len(blocks)])
        torch.mm(x, rest.T, out=out_TO[:, len(blocks) :])
        return out_TO[:, : len(weight_OI)]

    def gradients(
        self, grad: Tensor, x: Tensor, weight_OI: Tensor, out: Tensor | None = None
    ) -> tuple[Tensor, WeightGrad]:
        """See the protocol; `grad` is T × O, a view of padded rows."""
        left_OT, right_OT = _blocks(grad.T), _rest(grad.T)
        # the larger sum is added to the smaller one, which so loses least to rounding
        out = torch.mm(right_OT.T, _rest(weight_OI), out=out).addmm_(left_OT.T, _blocks(weight_OI))
        if not weight_OI.requires_grad:
            return out, ComputedGrad(grad.new_zeros(()))
        return out, _PaddedGrad(left_OT, right_OT, x, rows=len(weight_OI))


@dataclass(frozen=True, slots=True)
class _PaddedGrad(WeightGrad):
    """Gradient of a head's weight from those of its blocks of outputs and of the padded rest."""

    left_OT: Tensor
    right_OT: Tensor
    x_TI: Tensor
    rows: int

    def __call__(self) -> Tensor:
        """Return O × I in the dtype of the operands."""
        total_OI = self.x_TI.new_empty(self.rows, self.x_TI.shape[1])
        torch.mm(self.left_OT, self.x_TI, out=_blocks(total_OI))
        total_OI[len(self.left_OT) :] = self._trimmed(self.right_OT @ self.x_TI)
        return total_OI

    def add_to(self, total: Tensor) -> None:
        """Add to `total`, as `LinearGrad`."""
        add_gemm(_blocks(total), self.left_OT, self.x_TI)
        made_RI = wide_gemm(self.right_OT, self.x_TI, total.dtype)
        total[len(self.left_OT) :].add_(self._trimmed(made_RI))

    def _trimmed(self, made_RI: Tensor) -> Tensor:
        """Return the rows of the GEMM that are no padding."""
        return made_RI[: self.rows - len(self.left_OT)]


def _blocks(matrix: Tensor) -> Tensor:
    """Return a view of all whole blocks of ROW rows."""
    return matrix[: len(matrix) // ROW * ROW]


def _rest(matrix: Tensor) -> Tensor:
    """Return a copy of the rows behind the last block, padded to ROW with zeros."""
    rows = matrix[len(matrix) // ROW * ROW :]
    return F.pad(rows, (0, 0, 0, ROW - len(rows)))


def logits_of(model: ModelConfig, rows: int) -> PlainLogits:
    """Return what is done with the logits of a model whose head has `rows` rows on this rank."""
    mapped = PLAIN
    if model.logit_scale is not None or model.logit_softcap is not None:
        scale = 1.0 if model.logit_scale is None else model.logit_scale
        mapped = MappedLogits(scale, model.logit_softcap)
    return mapped if logits_stride(rows) == rows else PaddedLogits(mapped)
