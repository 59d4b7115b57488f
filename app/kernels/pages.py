"""Allocation of pages from a pool on the device, and copies of rows into pages and out.

Free pages stand in a ring: they are taken from its head and put back at its tail. A single program
does either, and kernels run in order on a stream, so there are no atomics. `state`, int64: pages
taken since the start; pages put into the ring since the start (initially all); pages in use; the
most pages ever requested at once, including requests that failed.

Shapes: N pages of W words, int32; M pages that one tensor takes at most. The page table `pages_M2`,
int32 [M + 2], holds how many pages a tensor has, how many it needs, and which.
"""

from __future__ import annotations

import torch
from torch import Tensor

from app.kernels.common import jit, tl
from app.kernels.tiling import MULTIPROCESSORS, cdiv

IDS = 1024  # page numbers moved at once
WORDS = 4096  # of a page copied by a program at once
PER_WARP = 512  # of them: 16 per thread
PROGRAMS = 8  # resident programs per multiprocessor


def take(ring_N: Tensor, state: Tensor, used: Tensor, most: int, row: int, page: int) -> Tensor:
    """Allocate pages for the first `used` rows (int32 [1]) of `row` words: int32 [M + 2], M =
    `most`.

    Allocates none if there are not enough.
    """
    pages_M2 = torch.empty(most + 2, dtype=torch.int32, device=ring_N.device)
    _take[(1,)](ring_N, state, used, pages_M2, len(ring_N), row, page=page, BLOCK=IDS)
    return pages_M2


def put_back(ring_N: Tensor, state: Tensor, pages_M2: Tensor) -> None:
    """Free the pages of a page table."""
    _put_back[(1,)](ring_N, state, pages_M2, len(ring_N), BLOCK=IDS)


def copy_in(rows: Tensor, pool_NW: Tensor, pages_M2: Tensor) -> None:
    """Copy rows, contiguous, to the pages, as many words as the pages hold."""
    _launch(rows, pool_NW, pages_M2, inwards=True)


def copy_out(rows: Tensor, pool_NW: Tensor, pages_M2: Tensor) -> None:
    """Copy the pages back to the rows; later rows are unchanged."""
    _launch(rows, pool_NW, pages_M2, inwards=False)


def _launch(rows: Tensor, pool_NW: Tensor, pages_M2: Tensor, *, inwards: bool) -> None:
    flat = rows.view(-1).view(torch.int32)
    page = pool_NW.shape[1]
    block = min(WORDS, page)
    programs = min(MULTIPROCESSORS * PROGRAMS, cdiv(flat.numel(), block))
    if programs:
        _copy[(programs,)](
            flat,
            pool_NW,
            pages_M2,
            flat.numel(),
            page=page,
            INWARDS=inwards,
            BLOCK=block,
            num_warps=max(1, block // PER_WARP),
        )


@jit
def _take(
    ring: tl.tensor,
    state: tl.tensor,
    used: tl.tensor,
    pages: tl.tensor,
    total: int,
    row: int,
    page: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    head = tl.load(state)
    words = tl.load(used).to(tl.int64) * row
    wanted = (words + page - 1) // page
    in_use = tl.load(state + 2) + wanted
    count = tl.where(wanted <= tl.load(state + 1) - head, wanted, 0)
    tl.store(state, head + count)
    tl.store(state + 2, in_use)
    tl.store(state + 3, tl.maximum(tl.load(state + 3), in_use))
    tl.store(pages, count.to(tl.int32))
    tl.store(pages + 1, wanted.to(tl.int32))
    for start in range(0, count.to(tl.int32), BLOCK):
        place = start + tl.arange(0, BLOCK)
        number = tl.load(ring + (head + place) % total, mask=place < count)
        tl.store(pages + 2 + place, number, mask=place < count)


@jit
def _put_back(
    ring: tl.tensor, state: tl.tensor, pages: tl.tensor, total: int, BLOCK: tl.constexpr
) -> None:
    tail = tl.load(state + 1)
    count = tl.load(pages)
    tl.store(state + 1, tail + count)
    tl.store(state + 2, tl.load(state + 2) - tl.load(pages + 1))
    for start in range(0, count, BLOCK):
        place = start + tl.arange(0, BLOCK)
        number = tl.load(pages + 2 + place, mask=place < count)
        tl.store(ring + (tail + place) % total, number, mask=place < count)


@jit
def _copy(
    rows: tl.tensor,
    pool: tl.tensor,
    pages: tl.tensor,
    words: int,
    page: tl.constexpr,
    INWARDS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    each: tl.constexpr = page // BLOCK  # both are powers of two
    for block in range(tl.program_id(0), tl.load(pages) * each, tl.num_programs(0)):
        number = tl.load(pages + 2 + block // each).to(tl.int64)
        word = tl.arange(0, BLOCK)
        # a tensor may have more than 2³¹ words
        here = (tl.zeros((1,), tl.int64) + block) * BLOCK + word
        there = number * page + block % each * BLOCK + word
        if INWARDS:
            tl.store(pool + there, tl.load(rows + here, mask=here < words), mask=here < words)
        else:
            tl.store(rows + here, tl.load(pool + there, mask=here < words), mask=here < words)
