"""FP8 recipes in plain torch: entries are rounded to torch's float8 dtypes and multiplied in fp32.

Runs on any device, for tests, for numerics without a Hopper GPU, and as the reference for
Transformer Engine's kernels: scales and entries agree bit for bit.

Recipes follow Transformer Engine. `current`: one scale per matrix, FP8's maximum over the matrix's
amax; inputs and weights are E4M3, gradients E5M2, which has fewer digits and more range
(Micikevicius et al. 2022). `delayed`: the same with the amax of earlier steps
(`app.fp8.delayed`); larger entries are clipped to FP8's maximum. `block`: one scale per 128
values along the dimension that a GEMM sums over, for weights per 128 × 128; scales are powers of
two, all matrices E4M3 (DeepSeek-V3).

Shapes: T rows, I input width, O output width, R × C any of these, K the dimension that is summed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor

from app.fp8.delayed import GRAD, INPUT, WEIGHT, LinearScales
from app.fp8.quantised import Quantised

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# maxima of a layer's input, weight and output gradient in the recipe `delayed`
LARGEST = tuple(torch.finfo(dtype).max for dtype in (E4M3, E4M3, E5M2))
BLOCK = 128  # values that share a scale


def scale_for(largest: Tensor, dtype: torch.dtype, power_of_two: bool = False) -> Tensor:
    """Return the factor that maps the largest magnitude to the dtype's maximum.

    1 if that is 0 or not finite; otherwise at most fp32's maximum.
    """
    wide = largest.float()
    scale = torch.finfo(dtype).max / wide
    scale = scale.clamp(max=torch.finfo(scale.dtype).max)
    if power_of_two:
        mantissa, exponent = torch.frexp(scale)
        scale = torch.ldexp(torch.full_like(mantissa, 0.5), exponent)
    return torch.where((wide > 0) & wide.isfinite(), scale, 1.0)


def rounded(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x · scale in FP8, clipped to the dtype's maximum."""
    largest = torch.finfo(dtype).max
    return (x.float() * scale).clamp(-largest, largest).to(dtype)


class Reference(ABC):
    """GEMMs of dequantised matrices; subclasses quantise by one recipe."""

    @abstractmethod
    def input(self, x_TI: Tensor) -> Quantised:
        """See the protocol."""

    @abstractmethod
    def weight(self, weight_OI: Tensor) -> Quantised:
        """See the protocol."""

    @abstractmethod
    def grad(self, grad_TO: Tensor) -> Quantised:
        """See the protocol."""

    @abstractmethod
    def rows(self, matrix: Quantised) -> Tensor:
        """Dequantise an input or gradient for GEMMs that sum over columns: R × C, fp32."""

    @abstractmethod
    def columns(self, matrix: Quantised) -> Tensor:
        """Dequantise it for GEMMs that sum over rows: R × C, fp32."""

    @abstractmethod
    def weights(self, matrix: Quantised) -> Tensor:
        """Dequantise a weight: O × I, fp32."""

    def update_weight(self, weight_OI: Tensor, held: Quantised) -> None:
        """See the protocol."""
        for old, new in zip(held.tensors(), self.weight(weight_OI).tensors(), strict=True):
            if old is not None and new is not None:
                old.copy_(new)

    def output(self, x: Quantised, weight: Quantised, dtype: torch.dtype) -> Tensor:
        """See the protocol."""
        return (self.rows(x) @ self.weights(weight).T).to(dtype)

    def input_grad(self, grad: Quantised, weight: Quantised, dtype: torch.dtype) -> Tensor:
        """See the protocol."""
        return (self.rows(grad) @ self.weights(weight)).to(dtype)

    def weight_grad(self, grad: Quantised, x: Quantised, dtype: torch.dtype) -> Tensor:
        """See the protocol."""
        return (self.columns(grad).T @ self.columns(x)).to(dtype)

    def add_weight_grad(self, grad: Quantised, x: Quantised, total_OI: Tensor) -> None:
        """See the protocol."""
        total_OI.add_(self.weight_grad(grad, x, total_OI.dtype))


class TensorScaled(Reference):
    """Recipes `current` and, with `scales` of earlier steps, `delayed`: one scale per matrix."""

    def __init__(self, scales: LinearScales | None = None) -> None:
        self.scales = scales

    def input(self, x_TI: Tensor) -> Quantised:
        """See the protocol."""
        return self._quantised(x_TI, E4M3, INPUT)

    def weight(self, weight_OI: Tensor) -> Quantised:
        """See the protocol."""
        return self._quantised(weight_OI, E4M3, WEIGHT)

    def grad(self, grad_TO: Tensor) -> Quantised:
        """See the protocol."""
        return self._quantised(grad_TO, E5M2, GRAD)

    def rows(self, matrix: Quantised) -> Tensor:
        """See `Reference`."""
        data, scales = both(matrix.by_rows, matrix.row_scales)
        return data * scales

    def columns(self, matrix: Quantised) -> Tensor:
        """See `Reference`."""
        return self.rows(matrix)

    def weights(self, matrix: Quantised) -> Tensor:
        """See `Reference`."""
        return self.rows(matrix)

    def _quantised(self, x_RC: Tensor, dtype: torch.dtype, which: int) -> Quantised:
        largest = x_RC.abs().amax()
        scale = scale_for(largest, dtype)
        if self.scales is not None:
            self.scales.note(which, largest)
            if self.scales.known:
                scale = self.scales.scale(which).squeeze(0).clone()
        data_RC = rounded(x_RC, scale, dtype)
        return Quantised(data_RC, scale.reciprocal(), None, None, lead=x_RC.shape[:-1])


class BlockScaled(Reference):
    """Recipe `block`: one scale per 128 values, for weights per block of 128 × 128."""

    def input(self, x_TI: Tensor) -> Quantised:
        """See the protocol."""
        return self._quantised(x_TI)

    def weight(self, weight_OI: Tensor) -> Quantised:
        """See the protocol."""
        rows, columns = weight_OI.shape
        filled = F.pad(weight_OI, (0, -columns % BLOCK, 0, -rows % BLOCK))
        blocks = filled.unflatten(0, (-1, BLOCK)).unflatten(-1, (-1, BLOCK))
        scales = scale_for(blocks.abs().amax(dim=(1, 3)), E4M3, power_of_two=True)
        data_OI = rounded(weight_OI, _each(scales, weight_OI), E4M3)
        return Quantised(data_OI, scales.reciprocal(), None, None, lead=weight_OI.shape[:-1])

    def grad(self, grad_TO: Tensor) -> Quantised:
        """See the protocol."""
        return self._quantised(grad_TO)

    def rows(self, matrix: Quantised) -> Tensor:
        """See `Reference`."""
        data, scales = both(matrix.by_rows, matrix.row_scales)
        return data * scales.repeat_interleave(BLOCK, 1)[:, : data.shape[1]]

    def columns(self, matrix: Quantised) -> Tensor:
        """See `Reference`."""
        data, scales = both(matrix.by_columns, matrix.column_scales)
        return (data * scales.repeat_interleave(BLOCK, 1)[:, : data.shape[1]]).T

    def weights(self, matrix: Quantised) -> Tensor:
        """See `Reference`."""
        data, scales = both(matrix.by_rows, matrix.row_scales)
        return data * _each(scales, data)

    def _quantised(self, x_RC: Tensor) -> Quantised:
        return Quantised(*_along_rows(x_RC), *_along_rows(x_RC.T), lead=x_RC.shape[:-1])


def both(data: Tensor | None, scales: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return entries in fp32 and their dequantisation factors; asserts that this copy exists."""
    assert data is not None and scales is not None, "this copy was not made for this GEMM"
    return data.float(), scales


def _each(scales: Tensor, like_OI: Tensor) -> Tensor:
    """Expand scales of 128 × 128 blocks to entries."""
    rows, columns = like_OI.shape
    return scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:rows, :columns]


def _along_rows(x_RK: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise to FP8 along rows; return data and dequantisation factors, R × ⌈K / 128⌉."""
    columns = x_RK.shape[1]
    parts = F.pad(x_RK, (0, -columns % BLOCK)).unflatten(1, (-1, BLOCK))
    scales = scale_for(parts.abs().amax(dim=2), E4M3, power_of_two=True)
    data_RK = rounded(parts, scales[..., None], E4M3).flatten(1)[:, :columns]
    return data_RK.contiguous(), scales.reciprocal()
