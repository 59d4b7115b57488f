"""The dispatchers that exchange tokens against the local one: rows, outputs and all gradients, with
64 experts, idle ranks, experts cut in parts, and a capacity.

Shapes: T tokens of a rank, K experts per token, E experts, D width, F hidden width of an expert.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from app.choices import DispatcherKind, DropPolicy
from app.config import MoEConfig
from app.moe.capacity import within_capacity
from app.moe.dispatch.all_gather import AllGatherDispatcher
from app.moe.dispatch.all_to_all import AllToAllDispatcher, expert_major
from app.moe.dispatch.local import LocalDispatcher
from app.moe.dispatch.static import StaticDispatcher
from app.moe.dispatch.transport import CollectiveTransport
from app.moe.protocol import Dispatched, Dispatcher
from app.plan.parts.dispatch_record import capacity
from app.plan.parts.static import PlannedStatic
from tests.cases import chosen
from tests.distributed import run_distributed
from tests.oracle import oracle
from tests.rounding import Values, expect_alike, in_fp64
from tests.tensors.models import grouped_swiglu

GOLDEN = oracle("router")["sort_chunks"]
E, K, D, F = 64, 4, 8, 16


def static(num_experts: int, group: dist.ProcessGroup, etp: int = 1) -> StaticDispatcher:
    """By collectives, with room for all that could be asked for."""
    moe = MoEConfig(num_experts=num_experts, top_k=K, dispatcher=DispatcherKind.static)
    planned = PlannedStatic(moe, ep=group.size() // etp, etp=etp)
    collective = CollectiveTransport(group, planned.experts, etp)
    rank = group.rank() // etp
    return StaticDispatcher(planned, collective, None, ep_rank=rank, device=torch.device("cpu"))


KINDS: dict[str, Callable[..., Dispatcher[Any, Any]]] = {
    "all_to_all": AllToAllDispatcher,
    "all_gather": AllGatherDispatcher,
    "static": static,
}


def pick(allowed: Tensor, tokens: int, seed: int) -> Tensor:
    """K of the allowed experts for each token, ascending: T × K."""
    weights = allowed.float().expand(tokens, E)
    if not tokens:
        return torch.zeros(0, K, dtype=torch.int64)
    return weights.multinomial(K, generator=torch.Generator().manual_seed(seed)).sort(dim=1).values


def home(ep: int) -> Tensor:
    """The expert-parallel rank of each expert."""
    return torch.arange(E) // (E // ep)


# (ep rank, ep) -> the choices of a rank's tokens
SCENARIOS: dict[str, Callable[[int, int], Tensor]] = {
    "random": lambda rank, ep: pick(torch.ones(E), 29, rank),
    "the last rank receives nothing": lambda rank, ep: pick(home(ep) != ep - 1, 29, rank),
    "only rank 0 receives": lambda rank, ep: pick(home(ep) == 0, 29, rank),
    "a rank keeps nothing to itself": lambda rank, ep: pick(home(ep) != rank % ep, 29, rank),
    "rank 1 sends none to rank 0": lambda rank, ep: pick((home(ep) != 0) | (rank != 1), 29, rank),
    "four experts take all": lambda rank, ep: pick(torch.arange(E) % 16 == 5, 29, rank),
    "no tokens anywhere": lambda rank, ep: pick(torch.ones(E), 0, rank),
}
UNEVEN = "uneven token counts, none on rank 1"  # an all-gather takes equal parts
SCENARIOS[UNEVEN] = lambda rank, ep: pick(torch.ones(E), (17, 0, 1, 40)[rank % 4], rank)
LIMITS = {"dropless": {}, "capacity": {"drops": True}, "padded": {"drops": True, "padded": True}}


def draw(shape: tuple[int, ...], seed: int) -> Tensor:
    """fp32, or fp64 `in_fp64`."""
    return (
        torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        .to(torch.float32)
        .requires_grad_()
    )


def part(w1_ED2F: Tensor, w2_EFD: Tensor, etp_rank: int, etp: int) -> tuple[Tensor, Tensor]:
    """One of `etp` parts of the experts' hidden width."""
    gate_up = w1_ED2F.unflatten(2, (2, etp, -1))[:, :, :, etp_rank].flatten(2)
    return gate_up, w2_EFD.unflatten(1, (etp, -1))[:, etp_rank]


def drop(
    experts_TK: Tensor, probs_TK: Tensor, drops: bool = False, padded: bool = False
) -> tuple[Tensor, Tensor, Any]:
    """Choices and probabilities as a router with half the mean load as capacity hands them on,
    and the dispatcher's options.
    """
    if not drops:
        return experts_TK, probs_TK, {}
    limit = capacity(experts_TK.numel(), E, 0.5)
    kept_TK = within_capacity(probs_TK, experts_TK, E, limit=limit, policy=DropPolicy.probs)
    assert len(experts_TK) != 29 or 0 < kept_TK.sum() < kept_TK.numel()
    options = {"drops": True, "rows_per_expert": min(limit, len(experts_TK)) if padded else None}
    return experts_TK.masked_fill(~kept_TK, E), probs_TK * kept_TK, options


def run_layer(
    dispatcher: Dispatcher[Any, Any],
    experts_TK: Tensor,
    rank: int,
    share: slice,
    etp: tuple[int, int],
    limits: dict[str, bool],
) -> tuple[Tensor, dict[str, Tensor]]:
    """Dispatched rows, and output and gradients with part `etp` of the experts of `share` on
    this rank.
    """
    tokens = len(experts_TK)
    x, probs = (
        draw((tokens, D), 100 + rank),
        draw((tokens, K), 200 + rank).detach().sigmoid().requires_grad_(),
    )
    shapes = ((E, D, 2 * F), (E, F, D))
    whole = [draw(shape, seed).detach()[share] / 3 for seed, shape in enumerate(shapes)]
    w1, w2 = (weight.contiguous().requires_grad_() for weight in part(*whole, *etp))
    experts_TK, weights, options = drop(experts_TK, probs, **limits)
    prepared = dispatcher.preprocess(experts_TK, **options)
    dispatched, origin = dispatcher.dispatch(x, prepared)
    assert type(dispatched) is Dispatched
    rows = dispatched.rows_RD
    used = rows[: dispatched.ends_E[-1]]
    used = used[(used != 0).any(dim=1)]  # what fills experts up is zero
    expert_out = grouped_swiglu(rows, w1, w2, ends_E=dispatched.ends_E)
    out = dispatcher.combine(expert_out, weights, origin)
    out.backward(draw((tokens, D), 300 + rank).detach())
    return used.detach(), {
        "out": out.detach(),
        "x": x.grad,
        "probs": probs.grad,
        "w1": w1.grad,
        "w2": w2.grad,
    }


def scenarios(kind: str, ep: int, limits: dict[str, bool]) -> list[str]:
    """Yield the valid scenarios.

    One rank with all experts cannot be idle, and some dispatchers need equal token counts.
    """
    if limits:
        names = ["random", "only rank 0 receives", "no tokens anywhere"]
    else:
        names = [name for name in SCENARIOS if name != UNEVEN or kind == "all_to_all"]
    return [name for name in names if ep > 1 or "rank" not in name]


Results = tuple[bool, bool, Values, Values, Values]


def both(rank: int, kind: str, ep: int, etp: int, limits: dict[str, bool]) -> dict[str, Results]:
    """For each scenario: whether rows arrive in order, whether a second run is bit-equal, and
    results of the exchange, of all experts on this rank, and of these in fp64.
    """
    group, per_rank, found = dist.new_group(), E // ep, {}
    share = slice(rank // etp * per_rank, (rank // etp + 1) * per_rank)
    exchange, mine = KINDS[kind](E, group, etp), (rank % etp, etp)
    for scenario in scenarios(kind, ep, limits):
        choose = SCENARIOS[scenario]
        experts_TK = choose(rank, ep)
        rows, ours = run_layer(exchange, experts_TK, rank, share=share, etp=mine, limits=limits)
        again, repeated = run_layer(
            exchange, experts_TK, rank, share=share, etp=mine, limits=limits
        )
        same = torch.equal(rows, again) and all(
            torch.equal(ours[key], repeated[key]) for key in ours
        )
        here = functools.partial(all_here, experts_TK, rank, share, mine, limits)
        local = here(group)
        with in_fp64():
            exact = here(group)
        in_order = bool(limits) or torch.equal(rows, expected_rows(choose, ep, etp, share=share))
        values = (
            {key: value.numpy() for key, value in part.items()} for part in (ours, local, exact)
        )
        found[scenario] = in_order, same, *values
    return found


def all_here(
    experts_TK: Tensor,
    rank: int,
    share: slice,
    etp: tuple[int, int],
    limits: dict[str, bool],
    group: dist.ProcessGroup,
) -> dict[str, Tensor]:
    """Output and gradients with all experts on this rank; of weights those of `share`'s part."""
    _, local = run_layer(
        LocalDispatcher(E), experts_TK, rank, share=slice(None), etp=(0, 1), limits=limits
    )
    for name in ("w1", "w2"):  # every rank's tokens reach the one copy of an expert
        dist.all_reduce(local[name], group=group)
        local[name] = local[name][share]
    local["w1"], local["w2"] = part(local["w1"], local["w2"], *etp)
    return local


def expected_rows(choose: Callable[[int, int], Tensor], ep: int, etp: int, share: slice) -> Tensor:
    """By expert, then by the rank that sends, then by token."""
    choices = [choose(rank, ep) for rank in range(ep * etp)]
    sent = [
        (experts, draw((len(experts), D), 100 + rank).detach())
        for rank, experts in enumerate(choices)
    ]
    return torch.cat([x[(experts == e).any(dim=1)] for e in range(E)[share] for experts, x in sent])


# sizes that nobody waits for need no filling up
OPTIONS = [
    (kind, name)
    for kind in KINDS
    for name in LIMITS
    if not (kind.startswith("static") and name == "padded")
]
FOUR_RANKS = [(2, 2), (2, 1), (4, 1), (1, 2)]  # at most


@pytest.mark.cover(1)
@pytest.mark.parametrize(("ep", "etp"), chosen([*FOUR_RANKS, (8, 1)], FOUR_RANKS))
@pytest.mark.parametrize(("kind", "limits"), OPTIONS)
def test_dispatchers_equal_local(kind: str, ep: int, etp: int, limits: str):
    for results in run_distributed(both, ep * etp, kind, ep, etp, LIMITS[limits]):
        for scenario, (in_order, same, *values) in results.items():
            assert in_order, f"{scenario}: rows arrive by expert, source and token"
            assert same, f"{scenario}: a second run is bit-equal"
            expect_alike(
                *values, case=scenario
            )  # other numbers of rows, and sums over parts of the width


def wide_sums(rank: int, kind: str) -> tuple[bool, bool]:
    """Check that the sum over both ranks' experts, and its gradient, is made in fp32.

    Both are rounded to bfloat16 once; with `static` also once per rank before that.
    """
    exchange = KINDS[kind](4, dist.new_group())
    experts, probs = torch.arange(4).expand(3, 4), torch.full((3, 4), 0.5)
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(rank)).bfloat16().requires_grad_()
    prepared = exchange.preprocess(experts)
    # of rows; half a step of bfloat16 from 1
    factors = torch.tensor([1.0, 2**-8, 2**-8, 2**-8])
    mine = factors.repeat_interleave(3 * 2).view(4, -1)[rank * 2 : rank * 2 + 2].flatten()
    dispatched, origin = exchange.dispatch(x, prepared)
    rows = dispatched.rows_RD[: dispatched.ends_E[-1]]
    out = exchange.combine(rows * mine[:, None].bfloat16(), probs, origin)
    out.sum().backward()

    def total(values_D: Tensor) -> Tensor:
        """Return half of the sum of each factor times its values; a value may be one number."""
        parts = [(pair.sum() * 0.5 * values_D.float()) for pair in factors.split(2)]
        on_ranks = (
            [part.bfloat16().float() for part in parts] if kind.startswith("static") else parts
        )
        return sum(on_ranks).bfloat16()

    ones = torch.ones(3, 8, dtype=torch.bfloat16)
    return torch.equal(out.detach(), total(x.detach())), torch.equal(x.grad, total(ones))


@pytest.mark.parametrize("kind", ["all_to_all", "all_gather", "static"])
def test_combine_over_ranks_adds_in_fp32(kind: str):
    assert run_distributed(wide_sums, 2, kind) == [(True, True)] * 2


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: str(case["split_sizes"]))
def test_tokens_by_source_and_expert_sort_as_golden(case: dict[str, Any]):
    experts = case["order"][1]  # the first expert's second chunk is the next rank's first
    counts = torch.tensor(case["split_sizes"]).view(-1, experts)
    order, _ = expert_major(counts, int(counts.sum()))
    assert torch.tensor(case["input"])[order].tolist() == case["output"]


def test_grouping_is_stable_and_undone_by_its_inverse():
    counts = torch.tensor([[2, 0, 1], [0, 0, 3], [1, 2, 0]])
    order, inverse = expert_major(counts, 9)
    assert order.tolist() == [0, 1, 6, 7, 8, 2, 3, 4, 5]
    assert order[inverse].tolist() == list(range(9))
    assert [part.tolist() for part in expert_major(torch.zeros(3, 4, dtype=torch.int64), 0)] == [
        [],
        [],
    ]
