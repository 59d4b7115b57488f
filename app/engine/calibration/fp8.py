"""Measure GEMMs in FP8 and the quantisation of their operands, for each recipe available here.

docs/planning.md says how plans use the results. Shapes: S rows and columns of square matrices; R
rows grouped by expert, E experts, D hidden size, F the other dimension of expert weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from app.choices import Dtype, Fp8Recipe, LinearBackendKind
from app.engine.calibration import solve
from app.engine.calibration.clock import Clock
from app.engine.calibration.kernels import MeasuredSizes
from app.engine.calibration.solve import GIGA, MICRO, TERA
from app.engine.fp8 import arithmetic_maker, experts_arithmetic
from app.errors import ConfigError
from app.fp8.delayed import EACH, LinearScales
from app.plan.parts.fp8 import RECIPES

SIZE = 2  # bytes of a 16-bit element


def fp8_speeds(
    clock: Clock,
    square: int,
    speeds: Mapping[str, Any],
    backend: LinearBackendKind = LinearBackendKind.auto,
) -> tuple[dict[str, float], list[str]]:
    """Measure FP8 keys of `HardwareProfile` with matrices of `square` rows and columns.

    Returns them, and a line per recipe unavailable here with the reason. `speeds` holds the keys
    measured already.
    """
    found: dict[str, float] = {}
    missing: list[str] = []
    for recipe in Fp8Recipe:
        try:
            measured = _Recipe(clock, recipe, square, speeds, backend)
        except ConfigError as refused:
            missing.append(f"{recipe.value}: {refused.rule}")
            continue
        found[f"fp8_{recipe.value}_tflops"] = measured.tflops()
        if "fp8_quantise_gb_s" not in found:
            found["fp8_quantise_gb_s"] = measured.quantising()
    return found, missing


def experts_speeds(
    clock: Clock,
    sizes: MeasuredSizes,
    speeds: Mapping[str, Any],
    backend: LinearBackendKind = LinearBackendKind.auto,
) -> tuple[dict[str, float], list[str]]:
    """Measure the FP8 grouped GEMM of experts on quantised rows; returns as `fp8_speeds`."""
    device = clock.device
    try:
        arithmetic = experts_arithmetic(backend, Dtype.bfloat16, device)
    except ConfigError as refused:
        return {}, [f"of experts: {refused.rule}"]
    w_EDF = torch.randn(sizes.experts, sizes.hidden, sizes.expert, device=device).bfloat16()
    x_RD = torch.randn(sizes.experts * sizes.many, sizes.hidden, device=device).bfloat16()
    ends_E = torch.arange(1, sizes.experts + 1, device=device, dtype=torch.int32) * sizes.many
    rows, weight = arithmetic.rows(x_RD, ends_E), arithmetic.weight(w_EDF)
    took = clock.seconds(partial(arithmetic.output, rows, weight, ends_E, dtype=x_RD.dtype))
    # counted as the plan does: with padding rows of tiles, and bytes as if in 16 bits
    computed = x_RD.numel() + speeds["grouped_tile"] * sizes.experts * sizes.hidden
    moved = SIZE * (x_RD.numel() + w_EDF.numel() + len(x_RD) * sizes.expert)
    beside = speeds["gemm_memory"] * moved / (speeds["other_gb_s"][0] * GIGA)
    beside += speeds["kernel_us"] * MICRO
    found = solve.rate(2.0 * computed * sizes.expert, took, beside, unit=TERA)
    return {"fp8_grouped_tflops": found}, []


class _Recipe:
    """Quantised matrices of one layer. Raises ConfigError if the recipe is unavailable here."""

    def __init__(
        self,
        clock: Clock,
        recipe: Fp8Recipe,
        square: int,
        speeds: Mapping[str, Any],
        backend: LinearBackendKind,
    ) -> None:
        self.clock, self.recipe, self.square, self.speeds = clock, recipe, square, speeds
        make = arithmetic_maker(backend, recipe, clock.device)
        scales = None
        if recipe is Fp8Recipe.delayed:  # as after a first step, when scales are known
            ones, zeros = (fill(EACH, device=clock.device) for fill in (torch.ones, torch.zeros))
            scales = LinearScales(ones, zeros)
            scales.known = True
        self.arithmetic = make(scales)
        self.x_SS = torch.randn(square, square, device=clock.device).bfloat16()

    def tflops(self) -> float:
        """Return TFLOP/s of the three GEMMs of a forward and backward."""
        arithmetic, x_SS = self.arithmetic, self.x_SS
        x, weight, grad = arithmetic.input(x_SS), arithmetic.weight(x_SS), arithmetic.grad(x_SS)
        gemms = (
            partial(arithmetic.output, x, weight, x_SS.dtype),
            partial(arithmetic.input_grad, grad, weight, x_SS.dtype),
            partial(arithmetic.weight_grad, grad, x, x_SS.dtype),
        )
        # the plan counts the bytes of a GEMM as if all matrices were in 16 bits
        memory = self.speeds["other_gb_s"][0] * GIGA
        moved = self.speeds["gemm_memory"] * 3 * SIZE * self.square**2 / memory
        beside = len(gemms) * (self.speeds["kernel_us"] * MICRO + moved)
        took = sum(self.clock.seconds(gemm) for gemm in gemms)
        return solve.rate(2.0 * len(gemms) * self.square**3, took, beside, unit=TERA)

    def quantising(self) -> float:
        """Return GB/s of quantisation, over the bytes that the plan counts for it."""
        started = RECIPES[self.recipe].launches * self.speeds["kernel_us"] * MICRO
        took = self.clock.seconds(partial(self.arithmetic.input, self.x_SS))
        return solve.rate(float(RECIPES[self.recipe].moved * self.square**2), took, started)
