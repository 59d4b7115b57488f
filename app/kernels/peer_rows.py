"""Rows of all ranks' tokens to the rows of this rank's experts and back, through addresses: of
memory of other ranks that this one can read and write, or of parts of a tensor of its own. So all
transports share the arithmetic, bit for bit.

Sums are fp32 in a fixed order. Rows that no choice has are neither read nor written. Nothing here
waits for other ranks: what is read has to be there.

Shapes: P ranks with T tokens each · N = P·T tokens, in rank order · K experts per token · D width ·
R rows here, R as the row of a choice meaning that it has none · L experts of a rank. `addresses_P`
(int64, on the device): where the first of each rank's T rows or lists of K lies, at 16 bytes. In
kernels: BLOCK columns of a row, PLACES ≥ K, a power of two.
"""

from __future__ import annotations

import torch
from torch import Tensor

from app.kernels.common import jit, tl
from app.kernels.tiling import ROW_PER_WARP, block_of, cdiv, row_columns

WIDE_BLOCK = 4096  # where a program has all columns, a block at a time
VALUES = 512  # small values of one program


def addresses_in(values_N: Tensor) -> Tensor:
    """Addresses for the kernels here of rows that lie in one contiguous tensor, as if of one rank:
    int64 [1], without a wait, and as long as the tensor lives.
    """
    address = values_N.data_ptr()
    assert values_N.is_contiguous() and address % 16 == 0
    return torch.full((1,), address, dtype=torch.int64, device=values_N.device)


def pull_rows(
    addresses_P: Tensor,
    row_of_NK: Tensor,
    num_rows: int,
    width: int,
    dtype: torch.dtype,
    rank: int = 0,
) -> Tensor:
    """rows[row_of[n, k]] = the row of token n: [R, D]. Each token is read once, if it has a row.

    Programs begin with the tokens of `rank` and go from rank to rank, so that all links are in use.
    """
    rows_RD = torch.empty(num_rows, width, dtype=dtype, device=row_of_NK.device)
    grid, block, warps = row_columns(len(row_of_NK), width)
    _pull[grid](
        addresses=addresses_P,
        row_of=row_of_NK,
        rows=rows_RD,
        ranks=len(addresses_P),
        rank=rank,
        tokens=len(row_of_NK) // len(addresses_P),
        num_rows=num_rows,
        width=width,
        K=row_of_NK.shape[1],
        BLOCK=block,
        num_warps=warps,
    )
    return rows_RD


def push_sums(
    rows_RD: Tensor, probs_NK: Tensor | None, row_of_NK: Tensor, addresses_P: Tensor, rank: int = 0
) -> None:
    """Write Σ_k probs[n, k] · rows[row_of[n, k]] of token n to its place, in order of k, rounded to
    the rows' type; probabilities are fp32, None: 1. Nothing for a token without a row.
    """
    num_rows, width = rows_RD.shape
    grid, block, warps = row_columns(len(row_of_NK), width)
    _push[grid](
        rows=rows_RD.contiguous(),
        weights=None if probs_NK is None else probs_NK.contiguous(),
        row_of=row_of_NK,
        addresses=addresses_P,
        ranks=len(addresses_P),
        rank=rank,
        tokens=len(row_of_NK) // len(addresses_P),
        num_rows=num_rows,
        width=width,
        K=row_of_NK.shape[1],
        BLOCK=block,
        num_warps=warps,
        enable_fp_fusion=False,  # products are rounded before they are added, as torch does it
    )


def sum_partials(partial_PTD: Tensor, experts_TK: Tensor, local: int, etp: int) -> Tensor:
    """Σ_p partial[p, t] over the ranks p that have an expert of token t, in rank order, rounded
    once: [T, D]. Experts s·L to (s+1)·L are on ranks s·etp to (s+1)·etp.
    """
    ranks, tokens, width = partial_PTD.shape
    out_TD = torch.empty_like(partial_PTD[0])
    grid, block, warps = row_columns(tokens, width)
    _sum_partials[grid](
        partial=partial_PTD.contiguous(),
        experts=experts_TK.contiguous(),
        out=out_TD,
        tokens=tokens,
        width=width,
        local=local,
        ETP=etp,
        P=ranks,
        K=experts_TK.shape[1],
        PLACES=block_of(experts_TK.shape[1]),
        BLOCK=block,
        num_warps=warps,
    )
    return out_TD


def pull_gradients(
    addresses_P: Tensor,
    rows_RD: Tensor,
    probs_NK: Tensor,
    row_of_NK: Tensor,
    dots_addresses_P: Tensor,
    rank: int = 0,
) -> Tensor:
    """Gradients of the sums that `push_sums` writes, g of token n at its address. Of the rows:
    probs[n, k] · g[n], rounded once, [R, D]; of the probabilities: <g[n], rows[row_of[n, k]]>,
    fp32, written to the list of the token's K at the other address.

    A choice without a row has neither.
    """
    assert probs_NK.dtype == torch.float32, probs_NK.dtype
    num_rows, width = rows_RD.shape
    top_k = row_of_NK.shape[1]
    grad_RD = torch.empty_like(rows_RD, memory_format=torch.contiguous_format)
    block = min(block_of(width), WIDE_BLOCK)
    _pull_gradients[(len(row_of_NK),)](
        addresses=addresses_P,
        rows=rows_RD.contiguous(),
        weights=probs_NK.contiguous(),
        row_of=row_of_NK,
        grad_rows=grad_RD,
        dots_addresses=dots_addresses_P,
        ranks=len(addresses_P),
        rank=rank,
        tokens=len(row_of_NK) // len(addresses_P),
        num_rows=num_rows,
        WIDTH=width,
        K=top_k,
        PLACES=block_of(top_k),
        BLOCK=block,
        num_warps=max(1, block // ROW_PER_WARP),
        enable_fp_fusion=False,  # the same bits however the kernel is specialised
    )
    return grad_RD


def sum_dots(dots_PTK: Tensor, experts_TK: Tensor, local: int, etp: int) -> Tensor:
    """Σ_p dots[p, t, k] over the ranks p that have a part of choice k's expert, in rank order:
    [T, K]; 0 where no rank has one.
    """
    ranks = len(dots_PTK)
    out_TK = torch.empty_like(dots_PTK[0])
    count = out_TK.numel()
    _sum_dots[(cdiv(count, VALUES),)](
        dots=dots_PTK.contiguous(),
        experts=experts_TK.contiguous(),
        out=out_TK,
        count=count,
        ranks=ranks,
        local=local,
        ETP=etp,
        BLOCK=VALUES,
    )
    return out_TK


def push_values(values_TK: Tensor, addresses_P: Tensor, dtype: torch.dtype) -> None:
    """Write the same values to each of the addresses, in `dtype`."""
    count = values_TK.numel()
    _push_values[(cdiv(count, VALUES), len(addresses_P))](
        values=values_TK.contiguous(),
        addresses=addresses_P,
        like=torch.empty(0, dtype=dtype, device=values_TK.device),
        count=count,
        BLOCK=VALUES,
    )


def zero_gaps(rows_RD: Tensor, filled_L: Tensor, ends_L: Tensor) -> None:
    """Zero rows filled[e] to ends[e] of every expert e, in place; rows are contiguous."""
    width = rows_RD.shape[1]
    grid, block, warps = row_columns(len(ends_L), width)
    _zero_gaps[grid](rows_RD, filled_L, ends_L, width=width, BLOCK=block, num_warps=warps)


@jit
def _token(ranks: int, rank: int, tokens: int) -> tuple[tl.tensor, tl.tensor]:
    """Whose token this program has, and which of its rank's: neighbouring programs have tokens of
    different ranks.
    """
    place = tl.program_id(0)
    return (place + rank) % ranks, (place // ranks).to(tl.int64)


@jit
def _pull(
    addresses: tl.tensor,
    row_of: tl.tensor,
    rows: tl.tensor,
    ranks: int,
    rank: int,
    tokens: int,
    num_rows: int,
    width: int,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    owner, token = _token(ranks, rank, tokens)
    choice = (owner * tokens + token) * K
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    lowest = num_rows
    places = ()  # type: tuple[tl.tensor, ...]
    for k in tl.static_range(K):  # a load after a store would wait for it
        row = tl.load(row_of + choice + k).to(tl.int64)
        places += (row,)
        lowest = tl.minimum(lowest, row)
    x = tl.load(addresses + owner).to(tl.pointer_type(rows.dtype.element_ty))
    x = tl.multiple_of(x, 16)
    mine = (column < width) & (lowest < num_rows)
    value = tl.load(x + token * width + column, mask=mine, other=0.0)
    for k in tl.static_range(K):
        row = places[k]
        tl.store(rows + row * width + column, value, mask=(column < width) & (row < num_rows))


@jit
def _push(
    rows: tl.tensor,
    weights: tl.tensor,
    row_of: tl.tensor,
    addresses: tl.tensor,
    ranks: int,
    rank: int,
    tokens: int,
    num_rows: int,
    width: int,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    owner, token = _token(ranks, rank, tokens)
    choice = (owner * tokens + token) * K
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    lowest = num_rows
    parts = ()  # type: tuple[tl.tensor, ...]
    for k in tl.static_range(K):  # all on their way before the first is needed
        row = tl.load(row_of + choice + k).to(tl.int64)
        valid = (column < width) & (row < num_rows)
        parts += (tl.load(rows + row * width + column, mask=valid, other=0.0),)
        lowest = tl.minimum(lowest, row)
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(K):
        part = parts[k].to(tl.float32)
        if weights is not None:
            part = part * tl.load(weights + choice + k).to(tl.float32)
        total += part
    out = tl.load(addresses + owner).to(tl.pointer_type(rows.dtype.element_ty))
    out = tl.multiple_of(out, 16)
    tl.store(
        out + token * width + column,
        total.to(rows.dtype.element_ty),
        mask=(column < width) & (lowest < num_rows),
    )


@jit
def _sum_partials(
    partial: tl.tensor,
    experts: tl.tensor,
    out: tl.tensor,
    tokens: int,
    width: int,
    local: int,
    ETP: tl.constexpr,
    P: tl.constexpr,
    K: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    k = tl.arange(0, PLACES)
    share = tl.load(experts + token * K + k, mask=k < K, other=0).to(tl.int32) // local
    share = tl.where(k < K, share, P)  # no rank's
    parts = ()  # type: tuple[tl.tensor, ...]
    for p in tl.static_range(P):
        sent = tl.max((share == p // ETP).to(tl.int32), axis=0) > 0
        place = (p * tokens + token) * width + column
        parts += (tl.load(partial + place, mask=(column < width) & sent, other=0.0),)
    total = tl.zeros((BLOCK,), tl.float32)
    for p in tl.static_range(P):
        total += parts[p].to(tl.float32)
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=column < width)


@jit
def _pull_gradients(
    addresses: tl.tensor,
    rows: tl.tensor,
    weights: tl.tensor,
    row_of: tl.tensor,
    grad_rows: tl.tensor,
    dots_addresses: tl.tensor,
    ranks: int,
    rank: int,
    tokens: int,
    num_rows: int,
    WIDTH: tl.constexpr,
    K: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    owner, token = _token(ranks, rank, tokens)
    choice = (owner * tokens + token) * K
    places = ()  # type: tuple[tl.tensor, ...]
    lowest = num_rows
    for k in tl.static_range(K):
        row = tl.load(row_of + choice + k).to(tl.int64)
        places += (row,)
        lowest = tl.minimum(lowest, row)
    grad = tl.load(addresses + owner).to(tl.pointer_type(rows.dtype.element_ty))
    grad = tl.multiple_of(grad, 16)
    place = tl.arange(0, PLACES)
    products = tl.zeros((PLACES,), tl.float32)
    for start in tl.static_range(0, WIDTH, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mine = (column < WIDTH) & (lowest < num_rows)
        g = tl.load(grad + token * WIDTH + column, mask=mine, other=0.0).to(tl.float32)
        values = ()  # type: tuple[tl.tensor, ...]
        for k in tl.static_range(K):  # all on their way before the first is needed
            valid = (column < WIDTH) & (places[k] < num_rows)
            values += (tl.load(rows + places[k] * WIDTH + column, mask=valid, other=0.0),)
        for k in tl.static_range(K):
            prob = tl.load(weights + choice + k).to(tl.float32)
            tl.store(
                grad_rows + places[k] * WIDTH + column,
                (g * prob).to(grad_rows.dtype.element_ty),
                mask=(column < WIDTH) & (places[k] < num_rows),
            )
            products += tl.where(place == k, tl.sum(values[k].to(tl.float32) * g, axis=0), 0.0)
    dots = tl.load(dots_addresses + owner).to(tl.pointer_type(tl.float32))
    row = tl.load(row_of + choice + place, mask=place < K, other=num_rows)
    tl.store(dots + token * K + place, products, mask=(place < K) & (row < num_rows))


@jit
def _sum_dots(
    dots: tl.tensor,
    experts: tl.tensor,
    out: tl.tensor,
    count: int,
    ranks: int,
    local: int,
    ETP: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    choice = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(experts + choice, mask=choice < count, other=0).to(tl.int32)
    total = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(ETP):
        owner = (expert // local * ETP + part).to(tl.int64)
        valid = (choice < count) & (owner < ranks)
        total += tl.load(dots + owner * count + choice, mask=valid, other=0.0)
    tl.store(out + choice, total, mask=choice < count)


@jit
def _push_values(
    values: tl.tensor, addresses: tl.tensor, like: tl.tensor, count: int, BLOCK: tl.constexpr
) -> None:
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(values + place, mask=place < count)
    out = tl.load(addresses + tl.program_id(1)).to(tl.pointer_type(like.dtype.element_ty))
    tl.store(out + place, value.to(like.dtype.element_ty), mask=place < count)


@jit
def _zero_gaps(
    rows: tl.tensor,
    filled: tl.tensor,
    ends: tl.tensor,
    width: int,
    BLOCK: tl.constexpr,
) -> None:
    expert = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    zero = tl.zeros((BLOCK,), rows.dtype.element_ty)
    start = tl.load(filled + expert).to(tl.int64)
    for row in range(0, tl.load(ends + expert) - start):
        tl.store(rows + (start + row) * width + column, zero, mask=column < width)
