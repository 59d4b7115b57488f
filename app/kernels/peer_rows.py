"""Exchange of tokens' values between ranks, through addresses of symmetric memory, and sums of what
ranks have written here; rows are moved by `app.kernels.rows`.

Nothing here waits for other ranks: what is read must have been written.

Shapes: P ranks with T tokens each · K experts per token · D width · L experts of a rank.
`addresses_P` (int64, on the device): start of each rank's lists of K. In kernels: BLOCK columns of
a row, PLACES ≥ K, a power of two.
"""

from __future__ import annotations

import torch
from torch import Tensor

from app.kernels.common import jit, tl
from app.kernels.tiling import block_of, cdiv, row_columns

VALUES = 512  # values per program, if rows are short


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


def sum_partials(partial_PTD: Tensor, experts_TK: Tensor, local: int, etp: int) -> Tensor:
    """Return Σ_p partial[p, t] over the ranks p that have an expert of token t, in rank order,
    rounded once: [T, D]. Experts s·L to (s+1)·L are on ranks s·etp to (s+1)·etp.
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


def sum_dots(dots_PTK: Tensor, experts_TK: Tensor, local: int, etp: int) -> Tensor:
    """Return Σ_p dots[p, t, k] over the ranks p that hold a part of choice k's expert, in rank
    order: [T, K]; 0 if no rank does.
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


@jit
def _push_values(
    values: tl.tensor, addresses: tl.tensor, like: tl.tensor, count: int, BLOCK: tl.constexpr
) -> None:
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(values + place, mask=place < count)
    out = tl.load(addresses + tl.program_id(1)).to(tl.pointer_type(like.dtype.element_ty))
    tl.store(out + place, value.to(like.dtype.element_ty), mask=place < count)


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
    share = tl.where(k < K, share, P)  # P stands for no rank
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
