"""Kernels of optimizers that keep a momentum and update by what they compute from it elsewhere:
one pass over a shard before that, and one after it.

Shapes: N elements of the shard, M of a tensor that holds some of them in another order, P slices of
at most CHUNK elements. In kernels: BLOCK elements at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor

from app.kernels.adamw import BLOCK, CHUNK, WARPS
from app.kernels.common import jit, tl


class MovedSlice(NamedTuple):
    """Slice of a shard whose elements lie elsewhere in another tensor."""

    start: int  # first element in the shard
    stop: int
    place: int  # of the first element in the other tensor
    scale: float  # factor on its updates


@dataclass(frozen=True, slots=True)
class MovedSlices:
    """Slices of a shard on the device."""

    table_P3: Tensor  # int64: first element, end, place in the other tensor
    scale_P: Tensor  # fp32
    alignment: int  # elements: a common divisor of first elements, ends and places

    @classmethod
    def of(cls, slices: Iterable[MovedSlice], device: torch.device) -> MovedSlices:
        """Cut slices to at most CHUNK elements."""
        rows, scales = list[tuple[int, int, int]](), list[float]()
        for start, stop, place, scale in slices:
            for first in range(start, stop, CHUNK):
                rows.append((first, min(first + CHUNK, stop), place + first - start))
                scales.append(scale)
        table_P3 = torch.tensor(rows, dtype=torch.int64, device=device).view(-1, 3)
        alignment = gcd(16, *(number for row in rows for number in row))
        scale_P = torch.tensor(scales, dtype=torch.float32, device=device)
        return cls(table_P3, scale_P, alignment)


def push_momentum(
    momentum_N: Tensor,
    grad_N: Tensor,
    out_M: Tensor,
    *,
    slices: MovedSlices,
    decay: float,
    divisor: Tensor,
    skip: Tensor,
) -> None:
    """Average gradient / `divisor` into the fp32 momentum, and write Nesterov's look-ahead to
    `out_M` in its dtype; no-op if `skip` is 1.

    m += (g − m)·(1 − decay), out = m + (g − m)·(1 − decay), as torch.optim.Muon. `divisor` and
    `skip` are fp32 scalars on the device. Gradients are fp32, bf16 or fp16.
    """
    if len(slices.table_P3):
        _push[(len(slices.table_P3),)](
            slices.table_P3,
            momentum_N,
            grad_N,
            out_M,
            divisor,
            skip,
            rest=1 - decay,
            ALIGNMENT=slices.alignment,
            CHUNK=CHUNK,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )


def apply_updates(
    main_N: Tensor,
    update_M: Tensor,
    rounded_N: Tensor | None,
    *,
    slices: MovedSlices,
    rates_2: Tensor,
    skip: Tensor,
) -> None:
    """Decay fp32 parameters, subtract rate · scale · update, and write them to `rounded_N` in its
    dtype; no-op if `skip` is 1. `rates_2`: see `app.kernels.adamw.update_rates`.
    """
    if len(slices.table_P3):
        _apply[(len(slices.table_P3),)](
            slices.table_P3,
            slices.scale_P,
            main_N,
            update_M,
            rounded_N,
            rates_2,
            skip,
            ALIGNMENT=slices.alignment,
            CHUNK=CHUNK,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )


@jit
def _push(
    table: tl.tensor,
    momentum: tl.tensor,
    grad: tl.tensor,
    out: tl.tensor,
    divisor: tl.tensor,
    skip: tl.tensor,
    rest: float,
    ALIGNMENT: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = table + tl.program_id(0) * 3
    first = tl.multiple_of(tl.load(row), ALIGNMENT)
    # a multiple: masks then keep loads wide
    length = tl.multiple_of(tl.load(row + 1) - first, ALIGNMENT)
    place = tl.multiple_of(tl.load(row + 2), ALIGNMENT)
    if tl.load(skip) == 0:
        scale = tl.load(divisor)
        for start in range(0, CHUNK, BLOCK):
            at = start + tl.arange(0, BLOCK)
            inside = at < length
            g = tl.load(grad + first + at, mask=inside, other=0.0).to(tl.float32) / scale
            m = tl.load(momentum + first + at, mask=inside, other=0.0)
            m += (g - m) * rest
            tl.store(momentum + first + at, m, mask=inside)
            ahead = m + (g - m) * rest
            tl.store(out + place + at, ahead.to(out.dtype.element_ty), mask=inside)


@jit
def _apply(
    table: tl.tensor,
    scales: tl.tensor,
    main: tl.tensor,
    update: tl.tensor,
    rounded: tl.tensor,
    rates: tl.tensor,
    skip: tl.tensor,
    ALIGNMENT: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = table + tl.program_id(0) * 3
    first = tl.multiple_of(tl.load(row), ALIGNMENT)
    # a multiple: masks then keep loads wide
    length = tl.multiple_of(tl.load(row + 1) - first, ALIGNMENT)
    place = tl.multiple_of(tl.load(row + 2), ALIGNMENT)
    if tl.load(skip) == 0:
        lr = tl.load(rates)
        kept = 1.0 - (lr * tl.load(rates + 1)).to(tl.float32)  # rounded once
        rate = (lr * tl.load(scales + tl.program_id(0))).to(tl.float32)
        for start in range(0, CHUNK, BLOCK):
            at = start + tl.arange(0, BLOCK)
            inside = at < length
            w = tl.load(main + first + at, mask=inside, other=0.0) * kept
            w -= rate * tl.load(update + place + at, mask=inside, other=0.0).to(tl.float32)
            tl.store(main + first + at, w, mask=inside)
            if rounded is not None:
                tl.store(rounded + first + at, w.to(rounded.dtype.element_ty), mask=inside)
