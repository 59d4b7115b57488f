"""Rows of this rank's experts for the choices of all ranks: a counting sort in two launches,
without atomics. Blocks of tokens count their choices of each expert; then every block adds up what
the blocks before it have, and places its own tokens.

Shapes: N tokens of all ranks · K experts per token · L experts of this rank · R rows. In kernels: B
tokens of a block, E ≥ L and PLACES ≥ K, powers of two; C blocks of tokens, of which CHUNK at a time
are added up.
"""

from __future__ import annotations

import torch
from torch import Tensor

from app.kernels.common import jit, tl
from app.kernels.tiling import MULTIPROCESSORS, block_of, cdiv

TILE = 16384  # (token, expert) pairs of one block at most
COUNTS = 8192  # counts that are read at once
WARP = 32  # tokens of a block at least: a thread each
PER_WARP = 256  # pairs: 8 per thread
ADDED = 2**24  # counts that all blocks read: 64 MB, mostly out of caches


def counts_fast(tokens: int, local: int) -> bool:
    """Whether adding up the blocks before each block, work that grows with their square, is little:
    a sort is faster otherwise.
    """
    return _blocks(tokens, local)[1] ** 2 * block_of(local) <= ADDED


def _blocks(tokens: int, local: int) -> tuple[int, int]:
    """Tokens of a block, and blocks: one for each multiprocessor, where that fits."""
    wanted = max(WARP, block_of(cdiv(tokens, MULTIPROCESSORS)))
    block = min(wanted, max(1, TILE // block_of(local)))
    return block, max(1, cdiv(tokens, block))  # one is needed for the ends


def block_sizes(tokens: int, local: int, blocks: int) -> dict[str, int]:
    """What kernels that have a block of tokens each are compiled for, with their warps."""
    block, padded = _blocks(tokens, local)[0], block_of(local)
    chunk = min(block_of(blocks), max(1, COUNTS // padded))
    warps = min(16, max(4, block * padded // PER_WARP))
    return {"B": block, "E": padded, "CHUNK": chunk, "num_warps": warps}


def count_choices(chosen_NK: Tensor, first: int, local: int) -> Tensor:
    """Choices of each of the `local` experts from id `first` on, by block of tokens: int32 [C, L].

    A token's ids must differ.
    """
    tokens, top_k = chosen_NK.shape
    blocks = _blocks(tokens, local)[1]
    counts_CL = torch.empty(blocks, local, dtype=torch.int32, device=chosen_NK.device)
    sizes = block_sizes(tokens, local, blocks)
    del sizes["CHUNK"]
    _count[(blocks,)](
        chosen_NK.contiguous(), counts_CL, tokens, first, local=local, K=top_k, **sizes
    )
    return counts_CL


def expert_rows(
    chosen_NK: Tensor,
    first: int,
    local: int,
    num_rows: int,
    multiple: int,
    token_of_R: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Row of each choice, end and first unfilled row of each of the `local` experts from id `first`
    on, and how many rows would be needed: int32 [N, K], [L], [L], [1].

    Expert-major, tokens ascending; an expert's rows start at a multiple of `multiple`. `num_rows`
    for a choice of no expert here, or beyond; ends are at most that. A token's ids must differ. The
    token of each row that a choice has is written to `token_of_R`, where that is given.
    """
    tokens, top_k = chosen_NK.shape
    chosen_NK = chosen_NK.contiguous()
    counts_CL = count_choices(chosen_NK, first, local)
    blocks = len(counts_CL)
    row_of_NK, ends_L, filled_L, needed = (
        torch.empty(shape, dtype=torch.int32, device=chosen_NK.device)
        for shape in (chosen_NK.shape, (local,), (local,), (1,))
    )
    _place[(blocks,)](
        chosen_NK,
        counts_CL,
        row_of_NK,
        ends_L,
        filled_L,
        needed,
        token_of_R,
        tokens,
        first,
        num_rows,
        blocks,
        local=local,
        multiple=multiple,
        K=top_k,
        PLACES=block_of(top_k),
        **block_sizes(tokens, local, blocks),
    )
    return row_of_NK, ends_L, filled_L, needed


@jit
def chosen_of_block(
    chosen: tl.tensor,
    tokens: int,
    first: int,
    local: tl.constexpr,
    K: tl.constexpr,
    B: tl.constexpr,
    E: tl.constexpr,
) -> tl.tensor:
    """1 + k where an expert here is a token's k-th choice, 0 elsewhere: [E, B], so that threads
    lie side by side along the tokens.
    """
    token = tl.program_id(0) * B + tl.arange(0, B)
    expert = tl.arange(0, E)[:, None]
    found = tl.zeros((E, B), tl.int32)
    for k in tl.static_range(K):
        choice = tl.load(chosen + token * K + k, mask=token < tokens, other=-1).to(tl.int32) - first
        found = tl.where((choice[None, :] == expert) & (expert < local), k + 1, found)
    return tl.where((token < tokens)[None, :], found, 0)


@jit
def sums_of_blocks(
    counts: tl.tensor, blocks: int, local: tl.constexpr, CHUNK: tl.constexpr, E: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Choices of each expert, and those in the blocks before this program's: [E], [E]."""
    expert = tl.arange(0, E)
    every = tl.zeros((CHUNK, E), tl.int32)
    before = tl.zeros((CHUNK, E), tl.int32)
    for start in range(0, blocks, CHUNK):
        block = (start + tl.arange(0, CHUNK))[:, None]
        there = (block < blocks) & (expert < local)[None, :]
        count = tl.load(counts + block * local + expert[None, :], mask=there, other=0)
        every += count
        before += tl.where(block < tl.program_id(0), count, 0)
    return tl.sum(every, axis=0), tl.sum(before, axis=0)


@jit
def _count(
    chosen: tl.tensor,
    counts: tl.tensor,
    tokens: int,
    first: int,
    local: tl.constexpr,
    K: tl.constexpr,
    B: tl.constexpr,
    E: tl.constexpr,
) -> None:
    found = chosen_of_block(chosen, tokens, first, local=local, K=K, B=B, E=E)
    expert = tl.arange(0, E)
    count = tl.sum((found > 0).to(tl.int32), axis=1)
    tl.store(counts + tl.program_id(0) * local + expert, count, mask=expert < local)


@jit
def _place(
    chosen: tl.tensor,
    counts: tl.tensor,
    row_of: tl.tensor,
    ends: tl.tensor,
    filled: tl.tensor,
    needed: tl.tensor,
    token_of: tl.tensor,
    tokens: int,
    first: int,
    num_rows: int,
    blocks: int,
    local: tl.constexpr,
    multiple: tl.constexpr,
    K: tl.constexpr,
    PLACES: tl.constexpr,
    CHUNK: tl.constexpr,
    B: tl.constexpr,
    E: tl.constexpr,
) -> None:
    this = tl.program_id(0)
    expert = tl.arange(0, E)
    total, before = sums_of_blocks(counts, blocks, local=local, CHUNK=CHUNK, E=E)
    space = (total + multiple - 1) // multiple * multiple
    end = tl.cumsum(space, axis=0)
    begin = end - space
    if this == 0:
        own = expert < local
        tl.store(ends + expert, tl.minimum(end, num_rows), mask=own)
        tl.store(filled + expert, tl.minimum(begin + total, num_rows), mask=own)
        tl.store(needed, tl.sum(space, axis=0))
    found = chosen_of_block(chosen, tokens, first, local=local, K=K, B=B, E=E)
    own = (found > 0).to(tl.int32)
    row = (begin + before)[:, None] + tl.cumsum(own, axis=1) - own
    token = this * B + tl.arange(0, B)
    place = token[None, :] * K + found - 1
    tl.store(row_of + place, tl.minimum(row, num_rows), mask=found > 0)
    if token_of is not None:
        of_row = (token[None, :] + tl.zeros_like(row)).to(token_of.dtype.element_ty)
        tl.store(token_of + row, of_row, mask=(found > 0) & (row < num_rows))
    token = token[:, None]
    k = tl.arange(0, PLACES)[None, :]
    real = (token < tokens) & (k < K)
    choice = tl.load(chosen + token * K + k, mask=real, other=0).to(tl.int32) - first
    elsewhere = (choice < 0) | (choice >= local)
    tl.store(row_of + token * K + k, tl.zeros_like(choice) + num_rows, mask=real & elsewhere)
