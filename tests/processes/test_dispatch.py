"""The all-to-all dispatcher against the local one: rows, outputs and all gradients, with 64 experts and with idle ranks.

Shapes: T tokens of a rank, K experts per token, E experts, D width, F hidden width of an expert.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from app.moe.dispatch import AllToAllDispatcher, LocalDispatcher, group_by_expert
from app.moe.experts import grouped_swiglu
from app.moe.phases import Dispatcher
from tests.distributed import run_distributed

E, K, D, F = 64, 4, 8, 12


def pick(allowed: Tensor, tokens: int, seed: int) -> Tensor:
    """K of the allowed experts for each token, ascending: T × K."""
    weights = allowed.float().expand(tokens, E)
    if not tokens:
        return torch.zeros(0, K, dtype=torch.int64)
    return weights.multinomial(K, generator=torch.Generator().manual_seed(seed)).sort(dim=1).values


def home(ep: int) -> Tensor:
    """The rank of each expert."""
    return torch.arange(E) // (E // ep)


SCENARIOS: dict[str, Callable[[int, int], Tensor]] = {  # (rank, ep) -> the choices of this rank's tokens
    "random": lambda rank, ep: pick(torch.ones(E), 29, rank),
    "the last rank receives nothing": lambda rank, ep: pick(home(ep) != ep - 1, 29, rank),
    "only rank 0 receives": lambda rank, ep: pick(home(ep) == 0, 29, rank),
    "a rank keeps nothing to itself": lambda rank, ep: pick(home(ep) != rank, 29, rank),
    "rank 1 sends none to rank 0": lambda rank, ep: pick((home(ep) != 0) | (rank != 1), 29, rank),
    "four experts take all": lambda rank, ep: pick(torch.arange(E) % 16 == 5, 29, rank),
    "uneven token counts, none on rank 1": lambda rank, ep: pick(torch.ones(E), (17, 0, 1, 40)[rank], rank),
    "no tokens anywhere": lambda rank, ep: pick(torch.ones(E), 0, rank),
}


def draw(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def run_layer(dispatcher: Dispatcher, experts_TK: Tensor, rank: int, share: slice) -> tuple[Tensor, dict[str, Tensor]]:
    """Dispatched rows, and output and gradients with the experts of `share` on this rank."""
    tokens = len(experts_TK)
    x, probs = draw((tokens, D), 100 + rank), draw((tokens, K), 200 + rank)
    shapes = ((E, D, 2 * F), (E, F, D))
    w1, w2 = ((draw(shape, seed).detach()[share] / 3).requires_grad_() for seed, shape in enumerate(shapes))
    record = dispatcher.preprocess(experts_TK)
    rows = dispatcher.dispatch(x, record)
    out = dispatcher.combine(grouped_swiglu(rows, w1, w2, record.ends_E), probs, record)
    out.backward(draw((tokens, D), 300 + rank).detach())
    return rows.detach(), {"out": out.detach(), "x": x.grad, "probs": probs.grad, "w1": w1.grad, "w2": w2.grad}


def both(rank: int, ep: int, scenario: str) -> tuple[bool, bool, dict[str, Any], dict[str, Any]]:
    """Whether rows arrive in order, whether a second run is bit-equal, and results of the exchange and of all experts here."""
    experts_TK, group, per_rank = SCENARIOS[scenario](rank, ep), dist.new_group(), E // ep
    share = slice(rank * per_rank, (rank + 1) * per_rank)
    exchange = AllToAllDispatcher(E, group)
    rows, ours = run_layer(exchange, experts_TK, rank, share)
    again, repeated = run_layer(exchange, experts_TK, rank, share)
    same = torch.equal(rows, again) and all(torch.equal(ours[key], repeated[key]) for key in ours)
    _, local = run_layer(LocalDispatcher(E), experts_TK, rank, slice(None))
    for name in ("w1", "w2"):  # every rank's tokens reach the one copy of an expert
        dist.all_reduce(local[name], group=group)
        local[name] = local[name][share]
    in_order = torch.equal(rows, expected_rows(scenario, ep, share))
    return in_order, same, *({key: value.numpy() for key, value in found.items()} for found in (ours, local))


def expected_rows(scenario: str, ep: int, share: slice) -> Tensor:
    """By expert, then by the rank that sends, then by token."""
    choices = [SCENARIOS[scenario](rank, ep) for rank in range(ep)]
    sent = [(experts, draw((len(experts), D), 100 + rank).detach()) for rank, experts in enumerate(choices)]
    return torch.cat([x[(experts == e).any(dim=1)] for e in range(E)[share] for experts, x in sent])


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("ep", [2, 4])
def test_exchange_equals_local(ep: int, scenario: str):
    for in_order, same, ours, local in run_distributed(both, ep, ep, scenario):
        assert in_order, "rows arrive by expert, source and token"
        assert same, "a second run is bit-equal"
        for key, value in local.items():
            bound = 1e-6 * abs(value).max(initial=0)  # products over other numbers of rows round differently
            torch.testing.assert_close(torch.from_numpy(ours[key]), torch.from_numpy(value), rtol=1e-5, atol=bound, msg=key)


def test_grouping_is_stable_and_undone_by_its_inverse():
    counts = torch.tensor([[2, 0, 1], [0, 0, 3], [1, 2, 0]])
    order, inverse = group_by_expert(counts, 9)
    assert order.tolist() == [0, 1, 6, 7, 8, 2, 3, 4, 5]
    assert order[inverse].tolist() == list(range(9))
    assert [part.tolist() for part in group_by_expert(torch.zeros(3, 4, dtype=torch.int64), 0)] == [[], []]
