"""Transformer Engine's FP8 kernels: its quantizers and its GEMMs.

The library is imported only if a run asks for it. Of it only quantizers and `general_gemm` are
used, no modules, contexts or global state, and they are captured like any other kernel. Its tensor
records are rebuilt for each GEMM from the tensors of a `Quantised`.

Argument order follows its GEMMs: A · B of column-major matrices, so that a weight comes first. As
in its recipes, gradients accumulate in full precision, outputs do not.

Shapes: T rows, I input width, O output width, R × C any of these.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from app.choices import Fp8Recipe, LinearBackendKind
from app.errors import ConfigError, Instead
from app.fp8.delayed import EACH, GRAD, INPUT, WEIGHT, LinearScales
from app.fp8.quantised import Quantised
from app.model.layers.transformer_engine import INSTALL, LIBRARY, import_library
from app.plan.model.fp8 import MULTIPLE


def fp8_library(asked: LinearBackendKind, recipe: Fp8Recipe) -> ModuleType:
    """Return Transformer Engine for torch. ConfigError if it is missing, or if the GPU does not
    support the recipe.
    """
    library = import_library(partial(_refused, asked))
    block = recipe is Fp8Recipe.block
    look = library.is_fp8_block_scaling_available if block else library.is_fp8_available
    available, why = look(return_reason=True)
    if not available:
        rule = f"this GPU has no FP8 GEMM for this recipe: {why}"
        near: tuple[object, ...] = (None, Instead("precision.fp8.backend=torch"))
        raise ConfigError("precision.fp8.recipe", recipe, rule, nearest=near)
    return library


def _refused(asked: LinearBackendKind, rule: str) -> ConfigError:
    near = (LinearBackendKind.torch, Instead("precision.fp8.recipe=null"))
    return ConfigError("precision.fp8.backend", asked, rule, nearest=near, advice=INSTALL)


Quantizer = Callable[[Tensor], object]  # of the library: makes a record


class TransformerEngine:
    """GEMMs of one recipe (`Fp8Arithmetic`); for one layer only if the recipe has `scales`. See
    `app.fp8.reference` for the recipes.
    """

    def __init__(
        self,
        library: ModuleType,
        recipe: Fp8Recipe,
        device: torch.device,
        scales: LinearScales | None = None,
    ) -> None:
        self.library = library
        self.recipe = recipe
        self.scales = scales
        self.quantise_into = import_module("transformer_engine_torch").quantize
        self.gemm = import_module(f"{LIBRARY}.pytorch.cpp_extensions").general_gemm
        forward_type = library.DType.kFloat8E4M3
        block = recipe is Fp8Recipe.block
        grad_type = forward_type if block else library.DType.kFloat8E5M2
        self.types = (forward_type, forward_type, grad_type)  # by INPUT, WEIGHT, GRAD
        self.by_own = [self._by_own(which, device) for which in range(EACH)]
        self.by_earlier = [] if scales is None else [*map(self._by_earlier, range(EACH))]

    def _by_own(self, which: int, device: torch.device) -> Quantizer:
        """Return a quantizer that scales by the matrix's own entries."""
        if self.recipe is Fp8Recipe.block:
            dims = 2 if which == WEIGHT else 1
            made = self.library.Float8BlockQuantizer(
                self.types[which], rowwise=True, columnwise=True, block_scaling_dim=dims
            )
        else:
            made = self.library.Float8CurrentScalingQuantizer(self.types[which], device)
        return _internal(made)

    def _by_earlier(self, which: int) -> Quantizer:
        """Return a quantizer that scales by earlier steps and records the amax."""
        assert self.scales is not None
        scale, largest = self.scales.scale(which), self.scales.largest(which)
        return _internal(self.library.Float8Quantizer(scale, largest, self.types[which]))

    def _quantizer(self, which: int, x_RC: Tensor) -> Quantizer:
        if self.scales is None:
            return self.by_own[which]
        if self.scales.known:
            return self.by_earlier[which]
        self.scales.note(which, x_RC.abs().amax())
        return self.by_own[which]

    def input(self, x_TI: Tensor) -> Quantised:
        """See the protocol; rows are padded to a multiple that tensor cores load."""
        return self._taken(self._quantizer(INPUT, x_TI)(_filled(x_TI)), x_TI)

    def weight(self, weight_OI: Tensor) -> Quantised:
        """See the protocol."""
        own_OI = weight_OI.detach()
        return self._taken(self._quantizer(WEIGHT, own_OI)(own_OI), own_OI)

    def update_weight(self, weight_OI: Tensor, held: Quantised) -> None:
        """See the protocol."""
        own_OI = weight_OI.detach()
        record = self._record(held, WEIGHT)
        self.quantise_into(own_OI, self._quantizer(WEIGHT, own_OI), record, None)

    def grad(self, grad_TO: Tensor) -> Quantised:
        """See the protocol; padded like inputs."""
        return self._taken(self._quantizer(GRAD, grad_TO)(_filled(grad_TO)), grad_TO)

    def output(self, x: Quantised, weight: Quantised, dtype: torch.dtype) -> Tensor:
        """See the protocol."""
        record = self._record(weight, WEIGHT)
        out_TO: Tensor = self.gemm(record, self._record(x, INPUT), out_dtype=dtype, layout="TN")[0]
        return out_TO

    def input_grad(self, grad: Quantised, weight: Quantised, dtype: torch.dtype) -> Tensor:
        """See the protocol."""
        record = self._record(weight, WEIGHT)
        grad_TI: Tensor = self.gemm(
            record,
            self._record(grad, GRAD),
            out_dtype=dtype,
            layout="NN",
            use_split_accumulator=True,
            grad=True,
        )[0]
        return grad_TI

    def weight_grad(self, grad: Quantised, x: Quantised, dtype: torch.dtype) -> Tensor:
        """See the protocol."""
        grad_OI: Tensor = self.gemm(
            self._record(x, INPUT),
            self._record(grad, GRAD),
            out_dtype=dtype,
            layout="NT",
            use_split_accumulator=True,
            grad=True,
        )[0]
        return grad_OI

    def add_weight_grad(self, grad: Quantised, x: Quantised, total_OI: Tensor) -> None:
        """See the protocol."""
        if total_OI.dtype != torch.float32:
            total_OI.add_(self.weight_grad(grad, x, total_OI.dtype))
            return
        self.gemm(
            self._record(x, INPUT),
            self._record(grad, GRAD),
            out_dtype=torch.float32,
            layout="NT",
            out=total_OI,
            accumulate=True,
            use_split_accumulator=True,
            grad=True,
        )

    def _taken(self, record: object, like: Tensor) -> Quantised:
        """Return the tensors of a record that the library has made."""
        names = ("_data", "_scale_inv", "_transpose", "_scale_inv")
        if self.recipe is Fp8Recipe.block:
            names = (
                "_rowwise_data",
                "_rowwise_scale_inv",
                "_columnwise_data",
                "_columnwise_scale_inv",
            )
        rows, row_scales, columns, column_scales = (getattr(record, name) for name in names)
        if columns is None:  # some GPUs multiply in any order
            column_scales = None
        return Quantised(rows, row_scales, columns, column_scales, lead=like.shape[:-1])

    def _record(self, matrix: Quantised, which: int) -> object:
        """Build the library's record of a matrix."""
        dtype = self.types[which]
        if self.recipe is Fp8Recipe.block:
            record: object = self.library.Float8BlockwiseQTensorStorage(
                rowwise_data=matrix.by_rows,
                rowwise_scale_inv=matrix.row_scales,
                columnwise_data=matrix.by_columns,
                columnwise_scale_inv=matrix.column_scales,
                fp8_dtype=dtype,
                quantizer=None,
                is_2D_scaled=which == WEIGHT,
                fake_dtype=torch.bfloat16,
            )
            return record
        scale = matrix.column_scales if matrix.row_scales is None else matrix.row_scales
        record = self.library.Float8TensorStorage(
            data=matrix.by_rows,
            fp8_scale_inv=scale,
            fp8_dtype=dtype,
            fake_dtype=torch.bfloat16,
            data_transpose=matrix.by_columns,
            quantizer=None,
        )
        return record


def _internal(made: Quantizer) -> Quantizer:
    """Return the quantizer, set to make plain records instead of tensor subclasses."""
    setattr(made, "internal", True)  # noqa: B010 - the library's attribute, unknown here
    return made


def _filled(x_RC: Tensor) -> Tensor:
    """Pad with rows of zeros, which change no scale and no sum."""
    missing = -len(x_RC) % MULTIPLE
    return F.pad(x_RC, (0, 0, 0, missing)) if missing else x_RC.contiguous()
