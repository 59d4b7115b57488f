"""Rows of this rank's experts for the choices of all ranks: a counting sort in two launches,
without atomics. Blocks of tokens count their choices of each expert; then every block adds up the
counts of the blocks before it, and places its own tokens.

Shapes: N tokens of all ranks · K experts per token · L experts of this rank · R rows. In kernels: B
tokens of a block, E + REST ≥ L and PLACES ≥ K, powers of two; C blocks of tokens, of which CHUNK at
a time are added up.
"""

from __future__ import annotations

import torch
from torch import Tensor

from app.kernels.common import jit, tl
from app.kernels.tiling import MULTIPROCESSORS, block_of, cdiv

TILE = 16384  # (token, expert) pairs of one block at most
COUNTS = 8192  # counts read at once
WARP = 32  # tokens of a block at least, one per thread
PER_WARP = 256  # pairs: 8 per thread
ADDED = 2**24  # counts that all blocks read together: 64 MB, mostly from caches


def counts_fast(tokens: int, local: int) -> bool:
    """Return whether adding up the blocks before each block, quadratic in their number, is cheap;
    otherwise a sort is faster.
    """
    return _blocks(tokens, local)[1] ** 2 * block_of(local) <= ADDED


def _blocks(tokens: int, local: int) -> tuple[int, int]:
    """Return tokens per block, and blocks: one per multiprocessor if that fits."""
    wanted = max(WARP, block_of(cdiv(tokens, MULTIPROCESSORS)))
    block = min(wanted, max(1, TILE // block_of(local)))
    return block, max(1, cdiv(tokens, block))  # one is needed for the ends


def block_sizes(tokens: int, local: int, blocks: int) -> dict[str, int]:
    """Return the compile-time sizes and warps of kernels with one block of tokens per program."""
    block, padded = _blocks(tokens, local)[0], block_of(local)
    chunk = min(block_of(blocks), max(1, COUNTS // padded))
    warps = min(16, max(4, block * padded // PER_WARP))
    return {"B": block, "E": padded, "CHUNK": chunk, "num_warps": warps}


def _two_tiles(sizes: dict[str, int], local: int) -> dict[str, int]:
    """Return these sizes with E experts and then REST more, if that is less than one power of two:
    a few slots after 64 experts do not double the work.
    """
    half = sizes["E"] // 2
    rest = block_of(local - half) if local > half else 0
    if 0 < rest < half:
        return {**sizes, "E": half, "REST": rest}
    return {**sizes, "REST": 0}


def count_choices(chosen_NK: Tensor, first: int, local: int) -> Tensor:
    """Count the choices of each of the `local` experts from id `first` on, per block: int32 [C, L].

    A token's ids must differ.
    """
    tokens, top_k = chosen_NK.shape
    blocks = _blocks(tokens, local)[1]
    counts_CL = torch.empty(blocks, local, dtype=torch.int32, device=chosen_NK.device)
    sizes = _two_tiles(block_sizes(tokens, local, blocks), local)
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
    token_of_R: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the row of each choice, the end of each of the `local` experts from id `first` on, and
    the number of rows needed: int32 [N, K], [L], [1].

    Expert-major, tokens ascending. A choice of no expert here, or beyond `num_rows`, has the row
    `num_rows`; ends are at most that. A token's ids must differ. Writes the token of each used row
    to `token_of_R` if given.
    """
    tokens, top_k = chosen_NK.shape
    chosen_NK = chosen_NK.contiguous()
    counts_CL = count_choices(chosen_NK, first, local)
    blocks = len(counts_CL)
    row_of_NK, ends_L, needed = (
        torch.empty(shape, dtype=torch.int32, device=chosen_NK.device)
        for shape in (chosen_NK.shape, (local,), (1,))
    )
    _place[(blocks,)](
        chosen_NK,
        counts_CL,
        row_of_NK,
        ends_L,
        needed,
        token_of_R,
        tokens,
        first,
        num_rows,
        blocks,
        local=local,
        K=top_k,
        PLACES=block_of(top_k),
        **_two_tiles(block_sizes(tokens, local, blocks), local),
    )
    return row_of_NK, ends_L, needed


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
    """Return 1 + k if an expert here is a token's k-th choice, otherwise 0: [E, B], so that threads
    lie along the tokens.
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
    counts: tl.tensor,
    blocks: int,
    begin: tl.constexpr,
    local: tl.constexpr,
    CHUNK: tl.constexpr,
    E: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return the choices of each expert from `begin` on, in all blocks and in those before this
    program's: [E], [E].
    """
    expert = begin + tl.arange(0, E)
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
    REST: tl.constexpr,
) -> None:
    _count_tile(chosen, counts, tokens, first, begin=0, local=local, K=K, B=B, E=E)
    if REST > 0:
        _count_tile(chosen, counts, tokens, first, begin=E, local=local, K=K, B=B, E=REST)


@jit
def _count_tile(
    chosen: tl.tensor,
    counts: tl.tensor,
    tokens: int,
    first: int,
    begin: tl.constexpr,
    local: tl.constexpr,
    K: tl.constexpr,
    B: tl.constexpr,
    E: tl.constexpr,
) -> None:
    """Count the experts from `begin` on."""
    found = chosen_of_block(chosen, tokens, first + begin, local=local - begin, K=K, B=B, E=E)
    expert = begin + tl.arange(0, E)
    count = tl.sum((found > 0).to(tl.int32), axis=1)
    tl.store(counts + tl.program_id(0) * local + expert, count, mask=expert < local)


@jit
def _place(
    chosen: tl.tensor,
    counts: tl.tensor,
    row_of: tl.tensor,
    ends: tl.tensor,
    needed: tl.tensor,
    token_of: tl.tensor,
    tokens: int,
    first: int,
    num_rows: int,
    blocks: int,
    local: tl.constexpr,
    K: tl.constexpr,
    PLACES: tl.constexpr,
    CHUNK: tl.constexpr,
    B: tl.constexpr,
    E: tl.constexpr,
    REST: tl.constexpr,
) -> None:
    this = tl.program_id(0)
    used = _place_tile(
        chosen,
        counts,
        row_of,
        ends,
        token_of,
        tokens,
        first,
        num_rows,
        blocks,
        0,
        begin=0,
        local=local,
        K=K,
        CHUNK=CHUNK,
        B=B,
        E=E,
    )
    if REST > 0:
        used += _place_tile(
            chosen,
            counts,
            row_of,
            ends,
            token_of,
            tokens,
            first,
            num_rows,
            blocks,
            used,
            begin=E,
            local=local,
            K=K,
            CHUNK=CHUNK,
            B=B,
            E=REST,
        )
    if this == 0:
        tl.store(needed, used)
    token = (this * B + tl.arange(0, B))[:, None]
    k = tl.arange(0, PLACES)[None, :]
    real = (token < tokens) & (k < K)
    choice = tl.load(chosen + token * K + k, mask=real, other=0).to(tl.int32) - first
    elsewhere = (choice < 0) | (choice >= local)
    tl.store(row_of + token * K + k, tl.zeros_like(choice) + num_rows, mask=real & elsewhere)


@jit
def _place_tile(
    chosen: tl.tensor,
    counts: tl.tensor,
    row_of: tl.tensor,
    ends: tl.tensor,
    token_of: tl.tensor,
    tokens: int,
    first: int,
    num_rows: int,
    blocks: int,
    taken: tl.tensor,
    begin: tl.constexpr,
    local: tl.constexpr,
    K: tl.constexpr,
    CHUNK: tl.constexpr,
    B: tl.constexpr,
    E: tl.constexpr,
) -> tl.tensor:
    """Place the rows of the experts from `begin` on, after those `taken` by others; return their
    number.
    """
    this = tl.program_id(0)
    expert = begin + tl.arange(0, E)
    total, before = sums_of_blocks(counts, blocks, begin=begin, local=local, CHUNK=CHUNK, E=E)
    end = taken + tl.cumsum(total, axis=0)
    start = end - total
    if this == 0:
        tl.store(ends + expert, tl.minimum(end, num_rows), mask=expert < local)
    found = chosen_of_block(chosen, tokens, first + begin, local=local - begin, K=K, B=B, E=E)
    own = (found > 0).to(tl.int32)
    row = (start + before)[:, None] + tl.cumsum(own, axis=1) - own
    token = this * B + tl.arange(0, B)
    place = token[None, :] * K + found - 1
    tl.store(row_of + place, tl.minimum(row, num_rows), mask=found > 0)
    if token_of is not None:
        of_row = (token[None, :] + tl.zeros_like(row)).to(token_of.dtype.element_ty)
        tl.store(token_of + row, of_row, mask=(found > 0) & (row < num_rows))
    return tl.sum(total, axis=0)
