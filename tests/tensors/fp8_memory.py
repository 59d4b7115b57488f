"""Shared by test_fp8_memory.py and other tests."""

from __future__ import annotations

import torch
from torch import Tensor

from app.choices import Fp8Recipe
from app.fp8.quantised import Quantised


class Allocating:
    """Memory of the library's results, uninitialised (`Fp8Arithmetic`)."""

    def __init__(self, recipe: Fp8Recipe) -> None:
        self.block = recipe is Fp8Recipe.block

    def input(self, x_TI: Tensor) -> Quantised:
        rows, columns = x_TI.shape
        scales = [torch.empty(())] * 2
        if self.block:
            scales = [torch.empty(-(-columns // 128), rows), torch.empty(-(-rows // 128), columns)]
        data = [
            torch.empty(shape, dtype=torch.uint8) for shape in ((rows, columns), (columns, rows))
        ]
        return Quantised(data[0], scales[0], data[1], scales[1], lead=x_TI.shape[:-1])

    def weight(self, weight_OI: Tensor) -> Quantised:
        return self.input(weight_OI)

    def update_weight(self, weight_OI: Tensor, held: Quantised) -> None:
        pass

    def grad(self, grad_TO: Tensor) -> Quantised:
        return self.input(grad_TO)

    def output(self, x: Quantised, weight: Quantised, dtype: torch.dtype) -> Tensor:
        assert x.by_rows is not None and weight.by_rows is not None
        return torch.zeros(len(x.by_rows), len(weight.by_rows), dtype=dtype)

    def input_grad(self, grad: Quantised, weight: Quantised, dtype: torch.dtype) -> Tensor:
        assert grad.by_rows is not None and weight.by_columns is not None
        return torch.zeros(len(grad.by_rows), len(weight.by_columns), dtype=dtype)

    def weight_grad(self, grad: Quantised, x: Quantised, dtype: torch.dtype) -> Tensor:
        assert grad.by_columns is not None and x.by_columns is not None
        return torch.zeros(len(grad.by_columns), len(x.by_columns), dtype=dtype)

    def add_weight_grad(self, grad: Quantised, x: Quantised, total_OI: Tensor) -> None:
        pass
