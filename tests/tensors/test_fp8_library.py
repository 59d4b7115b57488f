"""Transformer Engine's back end against the reference, on a stand-in for the library: which record
goes where, in which layout, and what is padded. Its kernels are tested on a GPU.

Shapes: T rows, IN and OUT widths.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from app.choices import Fp8Recipe
from app.fp8 import transformer_engine
from app.fp8.delayed import LinearScales
from app.fp8.linear import Fp8Linear
from app.fp8.quantised import Quantised
from app.fp8.reference import E4M3, E5M2, BlockScaled, TensorScaled, rounded, scale_for
from app.fp8.reference import _along_rows as along_rows
from app.fp8.transformer_engine import TransformerEngine
from app.model.attention.modules import Attention
from app.model.layers.weight_grads import MainGradSink
from tests.runs import TINY

T, IN, OUT = 35, 64, 48
CPU = torch.device("cpu")


@dataclass
class Float8TensorStorage:
    """One scale; a GPU like Hopper has a transposed copy."""

    data: Tensor | None
    fp8_scale_inv: Tensor
    fp8_dtype: torch.dtype
    fake_dtype: torch.dtype
    data_transpose: Tensor | None
    quantizer: None

    def __post_init__(self) -> None:
        self._data, self._transpose = self.data, self.data_transpose
        self._scale_inv = self.fp8_scale_inv

    def wide(self, columnwise: bool) -> Tensor:
        data = self._transpose if columnwise else self._data
        assert data is not None, "a layout that has not been kept"
        wide = data.float() * self._scale_inv
        return wide.T if columnwise else wide


@dataclass
class Float8BlockwiseQTensorStorage:
    """A scale per block."""

    rowwise_data: Tensor | None
    rowwise_scale_inv: Tensor | None
    columnwise_data: Tensor | None
    columnwise_scale_inv: Tensor | None
    fp8_dtype: torch.dtype
    quantizer: None
    is_2D_scaled: bool
    fake_dtype: torch.dtype

    def __post_init__(self) -> None:
        self._rowwise_data, self._columnwise_data = self.rowwise_data, self.columnwise_data
        self._rowwise_scale_inv = self.rowwise_scale_inv
        self._columnwise_scale_inv = self.columnwise_scale_inv

    def wide(self, columnwise: bool) -> Tensor:
        data = self._columnwise_data if columnwise else self._rowwise_data
        scales = self._columnwise_scale_inv if columnwise else self._rowwise_scale_inv
        assert data is not None and scales is not None, "a layout that has not been kept"
        matrix = Quantised(data, scales, data, scales, lead=data.shape[:-1])
        if self.is_2D_scaled:
            wide = BlockScaled().weights(matrix)
            return wide.T if columnwise else wide
        return BlockScaled().columns(matrix) if columnwise else BlockScaled().rows(matrix)


class Float8CurrentScalingQuantizer:
    def __init__(self, fp8_dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.internal = fp8_dtype, False

    def __call__(self, x: Tensor) -> Float8TensorStorage:
        assert self.internal and x.is_contiguous() and len(x) % 16 == 0
        scale = scale_for(x.abs().amax(), self.dtype)
        data = rounded(x, scale, self.dtype)
        inverse = scale.reciprocal()
        return Float8TensorStorage(data, inverse, self.dtype, x.dtype, data.T.contiguous(), None)


class Float8Quantizer:
    def __init__(self, scale: Tensor, amax: Tensor, fp8_dtype: torch.dtype) -> None:
        assert scale.shape == amax.shape == (1,)
        self.scale, self.amax, self.dtype, self.internal = scale, amax, fp8_dtype, False

    def __call__(self, x: Tensor) -> Float8TensorStorage:
        assert self.internal and x.is_contiguous() and len(x) % 16 == 0
        self.amax.copy_(torch.maximum(self.amax, x.abs().amax()))
        data = rounded(x, self.scale, self.dtype)
        inverse = self.scale.reciprocal()
        return Float8TensorStorage(data, inverse, self.dtype, x.dtype, data.T.contiguous(), None)


class Float8BlockQuantizer:
    def __init__(
        self, fp8_dtype: torch.dtype, *, rowwise: bool, columnwise: bool, block_scaling_dim: int
    ) -> None:
        assert rowwise and columnwise
        self.dtype, self.dims, self.internal = fp8_dtype, block_scaling_dim, False

    def __call__(self, x: Tensor) -> Float8BlockwiseQTensorStorage:
        assert self.internal and x.is_contiguous() and len(x) % 16 == 0
        if self.dims == 2:
            made = BlockScaled().weight(x)
            assert made.by_rows is not None and made.row_scales is not None
            four = (
                made.by_rows, made.row_scales, made.by_rows.T.contiguous(), made.row_scales.T
            )  # fmt: skip
        else:
            four = (*along_rows(x), *along_rows(x.T))
        return Float8BlockwiseQTensorStorage(*four, self.dtype, None, self.dims == 2, x.dtype)


def quantize(x: Tensor, quantizer: Any, into: Any, noop: None) -> None:
    made = quantizer(x)
    for name in ("_data", "_transpose", "_scale_inv", "_rowwise_data", "_rowwise_scale_inv",
                 "_columnwise_data", "_columnwise_scale_inv"):  # fmt: skip
        if hasattr(made, name):
            getattr(into, name).copy_(getattr(made, name))


def general_gemm(
    a: Any,
    b: Any,
    out_dtype: torch.dtype,
    layout: str,
    out: Tensor | None = None,
    accumulate: bool = False,
    use_split_accumulator: bool = False,
    grad: bool = False,
) -> tuple[Tensor, None, None, None]:
    """Stand-in with Transformer Engine's conventions: reads A's row-wise copy if transposed, B's if
    not; both gradients have exact partial sums.
    """
    left = b.wide(layout[1] == "T")
    right = a.wide(layout[0] != "T")
    assert grad == use_split_accumulator == (layout != "TN")
    gemm = {
        "TN": lambda: left @ right.T,
        "NN": lambda: left @ right,
        "NT": lambda: left.T @ right,
    }
    found = gemm[layout]().to(out_dtype)
    if out is None:
        assert not accumulate
        return found, None, None, None
    assert accumulate and out.dtype == out_dtype
    return out.add_(found), None, None, None


LIBRARY = SimpleNamespace(
    DType=SimpleNamespace(kFloat8E4M3=E4M3, kFloat8E5M2=E5M2),
    Float8CurrentScalingQuantizer=Float8CurrentScalingQuantizer,
    Float8Quantizer=Float8Quantizer,
    Float8BlockQuantizer=Float8BlockQuantizer,
    Float8TensorStorage=Float8TensorStorage,
    Float8BlockwiseQTensorStorage=Float8BlockwiseQTensorStorage,
)


@pytest.mark.parametrize("recipe", Fp8Recipe)
def test_records_of_the_library_multiply_as_the_reference_does(
    recipe: Fp8Recipe, monkeypatch: pytest.MonkeyPatch
):
    parts = SimpleNamespace(quantize=quantize, general_gemm=general_gemm)
    monkeypatch.setattr(transformer_engine, "import_module", lambda name: parts)
    scales = [scales_of_earlier_steps() if recipe is Fp8Recipe.delayed else None for _ in range(2)]
    theirs: Any = TransformerEngine(LIBRARY, recipe, CPU, scales[0])  # type: ignore[arg-type]
    ours = BlockScaled() if recipe is Fp8Recipe.block else TensorScaled(scales[1])
    generator = torch.Generator().manual_seed(0)
    x, other, weight, grad = (
        torch.randn(shape, generator=generator).bfloat16()
        for shape in ((T, IN), (OUT, IN), (OUT, IN), (T, OUT))
    )
    held = theirs.weight(other)
    places = [each.data_ptr() for each in held.tensors()]
    theirs.update_weight(weight, held)
    assert [each.data_ptr() for each in held.tensors()] == places
    totals = []
    for arithmetic, in_8 in ((theirs, held), (ours, ours.weight(weight))):
        given, back = arithmetic.input(x), arithmetic.grad(grad)
        assert given.lead == back.lead == (T,)
        kept = given.for_weight_grad()
        total = torch.ones(OUT, IN)
        arithmetic.add_weight_grad(back, kept, total)
        half = torch.ones(OUT, IN, dtype=torch.bfloat16)
        arithmetic.add_weight_grad(back, kept, half)
        found = (
            arithmetic.output(given, in_8, torch.bfloat16)[:T],
            arithmetic.input_grad(back, in_8, torch.bfloat16)[:T],
            arithmetic.weight_grad(back, kept, torch.bfloat16),
            total,
            half,
        )
        totals.append(found)
    for mine, expected in zip(*totals, strict=True):
        # rows of zeros may change the order of a sum over rows
        torch.testing.assert_close(mine, expected, rtol=2**-7, atol=1e-4)
    assert torch.equal(totals[0][0], totals[1][0]) and torch.equal(totals[0][1], totals[1][1])
    if scales[0] is not None and scales[1] is not None:
        largest = [each.abs().amax().float() for each in (x, weight, grad)]
        assert torch.equal(scales[1].largest_3, torch.stack(largest))
        largest[1] = torch.maximum(largest[1], other.abs().amax().float())
        assert torch.equal(scales[0].largest_3, torch.stack(largest))


def scales_of_earlier_steps() -> LinearScales:
    scales = LinearScales(torch.tensor([100.0, 110.0, 9000.0]), torch.zeros(3))
    scales.known = True
    return scales


BIASED = replace(TINY, qkv_bias=True)


@pytest.mark.parametrize("by_library", [False, True], ids=["reference", "library"])
@pytest.mark.parametrize("recipe", Fp8Recipe)
def test_bias_adds_to_fp8_output_and_gets_summed_gradient(
    recipe: Fp8Recipe, by_library: bool, monkeypatch: pytest.MonkeyPatch
):
    """With as many tokens as the library has to pad."""
    parts = SimpleNamespace(quantize=quantize, general_gemm=general_gemm)
    monkeypatch.setattr(transformer_engine, "import_module", lambda name: parts)
    scales = scales_of_earlier_steps() if recipe is Fp8Recipe.delayed else None
    arithmetic: Any = BlockScaled() if recipe is Fp8Recipe.block else TensorScaled(scales)
    if by_library:
        arithmetic = TransformerEngine(LIBRARY, recipe, CPU, scales)  # type: ignore[arg-type]
    torch.manual_seed(0)
    attention = Attention(BIASED.layer_specs[0].attention).bfloat16()
    assert attention.bqkv is not None
    for param in attention.parameters():
        nn.init.normal_(param)
    attention.wqkv.backend = Fp8Linear(arithmetic, attention.wqkv.weight)
    x = torch.randn(1, T, BIASED.hidden_size).bfloat16().requires_grad_()
    pushed = MainGradSink(lambda weight, gradient: None)
    for sink in (None, pushed):
        without: Tensor = attention.wqkv.forward(x, sink)
        found = attention._gemm(x, SimpleNamespace(sink=sink))  # type: ignore[arg-type]
        assert torch.equal(found, without + attention.bqkv)
        grad = torch.randn(found.shape).bfloat16()
        wanted = torch.autograd.grad(without, x, grad)[0]
        x_grad, bias_grad = torch.autograd.grad(found, (x, attention.bqkv), grad)
        assert torch.equal(x_grad, wanted)
        assert torch.equal(bias_grad, grad.sum((0, 1)))
