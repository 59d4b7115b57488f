"""Kernels of the loss and of the experts' rows at small, odd sizes, interpreted where there is
no GPU.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from app.kernels import cross_entropy, rows
from app.kernels.grouped_gradient import add_grouped_gradient
from app.kernels.routing.top_experts import top_experts
from app.moe.permute import sort_by_expert
from tests.cases import chosen
from tests.moe_kernels import (
    DEVICE,
    check_gradients,
    check_grouped_gradient,
    check_into_gradient,
    check_spread,
    check_statistics,
    check_sums,
    check_top_experts,
    draw_rows,
    without_kernels,
)

pytest.importorskip("triton")
plain = pytest.fixture(autouse=True)(without_kernels)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@pytest.mark.cover(1)
@DTYPES
@pytest.mark.parametrize(("tokens", "vocabulary", "apart"), [(5, 23, 0), (3, 8200, 24), (4, 1, 0)])
def test_statistics_and_gradient_of_the_loss(
    tokens: int, vocabulary: int, apart: int, dtype: torch.dtype
):
    check_statistics(tokens, vocabulary, dtype, apart=apart)
    check_into_gradient(tokens, vocabulary, dtype, apart=apart)


def test_ignored_labels_have_no_gradient():
    check_into_gradient(4, 40, torch.bfloat16, ignored=True)
    none = torch.zeros(0, 40, device=DEVICE)
    empty = none[:, 0]
    assert cross_entropy.statistics(none, empty.long()).shape == (3, 0)
    cross_entropy.into_gradient(none, empty.long(), empty, weight_C=empty)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter
def test_extreme_logits():
    logits = torch.tensor(
        [[-3e38, 3e38, 0.0], [float("-inf"), 1.0, 1.0], [float("nan"), 1.0, 2.0]], device=DEVICE
    )
    found = cross_entropy.statistics(logits, torch.tensor([0, 1, 2], device=DEVICE))
    assert found[0, :2].tolist() == logits[:2, 1].tolist() and found[1, :2].tolist() == [1.0, 2.0]
    assert found[1, 2].isnan()


SIZES = [(7, 3, 5, 6), (5, 1, 2, 1), (4, 6, 9, 2100), (0, 2, 4, 6)]


@pytest.mark.cover(1)
@DTYPES
@pytest.mark.parametrize("drops", [False, True], ids=["all kept", "drops"])
@pytest.mark.parametrize(
    "size",
    chosen([(size,) for size in SIZES], [(size,) for size in SIZES if size[-1] < 2000]),
    ids=str,
)
def test_rows(size: tuple[int, int, int, int], drops: bool, dtype: torch.dtype):
    drawn = draw_rows(*size, dtype, drops)
    for check in (check_spread, check_sums, check_gradients):
        check(drawn)


@pytest.mark.every(2)
@pytest.mark.parametrize("rows_per_expert", [7, 9])
def test_rows_of_filled_experts(rows_per_expert: int):
    drawn = draw_rows(
        7, 3, 5, width=6, dtype=torch.bfloat16, drops=True, rows_per_expert=rows_per_expert
    )
    assert len(drawn.owned_R) == 5 * rows_per_expert and not drawn.owned_R.all()
    for check in (check_spread, check_sums, check_gradients):
        check(drawn)


def test_rows_left_out_are_not_written():
    drawn = draw_rows(9, 3, 5, width=6, dtype=torch.float32, drops=True)
    used = int(drawn.owned_R.sum())
    record = dataclasses.replace(drawn.record, token_of_row_R=drawn.record.token_of_row_R[:used])
    short = dataclasses.replace(drawn, record=record, owned_R=drawn.owned_R[:used])
    assert used < 27 and short.owned_R.all()
    for check in (check_spread, check_sums, check_gradients):
        check(short)


def test_everything_may_be_dropped():
    experts_TK = torch.full((4, 2), 3, device=DEVICE)
    record = sort_by_expert(experts_TK, 3, True)
    x_TD, none = torch.randn(4, 5, device=DEVICE), torch.zeros(0, 5, device=DEVICE)
    row_of_TK, ones_TK = record.row_of_TK, torch.ones(4, 2, device=DEVICE)
    assert rows.spread_rows(x_TD, row_of_TK, 0).shape == (0, 5)
    assert rows.sum_rows(none, row_of_TK, None, torch.float32).eq(0).all()
    grad_RD, dots_TK = rows.combine_gradients(x_TD, none, ones_TK, row_of_TK)
    assert grad_RD.shape == (0, 5) and dots_TK.eq(0).all()


def test_strided_and_expanded_inputs():
    drawn = draw_rows(6, 2, 4, width=8, dtype=torch.bfloat16)
    record, wide = drawn.record, torch.randn(6, 16, device=DEVICE).bfloat16()
    for x_TD in (wide[:, ::2], wide[:1, :8].expand(6, 8)):
        changed = dataclasses.replace(drawn, x_TD=x_TD, probs_TK=drawn.probs_TK.T.contiguous().T)
        check_spread(changed)
        check_gradients(changed)
    assert not changed.probs_TK.is_contiguous() and len(record.token_of_row_R) == 12


@pytest.mark.parametrize(
    ("num_experts", "drops"), [(5, True), (256, False), (300, True), (40000, False)]
)
def test_narrow_ids_sort_as_wide_ones(num_experts: int, drops: bool):
    torch.manual_seed(4)
    experts_TK = torch.randint(0, num_experts + drops, (70, 4), device=DEVICE)
    record = sort_by_expert(experts_TK, num_experts, drops)
    sorted_R, places_R = experts_TK.flatten().sort(stable=True)
    assert torch.equal(record.token_of_row_R, places_R // 4)
    assert torch.equal(experts_TK.flatten()[record.row_of_TK.flatten().argsort()], sorted_R)
    assert (
        record.ends_E.tolist() == [int((sorted_R <= e).sum()) for e in range(num_experts)]
        if num_experts < 400
        else True
    )


@pytest.mark.cover(1)
@pytest.mark.parametrize(("width", "columns"), [(40, 136), (128, 8), (8, 264)])
@pytest.mark.parametrize("counts", [[5, 0, 70, 32, 3], [0, 0, 33], [0, 0]], ids=str)
def test_grouped_gradient(counts: list[int], width: int, columns: int):
    for spare in (0, 3):
        # Triton's interpreter multiplies bfloat16 wrongly
        check_grouped_gradient(counts, width, columns, dtype=torch.float16, spare=spare)


@pytest.mark.cover(1)
@pytest.mark.parametrize(("first", "adds"), [(2, True), (0, False), (1, False), (4, False)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_grouped_gradient_of_some_experts(first: int, adds: bool, dtype: torch.dtype):
    given = {"width": 40, "columns": 136, "dtype": dtype}
    check_grouped_gradient([5, 0, 70, 32, 3], spare=3, first=first, adds=adds, **given)
    if not adds:
        counts = [5, 0, 70, 32, 3]
        check_grouped_gradient(counts, spare=3, first=first, adds=False, fills=True, **given)


def test_grouped_gradient_without_memory_for_rows():
    rows_TI, grad_TO = torch.empty(0, 8).half(), torch.empty(0, 16).half()
    ends_E = torch.zeros(2, dtype=torch.int32)
    sums = torch.ones(2, 8, 16)
    add_grouped_gradient(sums, rows_TI, grad_TO, ends_E=ends_E)
    assert bool((sums == 1).all())
    add_grouped_gradient(sums, rows_TI, grad_TO, ends_E=ends_E, adds=False, fills=True)
    assert bool((sums == 0).all())


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"),
    [(9, 5, 2), (33, 64, 6), (3, 12, 12), (2, 512, 8), (1, 1, 1), (0, 8, 2)],
)
def test_top_experts(tokens: int, experts: int, top_k: int):
    check_top_experts(tokens, experts, top_k)


def test_top_experts_of_half_precision():
    check_top_experts(5, 20, 4, dtype=torch.bfloat16)


def test_top_experts_without_enough_numbers():
    bad, low = float("nan"), float("-inf")
    scores = torch.tensor(
        [[bad] * 5, [low] * 5, [bad, low, bad, 1.0, low], [0.0, -0.0, -1.0, bad, 0.0]],
        device=DEVICE,
    )
    assert top_experts(scores, 3).tolist() == [[0, 1, 2], [0, 1, 2], [0, 1, 3], [0, 1, 4]]
