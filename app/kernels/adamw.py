"""AdamW (Loshchilov & Hutter 2019) on a flat shard in one pass over memory, which also writes the
updated fp32 parameters rounded to the parameters' dtype.

Shapes: N elements of the shard, in which P slices of at most CHUNK elements are updated. In
kernels: BLOCK elements at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import gcd, log

import torch
from torch import Tensor

from app.kernels.common import jit, tl

BLOCK = 1024  # two 16-byte loads of each array per thread: more were slower
CHUNK = 8 * BLOCK  # elements per program: enough that reading its table entry costs nothing
WARPS = 4


@dataclass(frozen=True, slots=True)
class AdamWSettings:
    """Settings that are the same in all updates of a run."""

    beta1: float
    beta2: float
    eps: float


def update_rates(lr: float, weight_decay: float, device: torch.device) -> Tensor:
    """Return learning rate and weight decay of one update on the device, fp64 [2].

    The host does not wait for the copy, as it would for a tensor made of its own numbers.
    """
    rates_2 = torch.full((2,), lr, dtype=torch.float64, device=device)
    rates_2[1].fill_(weight_decay)
    return rates_2


@dataclass(frozen=True, slots=True)
class ShardSlices:
    """Slices of a shard to update, and whether weight decay applies to each."""

    table_P3: Tensor  # int64, on the device: first element, end, whether its weights decay
    alignment: int  # elements: a common divisor of all first elements

    @classmethod
    def of(cls, ranges: Iterable[tuple[int, int, bool]], device: torch.device) -> ShardSlices:
        """Build them from (start, stop, decays) ranges of elements, cut to at most CHUNK
        elements.
        """
        rows = [
            (first, min(first + CHUNK, stop), int(decays))
            for start, stop, decays in ranges
            for first in range(start, stop, CHUNK)
        ]
        table_P3 = torch.tensor(rows, dtype=torch.int64, device=device).view(-1, 3)
        return cls(table_P3, gcd(16, *(first for first, _, _ in rows)))


def adamw_update(
    main_N: Tensor,
    grad_N: Tensor,
    moments: tuple[Tensor, Tensor],
    *,
    rounded_N: Tensor | None,
    slices: ShardSlices,
    rates_2: Tensor,
    step: Tensor,
    divisor: Tensor,
    skip: Tensor,
    settings: AdamWSettings,
) -> None:
    """Update fp32 parameters and fp32 or bf16 moments in place by gradient / `divisor`, and write
    the parameters to `rounded_N` in its dtype; no-op if `skip` is 1. The parameters' update is that
    of moments before they are rounded.

    Everything that differs between updates is read on the device, so that a captured update can be
    replayed: `rates_2` are those of `update_rates`; `step`, `divisor` and `skip` are fp32 scalars,
    and `step` counts the updates before this one. Gradients are fp32, bf16 or fp16. Elements
    outside the slices are unchanged.
    """
    if not len(slices.table_P3):
        return
    exp_avg_N, exp_avg_sq_N = moments
    _adamw[(len(slices.table_P3),)](
        slices.table_P3,
        main_N,
        grad_N,
        exp_avg_N,
        exp_avg_sq_N,
        rounded_N,
        rates_2,
        step,
        divisor,
        skip,
        beta1=settings.beta1,
        beta2=settings.beta2,
        rest1=1 - settings.beta1,
        rest2=1 - settings.beta2,
        log1=log(settings.beta1) if settings.beta1 else -1e4,
        log2=log(settings.beta2) if settings.beta2 else -1e4,
        eps=settings.eps,
        ALIGNMENT=slices.alignment,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )


@jit
def _one_minus_exp(x: tl.tensor) -> tl.tensor:
    """Return 1 - eˣ for x < 0 to full precision: near 0 by eight terms of its series."""
    near = tl.maximum(x, -0.5)
    series = 1.0 + near / 8
    for below in tl.static_range(6):
        series = 1.0 + near / (7 - below) * series
    return tl.where(x > -0.5, -near * series, 1.0 - tl.exp(x))


@jit
def _update(
    main: tl.tensor,
    grad: tl.tensor,
    exp_avg: tl.tensor,
    exp_avg_sq: tl.tensor,
    rounded: tl.tensor,
    place: tl.tensor,
    inside: tl.tensor,
    beta1: float,
    beta2: float,
    rest1: float,
    rest2: float,
    rate: float,
    spread: float,
    scale: float,
    eps: float,
    kept: float,
) -> None:
    """Update one block; `inside` masks the elements that exist, None means all."""
    other = None if inside is None else 0.0
    g = tl.load(grad + place, mask=inside, other=other).to(tl.float32) / scale
    m = tl.load(exp_avg + place, mask=inside, other=other).to(tl.float32) * beta1 + g * rest1
    v = tl.load(exp_avg_sq + place, mask=inside, other=other).to(tl.float32) * beta2 + g * g * rest2
    w = tl.load(main + place, mask=inside, other=other) * kept
    w -= rate * m / (tl.sqrt_rn(v) / spread + eps)
    tl.store(exp_avg + place, m.to(exp_avg.dtype.element_ty), mask=inside)
    tl.store(exp_avg_sq + place, v.to(exp_avg_sq.dtype.element_ty), mask=inside)
    tl.store(main + place, w, mask=inside)
    if rounded is not None:
        tl.store(rounded + place, w.to(rounded.dtype.element_ty), mask=inside)


@jit
def _adamw(
    table: tl.tensor,
    main: tl.tensor,
    grad: tl.tensor,
    exp_avg: tl.tensor,
    exp_avg_sq: tl.tensor,
    rounded: tl.tensor,
    rates: tl.tensor,
    step: tl.tensor,
    divisor: tl.tensor,
    skip: tl.tensor,
    beta1: float,
    beta2: float,
    rest1: float,
    rest2: float,
    log1: float,
    log2: float,
    eps: float,
    ALIGNMENT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = table + tl.program_id(0) * 3
    first = tl.multiple_of(tl.load(row), ALIGNMENT)
    stop = tl.load(row + 1)
    if tl.load(skip) == 0:
        lr = tl.load(rates)
        shrink = (lr * tl.load(rates + 1)).to(tl.float32)  # rounded once
        kept = tl.where(tl.load(row + 2) != 0, 1.0 - shrink, 1.0)
        count = tl.load(step) + 1
        rate = lr.to(tl.float32) / _one_minus_exp(count * log1)
        spread = tl.sqrt_rn(_one_minus_exp(count * log2))
        scale = tl.load(divisor)
        whole = first + (stop - first) // BLOCK * BLOCK
        for start in range(first, whole, BLOCK):  # masks would keep loads from being wide
            place = start + tl.arange(0, BLOCK)
            _update(
                main,
                grad,
                exp_avg,
                exp_avg_sq,
                rounded,
                place,
                inside=None,
                beta1=beta1,
                beta2=beta2,
                rest1=rest1,
                rest2=rest2,
                rate=rate,
                spread=spread,
                scale=scale,
                eps=eps,
                kept=kept,
            )
        if whole < stop:
            place = whole + tl.arange(0, BLOCK)
            _update(
                main,
                grad,
                exp_avg,
                exp_avg_sq,
                rounded,
                place,
                inside=place < stop,
                beta1=beta1,
                beta2=beta2,
                rest1=rest1,
                rest2=rest2,
                rate=rate,
                spread=spread,
                scale=scale,
                eps=eps,
                kept=kept,
            )
