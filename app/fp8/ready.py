"""Cache of GEMM operands that the kernel which produced them has already quantised to FP8.

Shapes: R rows of experts, F hidden width of an expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from app.fp8.quantised import Operand, Quantised
from app.kernels.common import usable
from app.kernels.fp8.swiglu import InBoth, swiglu_rows, swiglu_rows_gradient
from app.model.layers.layers import expert_swiglu


@dataclass(slots=True)
class ReadyRows:
    """Cache of one prequantized operand of a rank: the FP8 copy of rows for the grouped GEMM that
    runs next, in a forward through a layer of experts or its backward; matched by address.
    """

    rows: Tensor | None = None
    fp8_rows: Quantised | None = None

    def put(self, made: InBoth) -> Tensor:
        """Store what a kernel made until the GEMM asks for it; return the unquantised rows."""
        self.rows, data, factors = made
        self.fp8_rows = Quantised(data, factors, None, None, lead=self.rows.shape[:-1])
        return self.rows

    def of(self, rows: Tensor) -> Operand:
        """Return the operand for these rows: the FP8 copy if it is of them, otherwise the rows."""
        there, fp8_rows = self.rows, self.fp8_rows
        if there is None or fp8_rows is None:
            return rows
        if there.data_ptr() != rows.data_ptr() or there.shape != rows.shape:
            return rows
        self.rows = self.fp8_rows = None
        return fp8_rows

    def swiglu(self, both_R2F: Tensor, used: Tensor) -> Tensor:
        """Activation of experts (`app.moe.experts.Activation`) that also leaves its result here,
        except when only backward will read it.
        """
        if usable(both_R2F) and torch.is_grad_enabled():
            return swiglu_fp8(both_R2F, used, self)
        return expert_swiglu(both_R2F, used)


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, both_R2F: Tensor, used: Tensor, ready: ReadyRows) -> Tensor:
        ctx.save_for_backward(both_R2F, used)
        ctx.ready = ready
        return ready.put(swiglu_rows(both_R2F, used))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RF: Tensor) -> tuple[Tensor, None, None]:
        return ctx.ready.put(swiglu_rows_gradient(grad_RF, *ctx.saved_tensors)), None, None


def swiglu_fp8(both_R2F: Tensor, used: Tensor, ready: ReadyRows) -> Tensor:
    """Return silu(gate) · up of the two halves, R × F; the result, and in backward the gradient of
    `both_R2F`, are left in `ready` as FP8 too.
    """
    act_RF: Tensor = _Swiglu.apply(both_R2F.contiguous(), used, ready)
    return act_RF
