"""Rows of tokens to the rows of their experts and back: one program per token, each row read and
written once.

Tokens lie in one tensor, or in the memory of several ranks (`OfRanks`): all transports share the
arithmetic, bit for bit. Sums are fp32, in order of k or of a fixed tree, so equal calls give equal
bits. Rows without a choice are neither read nor written. Nothing here waits for other ranks: what
is read must have been written. Kernels may also write rows to `fp8_rows`, with the bits that
`app.kernels.quantise` would give.

Shapes: T tokens (of all ranks, in rank order) · K experts per token · R rows · D width; a choice
without a row has the row R, or one beyond. In kernels: BLOCK columns of a row, PLACES ≥ K, a power
of two.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from app.kernels.common import jit, tl
from app.kernels.quantise import Fp8Rows, in_fp8, reciprocal, scale_for
from app.kernels.tiling import block_of, row_columns, row_warps

WIDE_BLOCK = 4096  # if a program has all columns, one block at a time
SHARE = 8  # columns of a block per thread
# of a thread, where 8 values of 16 bits of each of 8 rows fit: 24 warps on a multiprocessor
REGISTERS = 80


class OfRanks(NamedTuple):
    """Values of all ranks' tokens where each rank has its own: int64 addresses on the device, of
    equally many rows or lists of K, aligned to 16 bytes.

    Programs start with the tokens of `rank` and go from rank to rank, so that all links are in use.
    """

    addresses_P: Tensor
    rank: int = 0


def spread_rows(
    x_TD: Tensor,
    row_of_TK: Tensor,
    num_rows: int,
    zeros: bool = False,
    fp8_rows: Fp8Rows | None = None,
) -> Tensor:
    """Return out[row_of[t, k]] = x[t]: [num_rows, D]. Also fills `fp8_rows`.

    Rows that no choice has are undefined, or 0 with `zeros`.
    """
    out_RD = (x_TD.new_zeros if zeros else x_TD.new_empty)(num_rows, x_TD.shape[1])
    spread_into(out_RD, x_TD.contiguous(), row_of_TK, fp8_rows)
    return out_RD


def spread_into(
    out_RD: Tensor, source: Tensor | OfRanks, row_of_TK: Tensor, fp8_rows: Fp8Rows | None
) -> None:
    """Write `spread_rows` of contiguous tokens, each of which is read once, to `out`."""
    tokens, (num_rows, width) = len(row_of_TK), out_RD.shape
    grid, block, warps = row_columns(tokens, width)
    if fp8_rows is not None:
        # a row's scale covers all its columns, so one program takes the whole row
        grid, block = (tokens, 1), block_of(width)
        warps = row_warps(block, 16)
    data_RD, factors_R = (None, None) if fp8_rows is None else fp8_rows
    _spread[grid](
        row_of=row_of_TK.contiguous(),
        out=out_RD,
        data=data_RD,
        factors=factors_R,
        num_rows=num_rows,
        width=width,
        K=row_of_TK.shape[1],
        BLOCK=block,
        num_warps=warps,
        **_place(source, tokens),
    )


def sum_rows(
    rows_RD: Tensor, row_of_TK: Tensor, weights_TK: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return Σ_k weights[t, k] · rows[row_of[t, k]], in fp32 in order of k, weight 1 for None: [T,
    D], rounded once to `dtype`. A choice without a row counts as 0.
    """
    out_TD = rows_RD.new_empty(len(row_of_TK), rows_RD.shape[1], dtype=dtype)
    sum_into(out_TD, rows_RD, row_of_TK, weights_TK)
    return out_TD


def sum_into(
    out: Tensor | OfRanks, rows_RD: Tensor, row_of_TK: Tensor, weights_TK: Tensor | None
) -> None:
    """Write `sum_rows` to `out`. Ranks have it in the rows' dtype, and nothing is written for a
    token without a row.
    """
    num_rows, width = rows_RD.shape
    grid, block, warps = row_columns(len(row_of_TK), width)
    _sum[grid](
        rows=rows_RD.contiguous(),
        row_of=row_of_TK.contiguous(),
        weights=None if weights_TK is None else weights_TK.contiguous(),
        num_rows=num_rows,
        width=width,
        K=row_of_TK.shape[1],
        BLOCK=block,
        num_warps=warps,
        enable_fp_fusion=False,  # no FMA: round each multiplication before adding, as torch does
        **_place(out, len(row_of_TK)),
    )


def combine_gradients(
    grad_TD: Tensor,
    rows_RD: Tensor,
    probs_TK: Tensor,
    row_of_TK: Tensor,
    zeros: bool = False,
    fp8_rows: Fp8Rows | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of Σ_k probs[t, k] · rows[row_of[t, k]]: of the rows [R, D], rounded
    once, and of the probabilities [T, K], 0 for a choice without a row. Also fills `fp8_rows`.

    Rows that no choice has are undefined, or 0 with `zeros`.
    """
    grad_RD = (grad_TD.new_zeros if zeros else grad_TD.new_empty)(rows_RD.shape)
    dots_TK = torch.empty_like(probs_TK, memory_format=torch.contiguous_format)
    gradients_into(
        grad_RD,
        dots_TK,
        grad_TD.contiguous(),
        rows_RD=rows_RD,
        probs_TK=probs_TK,
        row_of_TK=row_of_TK,
        fp8_rows=fp8_rows,
    )
    return grad_RD, dots_TK


def gradients_into(
    grad_RD: Tensor,
    dots: Tensor | OfRanks,
    source: Tensor | OfRanks,
    *,
    rows_RD: Tensor,
    probs_TK: Tensor,
    row_of_TK: Tensor,
    fp8_rows: Fp8Rows | None,
) -> None:
    """Write `combine_gradients`, given the gradient of each token at `source`. Ranks have the
    probabilities' in fp32, and nothing is written for a choice without a row.
    """
    (num_rows, width), top_k = rows_RD.shape, row_of_TK.shape[1]
    block = min(block_of(width), WIDE_BLOCK)
    warps = row_warps(block, 16)
    fits = warps <= 8 and top_k <= 8 and rows_RD.dtype.itemsize == 2
    data_RD, factors_R = (None, None) if fp8_rows is None else fp8_rows
    _gradients[(len(row_of_TK),)](
        rows=rows_RD.contiguous(),
        weights=probs_TK.contiguous(),
        row_of=row_of_TK.contiguous(),
        grad_rows=grad_RD,
        data=data_RD,
        factors=factors_R,
        dots=dots if isinstance(dots, Tensor) else dots.addresses_P,
        num_rows=num_rows,
        WIDTH=width,
        K=top_k,
        PLACES=block_of(top_k),
        BLOCK=block,
        SHARE=min(SHARE, block),
        LEVELS=block_of(top_k).bit_length() - 1,
        num_warps=warps,
        maxnreg=REGISTERS if fits else None,
        enable_fp_fusion=False,  # no FMA: the same bits however the kernel is specialised
        **_place(source, len(row_of_TK)),
    )


def _place(values: Tensor | OfRanks, count: int) -> dict[str, Tensor | int | bool]:
    """Return the kernels' arguments for where values of `count` tokens lie."""
    if isinstance(values, Tensor):
        return {"place": values, "ranks": 1, "rank": 0, "tokens": count, "PEERS": False}
    ranks = len(values.addresses_P)
    return {
        "place": values.addresses_P,
        "ranks": ranks,
        "rank": values.rank,
        "tokens": count // ranks,
        "PEERS": True,
    }


@jit
def _token(
    place: tl.tensor, like: tl.tensor, ranks: int, rank: int, tokens: int, PEERS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return the rank of this program's token, where that has its values, in the dtype of `like` if
    at an address, and the token's number there and among all: neighbouring programs have tokens of
    different ranks.
    """
    nth = tl.program_id(0)
    owner = (nth + rank) % ranks
    token = (nth // ranks).to(tl.int64)
    if PEERS:
        values = tl.load(place + owner).to(tl.pointer_type(like.dtype.element_ty))
        values = tl.multiple_of(values, 16)
    else:
        values = place
    return owner, values, token, owner * tokens + token


@jit
def _rows_of(
    row_of: tl.tensor, num_rows: int, K: tl.constexpr
) -> tuple[tuple[tl.tensor, ...], tl.tensor]:
    """Return the rows of a token's choices, and the first of them."""
    lowest = num_rows
    places = ()  # type: tuple[tl.tensor, ...]
    for k in tl.static_range(K):  # load all before storing: a load after a store would wait for it
        row = tl.load(row_of + k).to(tl.int64)
        places += (row,)
        lowest = tl.minimum(lowest, row)
    return places, lowest


@jit
def _sums(parts: tl.tuple, COUNT: tl.constexpr, K: tl.constexpr, LEVELS: tl.constexpr) -> tl.tensor:
    """Return the sums of K vectors, padded with zeros to a power of two: joined, one reduction over
    the threads adds them all up.
    """
    for _ in tl.static_range(K, 1 << LEVELS):
        parts += (tl.zeros((COUNT,), tl.float32),)
    for level in tl.static_range(LEVELS):
        joined = ()  # type: tuple[tl.tensor, ...]
        for k in tl.static_range(1 << (LEVELS - level - 1)):
            joined += (tl.join(parts[k], parts[k + (1 << (LEVELS - level - 1))]),)
        parts = joined
    return tl.sum(tl.reshape(parts[0], (COUNT, 1 << LEVELS)), axis=0)


@jit
def _spread(
    place: tl.tensor,
    row_of: tl.tensor,
    out: tl.tensor,
    data: tl.tensor,
    factors: tl.tensor,
    ranks: int,
    rank: int,
    tokens: int,
    num_rows: int,
    width: int,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    PEERS: tl.constexpr,
) -> None:
    _, x, token, nth = _token(place, out, ranks, rank=rank, tokens=tokens, PEERS=PEERS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    places, lowest = _rows_of(row_of + nth * K, num_rows, K=K)
    mine = column < width
    if PEERS:  # what has no row here does not cross the link
        mine &= lowest < num_rows
    value = tl.load(x + token * width + column, mask=mine, other=0.0)
    if data is not None:
        wide = value.to(tl.float32)
        scale = scale_for(tl.max(tl.abs(wide), axis=0))
        narrow = in_fp8(wide, scale)
        factor = reciprocal(scale)
    for k in tl.static_range(K):
        row = places[k]
        valid = (column < width) & (row < num_rows)
        tl.store(out + row * width + column, value, mask=valid)
        if data is not None:
            tl.store(data + row * width + column, narrow, mask=valid)
            tl.store(factors + row, factor, mask=row < num_rows)


@jit
def _sum(
    rows: tl.tensor,
    weights: tl.tensor,
    row_of: tl.tensor,
    place: tl.tensor,
    ranks: int,
    rank: int,
    tokens: int,
    num_rows: int,
    width: int,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    PEERS: tl.constexpr,
) -> None:
    _, out, token, nth = _token(place, rows, ranks, rank=rank, tokens=tokens, PEERS=PEERS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    places, lowest = _rows_of(row_of + nth * K, num_rows, K=K)
    parts = ()  # type: tuple[tl.tensor, ...]
    for k in tl.static_range(K):  # issue all loads before the first is used
        valid = (column < width) & (places[k] < num_rows)
        parts += (tl.load(rows + places[k] * width + column, mask=valid, other=0.0),)
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(K):
        part = parts[k].to(tl.float32)
        if weights is not None:
            part = part * tl.load(weights + nth * K + k).to(tl.float32)
        total += part
    mine = column < width
    if PEERS:
        mine &= lowest < num_rows
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=mine)


@jit
def _gradients(
    place: tl.tensor,
    rows: tl.tensor,
    weights: tl.tensor,
    row_of: tl.tensor,
    grad_rows: tl.tensor,
    data: tl.tensor,
    factors: tl.tensor,
    dots: tl.tensor,
    ranks: int,
    rank: int,
    tokens: int,
    num_rows: int,
    WIDTH: tl.constexpr,
    K: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK: tl.constexpr,
    SHARE: tl.constexpr,
    LEVELS: tl.constexpr,
    PEERS: tl.constexpr,
) -> None:
    owner, grad, token, nth = _token(place, rows, ranks, rank=rank, tokens=tokens, PEERS=PEERS)
    choice = nth * K
    places, lowest = _rows_of(row_of + choice, num_rows, K=K)
    near = tl.arange(0, PLACES)
    row = tl.load(row_of + choice + near, mask=near < K, other=num_rows)
    owned = (near < K) & (row < num_rows)
    grads = ()  # type: tuple[tl.tensor, ...]
    largest = tl.zeros((BLOCK,), tl.float32)
    for start in tl.static_range(0, WIDTH, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mine = (column < WIDTH) & (lowest < num_rows)
        grads += (tl.load(grad + token * WIDTH + column, mask=mine, other=0.0),)
        if data is not None:
            largest = tl.maximum(largest, tl.abs(grads[start // BLOCK].to(tl.float32)))
    gemms = ()  # type: tuple[tl.tensor, ...]
    for _ in tl.static_range(K):
        gemms += (tl.zeros((BLOCK // SHARE,), tl.float32),)
    for start in tl.static_range(0, WIDTH, BLOCK):
        column = start + tl.arange(0, BLOCK)
        g = grads[start // BLOCK].to(tl.float32)
        values = ()  # type: tuple[tl.tensor, ...]
        for k in tl.static_range(K):  # issue all loads before the first is used
            valid = (column < WIDTH) & (places[k] < num_rows)
            values += (tl.load(rows + places[k] * WIDTH + column, mask=valid, other=0.0),)
        if data is not None and start == 0:
            # rounding is monotonic: a row's amax comes from the amax of `grad`
            probs = tl.load(weights + choice + near, mask=near < K, other=0.0).to(tl.float32)
            most = (tl.max(largest, axis=0) * probs).to(grad_rows.dtype.element_ty)
            scales = scale_for(tl.abs(most.to(tl.float32)))
            tl.store(factors + row, reciprocal(scales), mask=owned)
        sums = ()  # type: tuple[tl.tensor, ...]
        for k in tl.static_range(K):
            prob = tl.load(weights + choice + k).to(tl.float32)
            valid = (column < WIDTH) & (places[k] < num_rows)
            made = (g * prob).to(grad_rows.dtype.element_ty)
            tl.store(grad_rows + places[k] * WIDTH + column, made, mask=valid)
            if data is not None:
                scale = tl.sum(tl.where(near == k, scales, 0.0), axis=0)
                narrow = in_fp8(made.to(tl.float32), scale)
                tl.store(data + places[k] * WIDTH + column, narrow, mask=valid)
            gemm = tl.reshape(values[k].to(tl.float32) * g, (BLOCK // SHARE, SHARE))
            sums += (gemms[k] + tl.sum(gemm, axis=1),)
        gemms = sums
    found = _sums(gemms, COUNT=BLOCK // SHARE, K=K, LEVELS=LEVELS)
    if PEERS:
        out = tl.load(dots + owner).to(tl.pointer_type(tl.float32))
        tl.store(out + token * K + near, found, mask=owned)
    else:
        tl.store(dots + choice + near, found.to(dots.dtype.element_ty), mask=near < K)
