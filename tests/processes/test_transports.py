"""The transport of static shapes over gloo against loops over all tokens in fp64: rows, sums and
gradients, with experts cut in parts, dropped choices and a rank that receives nothing.

Shapes: T tokens of a rank, K experts per token, E experts, D width, R rows; N tokens of all ranks.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from app.moe.dispatch.expert_rows import ExpertRows, place_rows
from app.moe.dispatch.transport import CollectiveTransport
from tests.cases import sampled
from tests.distributed import run_distributed
from tests.rounding import expect_sums

T, K, E, D = 13, 3, 8, 6
# how experts are chosen: the last rank's are never, or a rank chooses only its own neighbour's
SCENARIOS = ("random", "the last rank receives nothing", "one expert takes all it can")


def choices(scenario: str, rank: int) -> Tensor:
    """K distinct ids of each token; one in seven is dropped."""
    weights_TE = torch.ones(T, E)
    if scenario == "the last rank receives nothing":
        weights_TE[:, E // 2 :] = 0
    if scenario == "one expert takes all it can":
        weights_TE[:, 5] = 1e9
    generator = torch.Generator().manual_seed(rank)
    found = weights_TE.multinomial(K, generator=generator).sort(dim=1).values
    return found.masked_fill(torch.arange(T * K).view(T, K) % 7 == 3, E)


def draw(rank: int, width: int, seed: int) -> Tensor:
    return torch.randn(T, width, generator=torch.Generator().manual_seed(10 * rank + seed))


def factor(expert: int, part: int) -> float:
    """Return the factor by which an expert's part multiplies rows."""
    return 0.5 + expert - 0.25 * part


def expert_of_rows(placed: ExpertRows, num_rows: int) -> list[int]:
    """Which of the experts here each row belongs to; rows of nobody are left out."""
    ends = placed.ends_E.tolist()
    return [next((e for e, end in enumerate(ends) if r < end), -1) for r in range(num_rows)]


def exchanged(rank: int, scenario: str, ep: int, etp: int) -> dict[str, Any]:
    """All that the transport brings this rank."""
    local, first = E // ep, rank // etp * (E // ep)
    transport = CollectiveTransport(dist.new_group(), local, etp)
    experts_TK, x_TD, grad_TD = choices(scenario, rank), draw(rank, D, 1), draw(rank, D, 2)
    probs_TK = draw(rank, K, 3).sigmoid()
    chosen_NK = transport.gather_choices(experts_TK)
    num_rows = 16 * ep * etp * T
    placed = place_rows(chosen_NK, first, local, num_rows)
    rows_RD = transport.spread(x_TD, placed.row_of_NK, num_rows)
    mine = torch.tensor(expert_of_rows(placed, num_rows))
    factors = [factor(first + e, rank % etp) for e in range(local)] + [float("nan")]
    out_RD = rows_RD * torch.tensor(factors)[mine][:, None]  # what nobody owns is not a number
    given = placed.row_of_NK, experts_TK
    y_TD = transport.combine(out_RD, probs_TK, *given)
    grad_RD, dots_TK = transport.spread_gradients(grad_TD, out_RD, probs_TK, *given)
    back_TD = transport.combine(grad_RD.masked_fill((mine < 0)[:, None], torch.nan), None, *given)
    used = [row for row, expert in enumerate(mine.tolist()) if expert >= 0]
    return {
        "rows": rows_RD[used].numpy(),
        "grad_rows": grad_RD[used].numpy(),
        "y": y_TD.numpy(),
        "dots": dots_TK.numpy(),
        "back": back_TD.numpy(),
    }


def looped(rank: int, scenario: str, ep: int, etp: int) -> dict[str, Tensor]:
    """Compute the same in fp64 from all ranks' tokens, one (token, expert) after another."""
    ranks, local = ep * etp, E // ep
    first = rank // etp * local
    chosen = [choices(scenario, r).tolist() for r in range(ranks)]
    x, grad = ([draw(r, D, seed).double() for r in range(ranks)] for seed in (1, 2))
    probs = [draw(r, K, 3).sigmoid().double() for r in range(ranks)]
    found: dict[str, list[Tensor]] = {"rows": [], "grad_rows": []}
    for e in range(first, first + local):
        for r in range(ranks):
            for t in range(T):
                for k in (k for k in range(K) if chosen[r][t][k] == e):
                    found["rows"].append(x[r][t])
                    found["grad_rows"].append(probs[r][t, k] * grad[r][t])
    wanted = {
        name: torch.stack(values) if values else torch.zeros(0, D) for name, values in found.items()
    }
    y, back = torch.zeros(T, D).double(), torch.zeros(T, D).double()
    dots = torch.zeros(T, K).double()
    for t in range(T):
        for k, e in enumerate(chosen[rank][t]):
            for part in range(etp) if e < E else ():
                row = x[rank][t] * factor(e, part)
                y[t] += probs[rank][t, k] * row
                dots[t, k] += grad[rank][t] @ row
                back[t] += probs[rank][t, k] * grad[rank][t]
    return {**wanted, "y": y, "dots": dots, "back": back}


@pytest.mark.every(2)
@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize(("ep", "etp"), sampled([(2, 2), (2, 1), (4, 1), (1, 2)], 2))
def test_transports_equal_loops(scenario: str, ep: int, etp: int):
    results = run_distributed(
        functools.partial(exchanged, scenario=scenario, ep=ep, etp=etp), ep * etp
    )
    for rank, found in enumerate(results):
        exact = looped(rank, scenario, ep=ep, etp=etp)
        ours = {name: torch.from_numpy(value) for name, value in found.items()}
        assert {name: value.shape for name, value in ours.items()} == {
            name: value.shape for name, value in exact.items()
        }
        assert torch.equal(ours["rows"].double(), exact["rows"].double())
        filled = [name for name, value in exact.items() if value.numel()]
        # of a term three factors are rounded, and then its sum with others
        expect_sums(
            {name: ours[name] for name in filled},
            {name: exact[name] for name in filled},
            terms=2 * (3 + K * etp * D),
            case=(scenario, rank),
        )
