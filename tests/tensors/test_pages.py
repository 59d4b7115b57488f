"""Pages of the paged activation buffer: rows read back, in any order, by kernels and by plain
torch.
"""

from __future__ import annotations

import itertools
import random
from collections import deque

import pytest
import torch
from torch import Tensor

from app.moe.dispatch import paged_buffer
from app.moe.dispatch.paged_buffer import PagedBuffer, PagedRows
from app.plan.parts.paged_buffer import PlannedPagedBuffer
from tests.cases import chosen

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROWS = 40
WIDTHS = ((4, torch.float32), (24, torch.bfloat16), (100, torch.bfloat16))


def small(pages: int) -> PagedBuffer:
    return PagedBuffer(PlannedPagedBuffer(512, pages), DEVICE)


def kept(pool: PagedBuffer, rows: Tensor, used: int) -> PagedRows:
    """Keep the first `used` rows in the pool."""
    ends_E = torch.tensor([0, used], dtype=torch.int32, device=DEVICE)
    source = PagedRows.of(pool, ends_E, rows)
    source.add_reader(rows)
    return source


def a_while(pool: PagedBuffer, seed: int) -> list[list[list[int]]]:
    """Tensors come and go in random order; what the pool's numbers and pages are after each."""
    random.seed(seed)
    torch.manual_seed(seed)
    alive, seen = deque[tuple[PagedRows, Tensor, int]](), []
    for _ in range(50):
        if alive and random.random() < 0.5:
            alive.rotate(random.randrange(len(alive)))
            source, rows, used = alive.popleft()
            wanted, had = source.pages_M2[1].item(), source.pages_M2[0].item()
            found = source.read()
            assert had in (0, wanted) and found.shape == rows.shape
            assert not had or torch.equal(found[:used], rows[:used])
        else:
            width, dtype = random.choice(WIDTHS)
            rows, used = torch.randn(ROWS, width, device=DEVICE).to(dtype), random.randint(0, ROWS)
            alive.append((kept(pool, rows.clone(), used), rows, used))
        held = [source.pages_M2[2 : 2 + source.pages_M2[0]].tolist() for source, *_ in alive]
        numbers = sorted(itertools.chain(*held))
        assert len(set(numbers)) == len(numbers) and all(n < pool.planned.pages for n in numbers)
        seen.append([pool.state.tolist(), pool.ring_N[:-1].tolist(), *held])
    for source, *_ in alive:
        source.read()
    head, tail, in_use, _ = pool.state.tolist()
    assert tail - head == pool.planned.pages < head and in_use == 0, "more than once around"
    assert sorted(pool.ring_N[:-1].tolist()) == list(range(pool.planned.pages))
    return seen


@pytest.mark.parametrize("pages", chosen([20, 60], [20]))
def test_tensors_in_any_order(pages: int, monkeypatch: pytest.MonkeyPatch):
    """With and without enough pages, by kernels and by plain torch, down to the last page."""
    monkeypatch.setattr(paged_buffer, "usable", lambda *_: False)
    pool = small(pages)
    plain = a_while(pool, 1)
    assert bool(pool.lacks()) == (pages == 20)
    pytest.importorskip("triton")
    if DEVICE.type == "cpu":  # in several blocks
        monkeypatch.setattr("app.kernels.pages.IDS", 16)
        monkeypatch.setattr("app.kernels.pages.WORDS", 64)
        monkeypatch.setattr("app.kernels.pages.MULTIPROCESSORS", 1)
    monkeypatch.setattr(paged_buffer, "usable", lambda *_: True)
    assert a_while(small(pages), 1) == plain


def test_one_tensor_that_several_operations_save():
    pool = small(100)
    rows = torch.randn(ROWS, 300, device=DEVICE)
    source = kept(pool, rows, 30)
    source.add_reader(rows[:, 150:])
    first, second = source.read(), source.read()
    assert first is second and torch.equal(first[:30], rows[:30])
    assert pool.state[2] == 0 and pool.needed() == 71
    with pytest.raises(AssertionError, match="read more often than saved"):
        source.read()


def test_what_was_asked_for_in_vain_is_counted():
    pool = small(10)
    rows = torch.randn(ROWS, 128, device=DEVICE)  # a page each
    sources = [kept(pool, rows, 8), kept(pool, rows, 4), kept(pool, rows, 2)]
    assert [source.pages_M2[0].item() for source in sources] == [8, 0, 2]
    assert bool(pool.lacks()) and pool.needed() == 14
    pool.clear()
    assert not pool.lacks() and torch.equal(kept(pool, rows, 10).read()[:10], rows[:10])
