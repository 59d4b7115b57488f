"""FP8 grouped GEMMs of experts, with a scale per row.

Each row of the input or output gradient is scaled by its own amax. A weight has two copies: one
scaled by columns of an expert's matrix for the output, one by rows for the input gradient, so that
the dimension a GEMM sums over has one scale on either side. All are E4M3, gradients too: within a
row magnitudes span less than within a matrix, and need digits more than range (docs/fp8.md). No
scale depends on other rows, so a row's bits do not depend on the layout.

Shapes: T rows grouped by expert, E experts, I × O their matrices; of a GEMM, K the dimension that
is summed, and N. Rows of an expert end at its offset in `ends_E`.
"""

from __future__ import annotations

from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from app.fp8.quantised import Quantised
from app.fp8.reference import E4M3, both, rounded, scale_for
from app.kernels.common import usable
from app.kernels.fp8.weights import quantise_weight_into
from app.kernels.grouped_gemm import grouped_gemm
from app.kernels.quantise import quantise_rows


class GroupedGemm(Protocol):
    """Grouped GEMM of FP8 rows with the matrix of their expert."""

    def __call__(
        self,
        rows: Quantised,
        matrix_ENK: Tensor,
        scales_EN: Tensor,
        ends_E: Tensor,
        dtype: torch.dtype,
    ) -> Tensor:
        """Return rows[e] · matrix[e]ᵀ, T × N; rows from ends[-1] on are uninitialised."""


def by_reference(
    rows: Quantised, matrix_ENK: Tensor, scales_EN: Tensor, ends_E: Tensor, dtype: torch.dtype
) -> Tensor:
    """Compute in fp32 from dequantised FP8."""
    data_TK, scales_T = both(rows.by_rows, rows.row_scales)
    rows_TK = data_TK * scales_T[:, None]
    wide_ENK = matrix_ENK.float() * scales_EN[..., None]
    if not usable(rows_TK):
        return F.grouped_mm(rows_TK, wide_ENK.mT, offs=ends_E).to(dtype)
    out_TN = rows_TK.new_empty(len(rows_TK), matrix_ENK.shape[1])  # without waiting for the device
    grouped_gemm(out_TN, rows_TK, wide_ENK, ends_E=ends_E, first=0, transposed=True)
    return out_TN.to(dtype)


def on_tensor_cores(
    rows: Quantised, matrix_ENK: Tensor, scales_EN: Tensor, ends_E: Tensor, dtype: torch.dtype
) -> Tensor:
    """Compute with torch's grouped GEMM on Hopper and newer GPUs, to bf16; reads offsets on the
    device.

    Uses the tensor cores' fast accumulation: with fp32 accumulation it is slower than bf16.
    """
    assert rows.by_rows is not None and rows.row_scales is not None
    if not len(rows.by_rows):
        return matrix_ENK.new_empty(0, matrix_ENK.shape[1], dtype=dtype)
    out_TN: Tensor = torch._scaled_grouped_mm(
        rows.by_rows,
        matrix_ENK.mT,  # the kernel takes column-major matrices only
        rows.row_scales,
        scales_EN,
        offs=ends_E,
        out_dtype=dtype,
        use_fast_accum=True,
    )
    return out_TN


class RowScaled:
    """Quantises rows and weights of experts, and multiplies them by one of the grouped GEMMs
    above.
    """

    def __init__(self, multiply: GroupedGemm) -> None:
        self.multiply = multiply

    def rows(self, x_TK: Tensor, ends_E: Tensor) -> Quantised:
        """Quantise the input or the output gradient; rows from ends[-1] on are uninitialised."""
        if usable(x_TK):
            data_TK, scales_T = quantise_rows(x_TK, used=ends_E[-1:])
        else:
            data_TK, scales_T = _rows_of(x_TK)
        return Quantised(data_TK, scales_T, None, None, lead=x_TK.shape[:-1])

    def weight(self, weight_EIO: Tensor) -> Quantised:
        """Quantise both copies into new memory."""
        experts, width, made = weight_EIO.shape
        empty = partial(torch.empty, device=weight_EIO.device)
        held = Quantised(
            empty(experts, width, made, dtype=E4M3),
            empty(experts, width, dtype=torch.float32),
            empty(experts, made, width, dtype=E4M3),
            empty(experts, made, dtype=torch.float32),
            lead=weight_EIO.shape[:-1],
        )
        self.update_weight(weight_EIO, held)
        return held

    def update_weight(self, weight_EIO: Tensor, held: Quantised) -> None:
        """Quantise both copies into the memory of `held`."""
        for_input, input_scales, for_output, output_scales = held.tensors()
        assert for_input is not None and input_scales is not None
        assert for_output is not None and output_scales is not None
        if usable(weight_EIO):
            quantise_weight_into(weight_EIO, (for_input, input_scales), (for_output, output_scales))
            return
        pairs = ((weight_EIO, for_input, input_scales), (weight_EIO.mT, for_output, output_scales))
        for source, data, scales in pairs:
            new_data, new_scales = _rows_of(source)
            data.copy_(new_data)
            scales.copy_(new_scales)

    def output(
        self, rows: Quantised, weight: Quantised, ends_E: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """Return rows[e] · weight[e], T × O."""
        assert weight.by_columns is not None and weight.column_scales is not None
        return self.multiply(
            rows, weight.by_columns, weight.column_scales, ends_E=ends_E, dtype=dtype
        )

    def input_grad(
        self, grad: Quantised, weight: Quantised, ends_E: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """Return grad[e] · weight[e]ᵀ, T × I."""
        assert weight.by_rows is not None and weight.row_scales is not None
        return self.multiply(grad, weight.by_rows, weight.row_scales, ends_E=ends_E, dtype=dtype)


def _rows_of(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise to FP8 by rows; return data and one dequantisation factor per row."""
    scales = scale_for(x.abs().amax(dim=-1), E4M3)
    return rounded(x, scales[..., None], E4M3), scales.reciprocal()
