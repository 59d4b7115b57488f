"""Permutation of token rows to experts and back: one program per token, each row read and written
once.

Shapes: T tokens · K experts per token · R rows · D width. In kernels: BLOCK columns of a row,
PLACES ≥ K, a power of two. Sums are fp32, in order of k or of a fixed tree, so equal calls give
equal bits. A row that no kept choice owns is never read. Kernels may also write rows to `fp8_rows`,
with the bits that `app.kernels.quantise` would give.
"""

from __future__ import annotations

import torch
from torch import Tensor

from app.kernels.common import jit, tl
from app.kernels.quantise import Fp8Rows, in_fp8, reciprocal, scale_for
from app.kernels.tiling import ROW_PER_WARP, block_of, row_columns, row_warps

TILE = 8192  # values per program, which holds all rows of a token at once


def spread_rows(
    x_TD: Tensor,
    row_of_TK: Tensor,
    kept_TK: Tensor | None,
    num_rows: int,
    fp8_rows: Fp8Rows | None = None,
) -> Tensor:
    """Return out[row_of[t, k]] = x[t]: [num_rows, D], zero in rows that no choice owns.

    Choices not in `kept_TK` own no row; without it every row must be owned. Also fills `fp8_rows`,
    except in rows that no choice owns.
    """
    (tokens, top_k), width = row_of_TK.shape, x_TD.shape[1]
    out_RD = (x_TD.new_empty if kept_TK is None else x_TD.new_zeros)(num_rows, width)
    grid, block, warps = row_columns(tokens, width)
    if fp8_rows is not None:
        # a row's scale covers all its columns, so one program takes the whole row
        grid, block = (tokens, 1), block_of(width)
        warps = row_warps(block, 16)
    data_RD, factors_R = (None, None) if fp8_rows is None else fp8_rows
    _spread[grid](
        x=x_TD.contiguous(),
        row_of=row_of_TK.contiguous(),
        kept=_flat(kept_TK),
        out=out_RD,
        data=data_RD,
        factors=factors_R,
        num_rows=num_rows,
        width=width,
        K=top_k,
        BLOCK=block,
        num_warps=warps,
    )
    return out_RD


def sum_rows(
    rows_RD: Tensor,
    row_of_TK: Tensor,
    weights_TK: Tensor | None,
    kept_TK: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Return Σ_k weights[t, k] · rows[row_of[t, k]], in fp32 in order of k, weight 1 for None: [T,
    D], rounded once to `dtype`.

    Choices not in `kept_TK` count as 0.
    """
    (tokens, top_k), (num_rows, width) = row_of_TK.shape, rows_RD.shape
    out_TD = rows_RD.new_empty(tokens, width, dtype=dtype)
    grid, block, warps = row_columns(tokens, width)
    _sum[grid](
        rows=rows_RD.contiguous(),
        row_of=row_of_TK.contiguous(),
        weights=_flat(weights_TK),
        kept=_flat(kept_TK),
        out=out_TD,
        num_rows=num_rows,
        width=width,
        K=top_k,
        BLOCK=block,
        num_warps=warps,
        enable_fp_fusion=False,  # no FMA: round each multiplication before adding, as torch does
    )
    return out_TD


def combine_gradients(
    grad_TD: Tensor,
    rows_RD: Tensor,
    probs_TK: Tensor,
    row_of_TK: Tensor,
    kept_TK: Tensor | None,
    fp8_rows: Fp8Rows | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of Σ_k probs[t, k] · rows[row_of[t, k]]: of the rows [R, D], rounded
    once, and of the probabilities [T, K].

    Both are zero if no kept choice owns the row; without `kept_TK` every row must be owned. Also
    fills `fp8_rows` with the rows' gradients, except in rows that no choice owns.
    """
    (tokens, top_k), (num_rows, width) = row_of_TK.shape, rows_RD.shape
    grad_RD = (grad_TD.new_empty if kept_TK is None else grad_TD.new_zeros)(num_rows, width)
    dots_TK = torch.empty_like(probs_TK, memory_format=torch.contiguous_format)
    places = block_of(top_k)
    block = min(block_of(width), max(ROW_PER_WARP, TILE // places))
    data_RD, factors_R = (None, None) if fp8_rows is None else fp8_rows
    _gradients[(tokens,)](
        grad=grad_TD.contiguous(),
        rows=rows_RD.contiguous(),
        probs=probs_TK.contiguous(),
        row_of=row_of_TK.contiguous(),
        kept=_flat(kept_TK),
        grad_rows=grad_RD,
        data=data_RD,
        factors=factors_R,
        dots=dots_TK,
        num_rows=num_rows,
        width=width,
        K=top_k,
        PLACES=places,
        BLOCK=block,
        num_warps=row_warps(places * block // 4),
    )
    return grad_RD, dots_TK


def _flat(choices_TK: Tensor | None) -> Tensor | None:
    return None if choices_TK is None else choices_TK.contiguous()


@jit
def _owned(
    row_of: tl.tensor, kept: tl.tensor, choice: tl.tensor, real: tl.tensor, num_rows: int
) -> tuple[tl.tensor, tl.tensor]:
    """Return the row of a choice, and whether it has one."""
    row = tl.load(row_of + choice, mask=real, other=0)
    owned = real & (row < num_rows)
    if kept is not None:
        owned = owned & (tl.load(kept + choice, mask=real, other=0) != 0)
    return row, owned


@jit
def _spread(
    x: tl.tensor,
    row_of: tl.tensor,
    kept: tl.tensor,
    out: tl.tensor,
    data: tl.tensor,
    factors: tl.tensor,
    num_rows: int,
    width: int,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + token * width + column, mask=column < width, other=0.0)
    if data is not None:
        wide = value.to(tl.float32)
        scale = scale_for(tl.max(tl.abs(wide), axis=0))
        narrow = in_fp8(wide, scale)
        factor = reciprocal(scale)
    # (row, whether there is one) of each choice; Triton takes no annotation of a local variable
    places = ()  # type: tuple[tuple[tl.tensor, tl.tensor], ...]
    for k in tl.static_range(K):  # load all before storing: a load after a store would wait for it
        places += (_owned(row_of, kept, token * K + k, real=True, num_rows=num_rows),)
    for k in tl.static_range(K):
        row, owned = places[k]
        tl.store(out + row * width + column, value, mask=(column < width) & owned)
        if data is not None:
            tl.store(data + row * width + column, narrow, mask=(column < width) & owned)
            tl.store(factors + row, factor, mask=owned)


@jit
def _sum(
    rows: tl.tensor,
    row_of: tl.tensor,
    weights: tl.tensor,
    kept: tl.tensor,
    out: tl.tensor,
    num_rows: int,
    width: int,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    parts = ()  # type: tuple[tl.tensor, ...]
    for k in tl.static_range(K):  # issue all loads before the first is used
        row, owned = _owned(row_of, kept, token * K + k, real=True, num_rows=num_rows)
        parts += (tl.load(rows + row * width + column, mask=(column < width) & owned, other=0.0),)
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(K):
        part = parts[k].to(tl.float32)
        if weights is not None:
            part = part * tl.load(weights + token * K + k).to(tl.float32)
        total += part
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=column < width)


@jit
def _gradients(
    grad: tl.tensor,
    rows: tl.tensor,
    probs: tl.tensor,
    row_of: tl.tensor,
    kept: tl.tensor,
    grad_rows: tl.tensor,
    data: tl.tensor,
    factors: tl.tensor,
    dots: tl.tensor,
    num_rows: int,
    width: int,
    K: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, PLACES)
    choice = token * K + k
    row, owned = _owned(row_of, kept, choice, real=k < K, num_rows=num_rows)
    prob = tl.load(probs + choice, mask=k < K, other=0.0).to(tl.float32)
    if data is not None:
        largest = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, width, BLOCK):
            column = start + tl.arange(0, BLOCK)
            g = tl.load(grad + token * width + column, mask=column < width, other=0.0)
            largest = tl.maximum(largest, tl.abs(g.to(tl.float32)))
        # rounding is monotonic: a row's amax comes from the amax of `grad`
        most = (tl.max(largest, axis=0) * prob).to(grad_rows.dtype.element_ty)
        scale = scale_for(tl.abs(most.to(tl.float32)))
        tl.store(factors + row, reciprocal(scale), mask=owned)
    gemms = tl.zeros((PLACES, BLOCK), tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        g = tl.load(grad + token * width + column, mask=column < width, other=0.0).to(tl.float32)
        place = row[:, None] * width + column[None, :]
        valid = owned[:, None] & (column < width)[None, :]
        values = tl.load(rows + place, mask=valid, other=0.0).to(tl.float32)
        made = (g[None, :] * prob[:, None]).to(grad_rows.dtype.element_ty)
        tl.store(grad_rows + place, made, mask=valid)
        if data is not None:
            tl.store(data + place, in_fp8(made.to(tl.float32), scale[:, None]), mask=valid)
        gemms += values * g[None, :]
    tl.store(dots + choice, tl.sum(gemms, axis=1).to(dots.dtype.element_ty), mask=k < K)
