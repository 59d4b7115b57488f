"""Kernels that move rows between ranks against plain torch, at any size, on any device that runs
them; the memory of the ranks is as many tensors here.

Shapes: P ranks, T tokens of each, N of all, K experts per token, E experts, L of a rank, D width, R
rows. Plain versions must be in place where these run (`tests.moe_kernels.without_kernels`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from app.kernels import peer_rows, rows
from app.kernels.expert_rows import count_choices, expert_rows
from app.kernels.rows import OfRanks
from app.moe.dispatch import expert_rows as plain
from app.moe.permute import sum_rows
from tests.moe_kernels import DEVICE, FACTS, assert_same, twice
from tests.rounding import expect_alike, in_fp64

UNTOUCHED = 7.0  # what lies where nothing may be written


@dataclass(frozen=True)
class Drawn:
    """All ranks' tokens, and where they lie on a rank with a part of half of the experts."""

    ranks: int
    etp: int
    local: int
    experts_NK: Tensor
    x_ND: Tensor
    probs_NK: Tensor
    placed: plain.ExpertRows
    rows_RD: Tensor  # not a number where no choice has the row

    @property
    def row_of_NK(self) -> Tensor:
        """Row of each choice."""
        return self.placed.row_of_NK

    @property
    def here_N(self) -> Tensor:
        """Tokens with a row."""
        return (self.row_of_NK < len(self.rows_RD)).any(dim=1)

    @property
    def owned_R(self) -> Tensor:
        """Rows that a choice has."""
        owned = torch.zeros(len(self.rows_RD) + 1, dtype=torch.bool, device=DEVICE)
        owned[self.row_of_NK.flatten().long()] = True
        return owned[:-1]


def draw_choices(tokens: int, experts: int, top_k: int) -> Tensor:
    """K of the experts for each token, ascending; three of eight are dropped."""
    found = torch.rand(tokens, experts, **FACTS).topk(top_k, dim=1).indices.sort(dim=1).values
    return found.masked_fill(torch.rand(tokens, top_k, **FACTS) < 3 / 8, experts)


def draw_peers(
    ranks: int,
    tokens: int,
    experts: int,
    top_k: int,
    width: int,
    dtype: torch.dtype,
    etp: int = 1,
    spare: int = 16,
) -> Drawn:
    """This is the last rank; `spare` rows beyond those that are needed."""
    torch.manual_seed(3)
    experts_NK = draw_choices(ranks * tokens, experts, top_k)
    local = experts * etp // ranks
    first = experts - local
    needed = int(plain.place_rows(experts_NK, first, local, 1 << 24).needed)
    placed = plain.place_rows(experts_NK, first, local, needed + spare)
    drawn = Drawn(
        ranks,
        etp,
        local,
        experts_NK,
        torch.randn(ranks * tokens, width, **FACTS).to(dtype),
        torch.rand(ranks * tokens, top_k, **FACTS),
        placed,
        torch.randn(needed + spare, width, **FACTS).to(dtype),
    )
    drawn.rows_RD[~drawn.owned_R] = float("nan")
    return drawn


def memory(values_N: Tensor, ranks: int) -> tuple[list[Tensor], Tensor]:
    """The ranks' parts in a tensor each, and their addresses."""
    parts = [part.clone() for part in values_N.unflatten(0, (ranks, -1))]
    return parts, torch.tensor([part.data_ptr() for part in parts], device=DEVICE)


def check_expert_rows(
    tokens: int,
    experts: int,
    top_k: int,
    local: int,
    dtype: torch.dtype = torch.int64,
) -> None:
    """Every integer is the same, with enough rows and without."""
    torch.manual_seed(6)
    chosen_NK = draw_choices(tokens, experts, top_k).to(dtype)
    for first in (0, experts - local):
        needed = int(plain.place_rows(chosen_NK, first, local, 1 << 24).needed)
        for num_rows in (needed + 1, needed // 2):
            counts_L = count_choices(chosen_NK, first, local).sum(dim=0)
            token_of_R = torch.full((num_rows,), -1, device=chosen_NK.device)
            found = expert_rows(
                chosen_NK,
                first,
                local,
                num_rows=num_rows,
                token_of_R=token_of_R,
            )
            assert counts_L.tolist() == [
                int((chosen_NK == first + nth).sum()) for nth in range(local)
            ]
            wanted = plain.place_rows(chosen_NK, first, local, num_rows)
            names = ("row_of_NK", "ends_E", "needed")
            for name, ours in zip(names, found, strict=True):
                theirs = getattr(wanted, name)
                assert ours.dtype == theirs.dtype and torch.equal(ours, theirs), name
            token_NK = torch.arange(tokens, device=chosen_NK.device)[:, None].expand(-1, top_k)
            placed_NK = wanted.row_of_NK < num_rows
            tokens_R = torch.full_like(token_of_R, -1)
            tokens_R[wanted.row_of_NK[placed_NK].long()] = token_NK[placed_NK]
            assert torch.equal(token_of_R, tokens_R)


def check_pull(drawn: Drawn) -> None:
    """Copies, wherever the tokens lie."""
    num_rows = len(drawn.rows_RD)
    _parts, addresses_P = memory(drawn.x_ND, drawn.ranks)
    wanted = plain.spread_rows(drawn.x_ND, drawn.row_of_NK, num_rows)[drawn.owned_R]
    for source in (*(OfRanks(addresses_P, rank) for rank in {0, drawn.ranks - 1}), drawn.x_ND):
        found = torch.full_like(drawn.rows_RD, UNTOUCHED)
        rows.spread_into(found, source, drawn.row_of_NK, None)
        assert torch.equal(found[drawn.owned_R], wanted)
        assert found[~drawn.owned_R].eq(UNTOUCHED).all()


def check_push(drawn: Drawn) -> None:
    """Bit for bit what torch adds up; nothing is written for tokens without a row."""
    untouched_ND = torch.full_like(drawn.x_ND, UNTOUCHED)
    for probs_NK in (None, drawn.probs_NK):
        given = drawn.rows_RD, drawn.row_of_NK, probs_NK

        def run(given: tuple[Tensor, Tensor, Tensor | None] = given) -> tuple[Tensor, ...]:
            parts, addresses_P = memory(untouched_ND, drawn.ranks)
            rows.sum_into(OfRanks(addresses_P, drawn.ranks - 1), *given)
            return (torch.cat(parts),)

        (found,) = twice(run)
        alone = rows.sum_rows(*given, dtype=drawn.rows_RD.dtype)
        assert torch.equal(alone[drawn.here_N], found[drawn.here_N])
        assert_same(alone, sum_rows(*given, drops=True, dtype=drawn.rows_RD.dtype))
        assert found[~drawn.here_N].eq(UNTOUCHED).all()


def check_sums_at_home(drawn: Drawn) -> None:
    """Check sums of partial sums and of partial dot products; what nobody sent is not read."""
    tokens = len(drawn.x_ND) // drawn.ranks
    experts_TK = drawn.experts_NK[:tokens]
    rank_PTK = torch.arange(drawn.ranks, device=DEVICE)[:, None, None] // drawn.etp
    sent_PTK = rank_PTK == experts_TK // drawn.local
    shape = (drawn.ranks, tokens, drawn.x_ND.shape[1])
    partial_PTD = torch.randn(shape, **FACTS).to(drawn.x_ND.dtype)
    partial_PTD[~sent_PTK.any(dim=2)] = float("nan")
    given = experts_TK, drawn.local, drawn.etp
    (found,) = twice(lambda: (peer_rows.sum_partials(partial_PTD, *given),))
    assert_same(found, plain.sum_partials(partial_PTD, *given))
    dots_PTK = torch.randn(sent_PTK.shape, **FACTS).masked_fill(~sent_PTK, float("nan"))
    (found,) = twice(lambda: (peer_rows.sum_dots(dots_PTK, *given),))
    assert_same(found, plain.sum_dots(dots_PTK, *given))


def check_pull_gradients(drawn: Drawn) -> None:
    """Check gradients: rows bit for bit, probabilities to the rounding of sums of D terms.

    Probabilities are bit-equal wherever the tokens are.
    """
    untouched_NK = torch.full_like(drawn.probs_NK, UNTOUCHED)
    _parts, addresses_P = memory(drawn.x_ND, drawn.ranks)
    given = drawn.rows_RD, drawn.probs_NK, drawn.row_of_NK
    names = "rows_RD", "probs_TK", "row_of_TK"

    def run() -> tuple[Tensor, ...]:
        dots, dots_addresses_P = memory(untouched_NK, drawn.ranks)
        grad_RD = torch.empty_like(drawn.rows_RD)
        of_ranks = (OfRanks(each, drawn.ranks - 1) for each in (dots_addresses_P, addresses_P))
        rows.gradients_into(
            grad_RD, *of_ranks, **dict(zip(names, given, strict=True)), fp8_rows=None
        )
        return grad_RD[drawn.owned_R], torch.cat(dots)

    grad_RD, dots_NK = twice(run)
    kept_NK = drawn.row_of_NK < len(drawn.rows_RD)
    alone_RD, alone_NK = rows.combine_gradients(drawn.x_ND, *given)
    assert torch.equal(alone_RD[drawn.owned_R], grad_RD) and alone_NK[~kept_NK].eq(0).all()
    assert torch.equal(alone_NK[kept_NK], dots_NK[kept_NK])
    wanted_RD, wanted_NK = plain.row_gradients(drawn.x_ND, *given)
    assert_same(grad_RD, wanted_RD[drawn.owned_R])
    assert dots_NK[~kept_NK].eq(UNTOUCHED).all()
    if kept_NK.any():
        wide = drawn.x_ND.double(), drawn.rows_RD.double(), drawn.probs_NK.double()
        with in_fp64():
            _, exact_NK = plain.row_gradients(*wide, drawn.row_of_NK)
        found, wanted, exact = ({"dots": v[kept_NK]} for v in (dots_NK, wanted_NK, exact_NK))
        expect_alike(found, wanted, exact)


def check_push_values(drawn: Drawn) -> None:
    """Check that every rank's memory holds the pushed values."""
    parts, addresses_P = memory(torch.full_like(drawn.experts_NK, 9).short(), drawn.ranks)
    experts_TK = drawn.experts_NK[: len(parts[0])]
    peer_rows.push_values(experts_TK, addresses_P, torch.int16)
    assert all(torch.equal(part, experts_TK.short()) for part in parts)


CHECKS = (
    check_pull,
    check_push,
    check_sums_at_home,
    check_pull_gradients,
    check_push_values,
)
