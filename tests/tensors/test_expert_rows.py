"""Rows of this rank's experts among the choices of all ranks, against a loop."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from app.moe.dispatch.expert_rows import ExpertRows, place_rows


def drawn(tokens: int, experts: int, top_k: int) -> Tensor:
    """Distinct choices of each token, ascending; every fifth is dropped."""
    generator = torch.Generator().manual_seed(tokens)
    found = torch.rand(tokens, experts, generator=generator).topk(top_k, dim=1).indices
    found = found.sort(dim=1).values
    return found.masked_fill(torch.arange(tokens * top_k).view(tokens, top_k) % 5 == 2, experts)


def looped(chosen_NK: Tensor, first: int, local: int, num_rows: int) -> ExpertRows:
    """Expert by expert, token by token."""
    row_of, ends, row = torch.full_like(chosen_NK.long(), num_rows), [], 0
    for expert in range(first, first + local):
        for token, k in (chosen_NK == expert).nonzero().tolist():
            row_of[token, k] = min(row, num_rows)
            row += 1
        ends.append(min(row, num_rows))
    values = (row_of, torch.tensor(ends), torch.tensor([row]))
    return ExpertRows(*(value.to(torch.int32) for value in values))


def assert_placed(found: ExpertRows, wanted: ExpertRows) -> None:
    for name in ("row_of_NK", "ends_E", "needed"):
        ours, theirs = getattr(found, name), getattr(wanted, name)
        assert ours.dtype == torch.int32 and ours.cpu().equal(theirs), name


CASES = [(29, 12, 3, 4), (29, 12, 3, 5), (40, 300, 8, 77), (7, 3, 3, 3), (0, 4, 2, 2)]


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(("tokens", "experts", "top_k", "local"), CASES)
def test_rows_of_choices(tokens: int, experts: int, top_k: int, local: int, dtype: torch.dtype):
    chosen_NK = drawn(tokens, experts, top_k).to(dtype)
    for first in (0, experts - local):
        given = chosen_NK, first, local
        needed = int(looped(*given, 1 << 20).needed)
        for num_rows in {needed, needed + 5, needed // 2, 0}:
            assert_placed(place_rows(*given, num_rows), looped(*given, num_rows))
