"""Rows of this rank's experts among the choices of all ranks, against a loop."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from app.moe.dispatch.expert_rows import ExpertRows, place_rows, zero_gaps


def drawn(tokens: int, experts: int, top_k: int) -> Tensor:
    """Distinct choices of each token, ascending; every fifth is dropped."""
    generator = torch.Generator().manual_seed(tokens)
    found = torch.rand(tokens, experts, generator=generator).topk(top_k, dim=1).indices
    found = found.sort(dim=1).values
    return found.masked_fill(torch.arange(tokens * top_k).view(tokens, top_k) % 5 == 2, experts)


def looped(chosen_NK: Tensor, first: int, local: int, num_rows: int, multiple: int) -> ExpertRows:
    """Expert by expert, token by token."""
    row_of, ends, filled, row = torch.full_like(chosen_NK.long(), num_rows), [], [], 0
    for expert in range(first, first + local):
        for token, k in (chosen_NK == expert).nonzero().tolist():
            row_of[token, k] = min(row, num_rows)
            row += 1
        filled.append(min(row, num_rows))
        row += -row % multiple
        ends.append(min(row, num_rows))
    values = (row_of, torch.tensor(ends), torch.tensor(filled), torch.tensor([row]))
    return ExpertRows(*(value.to(torch.int32) for value in values))


def assert_placed(found: ExpertRows, wanted: ExpertRows) -> None:
    for name in ("row_of_NK", "ends_E", "filled_E", "needed"):
        ours, theirs = getattr(found, name), getattr(wanted, name)
        assert ours.dtype == torch.int32 and ours.cpu().equal(theirs), name


CASES = [
    (29, 12, 3, 4, 1),
    (29, 12, 3, 5, 16),
    (40, 300, 8, 77, 16),
    (7, 3, 3, 3, 1),
    (0, 4, 2, 2, 16),
]


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(("tokens", "experts", "top_k", "local", "multiple"), CASES)
def test_rows_of_choices(
    tokens: int, experts: int, top_k: int, local: int, multiple: int, dtype: torch.dtype
):
    chosen_NK = drawn(tokens, experts, top_k).to(dtype)
    for first in (0, experts - local):
        given = chosen_NK, first, local
        needed = int(looped(*given, 1 << 20, multiple).needed)
        for num_rows in {needed, needed + 5 * multiple, needed // 2 // multiple * multiple, 0}:
            found = place_rows(*given, num_rows, multiple)
            assert_placed(found, looped(*given, num_rows, multiple))


def test_zeros_fill_the_rows_between_experts_alone():
    rows_RD = torch.full((12, 2), float("nan"))
    filled_E, ends_E = (torch.tensor(rows).int() for rows in ([1, 4, 7, 8], [4, 4, 8, 8]))
    found = zero_gaps(rows_RD, filled_E, ends_E)
    assert found.data_ptr() == rows_RD.data_ptr()
    assert (found[:, 0] == 0).nonzero().flatten().tolist() == [1, 2, 3, 7]
    assert found[[1, 2, 3, 7]].eq(0).all()
