"""FP8 back end of grouped linear layers.

Rows are quantised for the output, and the output gradient for the input gradient, unless the kernel
that produced them has done so (`app.fp8.ready`) with equal bits. The weight gradient stays
a grouped GEMM of the unquantised rows, which are what backward saves: it sums over rows, whose
scales differ.

Shapes: T rows grouped by expert, E experts, I input width, O output width.
"""

from __future__ import annotations

from torch import Tensor, nn

from app.fp8.quantised import HeldWeight, Quantised
from app.fp8.ready import ReadyRows
from app.fp8.row_scaled import RowScaled
from app.model.layers.weight_grads import GroupedLinearGrad, WeightGrad


class Fp8GroupedLinear(HeldWeight):
    """FP8 grouped GEMMs of one layer (`GroupedLinearBackend`); `ready` may hold their rows."""

    differentiable = False
    input_grad_first = False

    def __init__(
        self, arithmetic: RowScaled, weight_EIO: nn.Parameter, ready: ReadyRows | None = None
    ) -> None:
        super().__init__(arithmetic, weight_EIO)
        self.arithmetic = arithmetic
        self.ready = ready or ReadyRows()

    def output(self, rows_TI: Tensor, weight_EIO: Tensor, ends_E: Tensor) -> Tensor:
        """See the protocol."""
        self.refresh()
        rows = self._quantised(rows_TI, ends_E)
        return self.arithmetic.output(rows, self.held, ends_E, dtype=weight_EIO.dtype)

    def input_grad(self, grad_TO: Tensor, weight_EIO: Tensor, ends_E: Tensor) -> Tensor:
        """See the protocol."""
        grad = self._quantised(grad_TO, ends_E)
        return self.arithmetic.input_grad(grad, self.held, ends_E, dtype=weight_EIO.dtype)

    def weight_grad(self, grad_TO: Tensor, rows_TI: Tensor, ends_E: Tensor) -> WeightGrad:
        """See the protocol."""
        return GroupedLinearGrad(rows_TI, grad_TO, ends_E)

    def _quantised(self, rows: Tensor, ends_E: Tensor) -> Quantised:
        found = self.ready.of(rows)
        return found if isinstance(found, Quantised) else self.arithmetic.rows(rows, ends_E)
