"""All exchanges of a layer through a transport of static shapes, as forward and backward have them.

Shapes: P ranks, T tokens of each, K experts per token, E experts, D width, R rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from app.moe.dispatch.expert_rows import place_rows
from app.moe.dispatch.transport import TokenTransport


@dataclass(frozen=True)
class Sizes:
    """Sizes of one exchange."""

    tokens: int
    experts: int
    top_k: int
    width: int
    etp: int = 1
    dtype: torch.dtype = torch.float32

    def local(self, ranks: int) -> int:
        """Experts of a rank."""
        return self.experts * self.etp // ranks

    def rows(self, ranks: int) -> int:
        """Return rows enough for any routing."""
        return ranks * self.tokens * self.top_k


@dataclass(frozen=True)
class Given:
    """A rank's tokens."""

    experts_TK: Tensor
    x_TD: Tensor
    grad_TD: Tensor
    probs_TK: Tensor

    def clone(self) -> Given:
        """Return a copy."""
        return Given(*(value.clone() for value in vars(self).values()))

    def copy_(self, other: Given) -> None:
        """Take another's values."""
        for name, value in vars(self).items():
            value.copy_(getattr(other, name))


def draw(sizes: Sizes, rank: int, seed: int, device: str = "cpu") -> Given:
    """Random; one choice in eight is dropped."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    scores_TE = torch.rand(sizes.tokens, sizes.experts, generator=generator)
    experts_TK = scores_TE.topk(sizes.top_k, dim=1).indices.sort(dim=1).values
    probs_TK = torch.rand(sizes.tokens, sizes.top_k, generator=generator)
    dropped_TK = torch.rand(sizes.tokens, sizes.top_k, generator=generator) < 1 / 8
    x, grad = (
        torch.randn(sizes.tokens, sizes.width, generator=generator).to(sizes.dtype)
        for _ in range(2)
    )
    experts_TK = experts_TK.masked_fill(dropped_TK, sizes.experts)
    return Given(*(value.to(device) for value in (experts_TK, x, grad, probs_TK)))


def all_exchanges(
    transport: TokenTransport, sizes: Sizes, given: Given, rank: int, ranks: int
) -> dict[str, Tensor]:
    """Return what arrives, zero where it is undefined, without a host sync."""
    local, num_rows = sizes.local(ranks), sizes.rows(ranks)
    first = rank // sizes.etp * local
    chosen_NK = transport.gather_choices(given.experts_TK)
    placed = place_rows(chosen_NK, first, local, num_rows)
    rows_RD = transport.spread(given.x_TD, placed.row_of_NK, num_rows)
    # each row times another number, as if of an expert
    factor_R1 = 1 + torch.arange(num_rows, device=rows_RD.device)[:, None] % 7 / 8
    out_RD = rows_RD * factor_R1.to(rows_RD.dtype)
    where = placed.row_of_NK, given.experts_TK
    y_TD = transport.combine(out_RD, given.probs_TK, *where)
    grad_RD, dots_TK = transport.spread_gradients(given.grad_TD, out_RD, given.probs_TK, *where)
    back_TD = transport.combine(grad_RD, None, *where)
    owned_R = torch.zeros(num_rows + 1, dtype=torch.bool, device=rows_RD.device)
    owned_R = owned_R.index_fill_(0, placed.row_of_NK.flatten().long(), True)[:-1, None]
    return {
        "row_of": placed.row_of_NK,
        "ends": placed.ends_E,
        "rows": rows_RD.masked_fill(~owned_R, 0),
        "grad_rows": grad_RD.masked_fill(~owned_R, 0),
        "y": y_TD,
        "dots": dots_TK,
        "back": back_TD,
    }


def different(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> list[str]:
    """Names of the results that are not equal bit for bit, or not numbers."""
    return named(ours, unequal(ours, theirs))


def unequal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> Tensor:
    """Return whether each of the results differs, on their device."""
    assert ours.keys() == theirs.keys()
    return torch.stack([(value != theirs[name]).any() for name, value in ours.items()])


def named(results: dict[str, Tensor], flags: Tensor) -> list[str]:
    """Names of the results that have a flag."""
    return [name for name, flag in zip(results, flags.tolist(), strict=True) if flag]
