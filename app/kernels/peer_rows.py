"""Dispatch kernels: rows of all ranks' tokens to the rows of this rank's experts and back, through
addresses of symmetric memory, or of parts of a local tensor. So all transports share the
arithmetic, bit for bit.

Sums (`app.kernels.peer_sums`) are fp32 in a fixed order. Rows without a choice are neither read nor
written. Nothing here waits for other ranks: what is read must have been written. Kernels may also
write rows to `fp8_rows`, with the bits that `app.kernels.quantise` would give.

Shapes: P ranks with T tokens each · N = P·T tokens, in rank order · K experts per token · D width ·
R rows here; a choice without a row has the row R · L experts of a rank. `addresses_P` (int64, on
the device): start of each rank's T rows or lists of K, aligned to 16 bytes. In kernels: BLOCK
columns of a row, PLACES ≥ K, a power of two.
"""

from __future__ import annotations

import torch
from torch import Tensor

from app.kernels.common import jit, tl
from app.kernels.quantise import Fp8Rows, in_fp8, reciprocal, scale_for
from app.kernels.tiling import block_of, cdiv, row_columns, row_warps

WIDE_BLOCK = 4096  # if a program has all columns, one block at a time
SHARE = 8  # columns of a block per thread
VALUES = 512  # values per program, if rows are short
# of a thread, where 8 values of 16 bits of each of 8 rows fit: 24 warps on a multiprocessor
REGISTERS = 80


def addresses_in(values_N: Tensor) -> Tensor:
    """Return addresses of rows in one contiguous tensor, as if of one rank: int64 [1].

    Never synchronizes; valid as long as the tensor lives.
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
    fp8_rows: Fp8Rows | None = None,
) -> Tensor:
    """Return rows[row_of[n, k]] = the row of token n: [R, D]. Each token with a row is read once.

    Programs start with the tokens of `rank` and go from rank to rank, so that all links are in use.
    """
    rows_RD = torch.empty(num_rows, width, dtype=dtype, device=row_of_NK.device)
    grid, block, warps = row_columns(len(row_of_NK), width)
    if fp8_rows is not None:
        # a row's scale covers all its columns, so one program takes the whole row
        grid, block = (len(row_of_NK), 1), block_of(width)
        warps = row_warps(block, 16)
    data_RD, factors_R = (None, None) if fp8_rows is None else fp8_rows
    _pull[grid](
        addresses=addresses_P,
        row_of=row_of_NK,
        rows=rows_RD,
        data=data_RD,
        factors=factors_R,
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


def pull_gradients(
    addresses_P: Tensor,
    rows_RD: Tensor,
    probs_NK: Tensor,
    row_of_NK: Tensor,
    dots_addresses_P: Tensor,
    rank: int = 0,
    fp8_rows: Fp8Rows | None = None,
) -> Tensor:
    """Return the rows' gradients of the sums that `push_sums` writes, given g of token n at its
    address: probs[n, k] · g[n], rounded once, [R, D]. Writes the probabilities' gradients, <g[n],
    rows[row_of[n, k]]> in fp32, to the token's list of K at the other address.

    A choice without a row has neither.
    """
    assert probs_NK.dtype == torch.float32, probs_NK.dtype
    num_rows, width = rows_RD.shape
    top_k = row_of_NK.shape[1]
    grad_RD = torch.empty_like(rows_RD, memory_format=torch.contiguous_format)
    block = min(block_of(width), WIDE_BLOCK)
    warps = row_warps(block, 16)
    fits = warps <= 8 and top_k <= 8 and rows_RD.dtype.itemsize == 2
    data_RD, factors_R = (None, None) if fp8_rows is None else fp8_rows
    _pull_gradients[(len(row_of_NK),)](
        addresses=addresses_P,
        rows=rows_RD.contiguous(),
        weights=probs_NK.contiguous(),
        row_of=row_of_NK,
        grad_rows=grad_RD,
        data=data_RD,
        factors=factors_R,
        dots_addresses=dots_addresses_P,
        ranks=len(addresses_P),
        rank=rank,
        tokens=len(row_of_NK) // len(addresses_P),
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
    )
    return grad_RD


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


@jit
def token_of(ranks: int, rank: int, tokens: int) -> tuple[tl.tensor, tl.tensor]:
    """Return the rank and the token of this program: neighbouring programs have tokens of different
    ranks.
    """
    place = tl.program_id(0)
    return (place + rank) % ranks, (place // ranks).to(tl.int64)


@jit
def _places(
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
def _pull(
    addresses: tl.tensor,
    row_of: tl.tensor,
    rows: tl.tensor,
    data: tl.tensor,
    factors: tl.tensor,
    ranks: int,
    rank: int,
    tokens: int,
    num_rows: int,
    width: int,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    owner, token = token_of(ranks, rank, tokens)
    choice = (owner * tokens + token) * K
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    places, lowest = _places(row_of + choice, num_rows, K=K)
    x = tl.load(addresses + owner).to(tl.pointer_type(rows.dtype.element_ty))
    x = tl.multiple_of(x, 16)
    mine = (column < width) & (lowest < num_rows)
    value = tl.load(x + token * width + column, mask=mine, other=0.0)
    if data is not None:
        wide = value.to(tl.float32)
        scale = scale_for(tl.max(tl.abs(wide), axis=0))
        narrow = in_fp8(wide, scale)
        factor = reciprocal(scale)
    for k in tl.static_range(K):
        row = places[k]
        valid = (column < width) & (row < num_rows)
        tl.store(rows + row * width + column, value, mask=valid)
        if data is not None:
            tl.store(data + row * width + column, narrow, mask=valid)
            tl.store(factors + row, factor, mask=row < num_rows)


@jit
def _pull_gradients(
    addresses: tl.tensor,
    rows: tl.tensor,
    weights: tl.tensor,
    row_of: tl.tensor,
    grad_rows: tl.tensor,
    data: tl.tensor,
    factors: tl.tensor,
    dots_addresses: tl.tensor,
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
) -> None:
    owner, token = token_of(ranks, rank, tokens)
    choice = (owner * tokens + token) * K
    places, lowest = _places(row_of + choice, num_rows, K=K)
    grad = tl.load(addresses + owner).to(tl.pointer_type(rows.dtype.element_ty))
    grad = tl.multiple_of(grad, 16)
    place = tl.arange(0, PLACES)
    row = tl.load(row_of + choice + place, mask=place < K, other=num_rows)
    owned = (place < K) & (row < num_rows)
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
            probs = tl.load(weights + choice + place, mask=place < K, other=0.0).to(tl.float32)
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
                scale = tl.sum(tl.where(place == k, scales, 0.0), axis=0)
                narrow = in_fp8(made.to(tl.float32), scale)
                tl.store(data + places[k] * WIDTH + column, narrow, mask=valid)
            gemm = tl.reshape(values[k].to(tl.float32) * g, (BLOCK // SHARE, SHARE))
            sums += (gemms[k] + tl.sum(gemm, axis=1),)
        gemms = sums
    found = _sums(gemms, COUNT=BLOCK // SHARE, K=K, LEVELS=LEVELS)
    dots = tl.load(dots_addresses + owner).to(tl.pointer_type(tl.float32))
    tl.store(dots + token * K + place, found, mask=owned)


@jit
def _push_values(
    values: tl.tensor, addresses: tl.tensor, like: tl.tensor, count: int, BLOCK: tl.constexpr
) -> None:
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(values + place, mask=place < count)
    out = tl.load(addresses + tl.program_id(1)).to(tl.pointer_type(like.dtype.element_ty))
    tl.store(out + place, value.to(like.dtype.element_ty), mask=place < count)
