"""Combine kernels: sums of expert rows, written through addresses to the tokens' source ranks
(`app.kernels.peer_rows`).

Shapes: P ranks with T tokens each · N = P·T tokens, in rank order · K experts per token · D width ·
R rows here; a choice without a row has the row R · L experts of a rank. In kernels: BLOCK columns
of a row, PLACES ≥ K, a power of two.
"""

from __future__ import annotations

import torch
from torch import Tensor

from app.kernels.common import jit, tl
from app.kernels.peer_rows import VALUES, token_of
from app.kernels.tiling import block_of, cdiv, row_columns


def push_sums(
    rows_RD: Tensor, probs_NK: Tensor | None, row_of_NK: Tensor, addresses_P: Tensor, rank: int = 0
) -> None:
    """Write Σ_k probs[n, k] · rows[row_of[n, k]] of token n to its address.

    Adds in order of k, rounds to the rows' dtype; probabilities are fp32, None means 1. Writes
    nothing for a token without a row.
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
        enable_fp_fusion=False,  # no FMA: round each multiplication before adding, as torch does
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
    owner, token = token_of(ranks, rank, tokens)
    choice = (owner * tokens + token) * K
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    lowest = num_rows
    parts = ()  # type: tuple[tl.tensor, ...]
    for k in tl.static_range(K):  # issue all loads before the first is used
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
