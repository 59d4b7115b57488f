"""Kernels that move rows between ranks at small, odd sizes, interpreted where there is no GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.cases import chosen
from tests.moe_kernels import without_kernels
from tests.peer_kernels import CHECKS, Drawn, check_expert_rows, draw_peers

pytest.importorskip("triton")
plain = pytest.fixture(autouse=True)(without_kernels)
# ranks, tokens of each, experts, experts per token, width, etp
SIZES = [(3, 5, 6, 3, 6, 1), (4, 3, 8, 5, 16, 2), (2, 2, 4, 1, 4100, 1), (1, 4, 3, 2, 5, 1)]


@pytest.mark.every(20)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", chosen([(s,) for s in SIZES], [(s,) for s in SIZES[1:3]]), ids=str)
def test_rows_of_peers(
    size: tuple[int, int, int, int, int, int], dtype: torch.dtype, check: Callable[[Drawn], None]
):
    ranks, tokens, experts, top_k, width, etp = size
    check(draw_peers(ranks, tokens, experts, top_k=top_k, width=width, dtype=dtype, etp=etp))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_rank_without_rows(check: Callable[[Drawn], None]):
    drawn = draw_peers(2, 3, 4, 2, 8, dtype=torch.float32, spare=0)
    nothing = torch.full_like(drawn.row_of_NK, 0)
    placed = type(drawn.placed)(nothing, drawn.placed.ends_E * 0, drawn.placed.needed)
    empty = Drawn(
        2, 1, drawn.local, drawn.experts_NK, drawn.x_ND, drawn.probs_NK, placed, drawn.rows_RD[:0]
    )
    check(empty)


FEW, MANY = (70, 12, 3, 5), (300, 310, 8, 300)
SLOTS = (90, 20, 4, 10)  # two more than a power of two


@pytest.mark.every(10)
@pytest.mark.parametrize(
    "size",
    chosen([(FEW,), (MANY,), ((7, 3, 3, 3),), ((0, 4, 2, 2),), (SLOTS,)], [(FEW,), (SLOTS,)]),
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.int16, torch.int32], ids=str)
def test_offsets(
    size: tuple[int, int, int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(
        "app.kernels.expert_rows.COUNTS", 16
    )  # blocks are added up in several turns
    tokens, experts, top_k, local = size
    check_expert_rows(tokens, experts, top_k, local=local, dtype=dtype)
