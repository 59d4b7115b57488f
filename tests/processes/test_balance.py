"""Router losses of tokens that are spread over ranks: the ranks' shares, and the gradients of
these, add up to one process'.

Shapes: B sequences of a replica, S tokens of each, D width, E experts.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from app.choices import Balance, Score
from app.config import MoEConfig
from app.model.layers.layer_groups import LayerGroups
from app.moe.phases import Router
from app.plan.model.experts import RouterWeights
from tests.cases import sampled
from tests.distributed import run_distributed
from tests.rounding import expect_alike, in_fp64

B, S, D, E, MICROBATCHES = 3, 8, 6, 5, 2


def router_of(balance: Balance, layer_groups: LayerGroups) -> Router:
    moe = MoEConfig(
        num_experts=E,
        top_k=2,
        score=Score.sigmoid,
        aux_loss_coeff=0.3,
        z_loss_coeff=0.2,
        balance=balance,
    )
    router = Router(RouterWeights.of(D, E), moe, layer_groups)
    torch.nn.init.normal_(router.weight, generator=torch.Generator().manual_seed(0))
    return router.float()


def tokens_of(replica: int, mb: int) -> Tensor:
    """One microbatch of one data-parallel replica: B × S × D; the replicas' loads differ."""
    return (
        torch.randn(B, S, D, generator=torch.Generator().manual_seed(10 * replica + mb)).float()
        + replica
    )


def summed(router: Router, microbatches: list[Tensor]) -> dict[str, Tensor]:
    """Sums over microbatches of losses and tokens per expert, and the gradient of the router's
    weight.
    """
    router.start_step()
    reports = [router(x_BSD)[2] for x_BSD in microbatches]
    sum(report.loss for report in reports).backward()
    totals = {
        name: sum(getattr(report, name) for report in reports)
        for name in ("aux_loss", "z_loss", "counts_E")
    }
    return totals | {"weight": router.weight.grad}


def spread(rank: int, balance: Balance, parts: int, replicas: int) -> dict[str, list[float]]:
    """Sums over all ranks when `parts` ranks share the sequences of each of `replicas`."""
    alike = [
        dist.new_group(list(range(first, first + parts)))
        for first in range(0, parts * replicas, parts)
    ]
    layer_groups = LayerGroups(
        tp_cp_control=alike[rank // parts], tp_cp_dp_control=dist.new_group()
    )
    router, length = router_of(balance, layer_groups), S // parts
    own = slice(rank % parts * length, (rank % parts + 1) * length)
    for _ in range(2):  # the second step starts anew
        router.weight.grad = None
        found = summed(router, [tokens_of(rank // parts, mb)[:, own] for mb in range(MICROBATCHES)])
    for total in found.values():
        dist.all_reduce(total)
    return {name: total.tolist() for name, total in found.items()}


def alone(balance: Balance, replicas: int) -> dict[str, Tensor]:
    """Compute the same in one process, replica by replica.

    Their loads are summed where the balance is taken over the global batch.
    """
    routers = [router_of(balance, LayerGroups()) for _ in range(replicas)]
    found = [
        summed(router, [tokens_of(replica, mb) for mb in range(MICROBATCHES)])
        for replica, router in enumerate(routers)
    ]
    if balance is Balance.global_batch and replicas > 1:
        # with the mean load of the replicas, each microbatch's loss is that of all replicas' tokens
        # at once
        router = router_of(balance, LayerGroups())
        whole = [
            torch.cat([tokens_of(replica, mb) for replica in range(replicas)])
            for mb in range(MICROBATCHES)
        ]
        together = summed(router, whole)
        return {
            name: value if name == "counts_E" else value * replicas
            for name, value in together.items()
        }
    return {name: sum(part[name] for part in found) for name in found[0]}


@pytest.mark.parametrize(("parts", "replicas"), sampled([(2, 2), (2, 1), (4, 1), (1, 2)], 4))
@pytest.mark.parametrize("balance", list(Balance))
def test_shares_of_ranks_add_up(balance: Balance, parts: int, replicas: int):
    plain = alone(balance, replicas)
    with in_fp64():
        exact = alone(balance, replicas)
    for found in run_distributed(spread, parts * replicas, balance, parts, replicas):
        assert found.pop("counts_E") == plain["counts_E"].tolist()
        expect_alike(found, *({name: values[name] for name in found} for values in (plain, exact)))
