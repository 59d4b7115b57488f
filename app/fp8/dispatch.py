"""Dispatchers whose kernels write the experts' rows in FP8 too.

In forward a dispatcher's kernel makes the rows that the first GEMM reads, in backward the gradients
that the last one reads. Both also leave them quantised in `ReadyRows`, so that the GEMM need not
quantise them. Without Triton nothing is left there, and the GEMM does it, with equal bits.

Shapes: T tokens of this rank, N of all ranks, K experts per token, D hidden, R rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from app.fp8.ready import ReadyRows
from app.kernels import rows as kernels
from app.kernels.common import usable
from app.kernels.quantise import empty_fp8_rows
from app.moe.dispatch.local import LocalDispatcher
from app.moe.dispatch.peer import PeerTransport
from app.moe.dispatch.transport import CollectiveTransport
from app.moe.experts import Dispatched
from app.moe.permute import Permutation, combine_gradients, sum_rows


class Fp8LocalDispatcher(LocalDispatcher):
    """Local dispatcher for experts in FP8."""

    def __init__(self, num_experts: int, ready: ReadyRows) -> None:
        super().__init__(num_experts)
        self.ready = ready

    def dispatch(self, x_TD: Tensor, prepared: Permutation) -> tuple[Dispatched, Permutation]:
        """Map T × D -> R × D, expert-major."""
        if not _quantises(x_TD, prepared):
            return super().dispatch(x_TD, prepared)
        rows_RD: Tensor = _Permute.apply(
            x_TD, prepared.token_of_row_R, prepared.row_of_TK, self.ready
        )
        return Dispatched(rows_RD, prepared.ends_E), prepared

    def combine(self, expert_out_RD: Tensor, probs_TK: Tensor, origin: Permutation) -> Tensor:
        """Map R × D -> T × D."""
        if not _quantises(expert_out_RD, origin):
            return super().combine(expert_out_RD, probs_TK, origin)
        out_TD: Tensor = _Combine.apply(expert_out_RD, probs_TK, origin.row_of_TK, self.ready)
        return out_TD


def _quantises(rows: Tensor, permutation: Permutation) -> bool:
    """Return whether kernels write the rows, and every row is a token's."""
    return not permutation.drops and usable(rows)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, token_of_row_R: Tensor, row_of_TK: Tensor, ready: ReadyRows
    ) -> Tensor:
        ctx.save_for_backward(row_of_TK)
        rows = len(token_of_row_R)
        fp8_rows = empty_fp8_rows((rows, x_TD.shape[1]), x_TD.device)
        rows_RD = kernels.spread_rows(x_TD, row_of_TK, rows, fp8_rows=fp8_rows)
        return ready.put((rows_RD, *fp8_rows))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor | None, ...]:
        (row_of_TK,) = ctx.saved_tensors
        grad_TD = sum_rows(grad_RD, row_of_TK, None, drops=False, dtype=grad_RD.dtype)
        return grad_TD, None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows_RD: Tensor, probs_TK: Tensor, row_of_TK: Tensor, ready: ReadyRows
    ) -> Tensor:
        ctx.ready = ready
        ctx.save_for_backward(rows_RD, probs_TK, row_of_TK)
        return sum_rows(rows_RD, row_of_TK, probs_TK, drops=False, dtype=rows_RD.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        rows_RD, probs_TK, row_of_TK = ctx.saved_tensors
        fp8_rows = empty_fp8_rows(rows_RD.shape, grad_TD.device)
        grad_RD, dots_TK = combine_gradients(
            grad_TD, rows_RD, probs_TK, row_of_TK, drops=False, fp8_rows=fp8_rows
        )
        return ctx.ready.put((grad_RD, *fp8_rows)), dots_TK, None, None


class Fp8Transport:
    """Transport of a static dispatcher for experts in FP8, around another (`TokenTransport`)."""

    def __init__(self, inner: CollectiveTransport | PeerTransport, ready: ReadyRows) -> None:
        self.inner = inner
        self.ready = ready

    def gather_choices(self, experts_TK: Tensor) -> Tensor:
        """See the protocol."""
        return self.inner.gather_choices(experts_TK)

    def spread(self, x_TD: Tensor, row_of_NK: Tensor, num_rows: int) -> Tensor:
        """See the protocol."""
        if not usable(x_TD):
            return self.inner.spread(x_TD, row_of_NK, num_rows)
        fp8_rows = empty_fp8_rows((num_rows, x_TD.shape[1]), x_TD.device)
        rows_RD = self.inner.spread(x_TD, row_of_NK, num_rows, fp8_rows=fp8_rows)
        return self.ready.put((rows_RD, *fp8_rows))

    def combine(
        self, rows_RD: Tensor, probs_TK: Tensor | None, row_of_NK: Tensor, experts_TK: Tensor
    ) -> Tensor:
        """See the protocol."""
        return self.inner.combine(rows_RD, probs_TK, row_of_NK, experts_TK)

    def spread_gradients(
        self,
        grad_TD: Tensor,
        rows_RD: Tensor,
        probs_TK: Tensor,
        row_of_NK: Tensor,
        experts_TK: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """See the protocol."""
        given = grad_TD, rows_RD, probs_TK, row_of_NK, experts_TK
        if not usable(rows_RD):
            return self.inner.spread_gradients(*given)
        fp8_rows = empty_fp8_rows(rows_RD.shape, grad_TD.device)
        grad_RD, dots_TK = self.inner.spread_gradients(*given, fp8_rows=fp8_rows)
        return self.ready.put((grad_RD, *fp8_rows)), dots_TK


class Fp8PeerTransport(Fp8Transport):
    """The same around a transport by peer memory (`SizedTransport`)."""

    def __init__(self, inner: PeerTransport, ready: ReadyRows) -> None:
        super().__init__(inner, ready)
        self.tokens = inner.tokens
