"""Matrices and a vocabulary cut over ranks: values of Megatron-Core, and whole matrices on one
rank.

Shapes: B sequences, S tokens per sequence, V vocabulary.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from app.model.layers import Mlp
from app.model.linear import VocabParallelEmbedding
from app.model.loss import summed_loss
from app.model.peers import Peers
from tests.distributed import run_distributed
from tests.rounding import expect_alike, expect_sums, in_fp64

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "numerics.json").read_text())[
    "cross_entropy_tp"
]
PLAIN = [case for case in GOLDEN if not case["label_smoothing"]]


def golden_loss(rank: int, case: dict[str, Any], chunk: int | None) -> tuple[float, torch.Tensor]:
    """Loss and gradient of the logits, with the logits for hidden states and an identity for
    weights.
    """
    logits_BSV, labels_BS = torch.tensor(case["logits"]), torch.tensor(case["target"])
    ranks, (_, length, vocab) = case["tp"], logits_BSV.shape
    missing = -length % ranks  # sequences divide over the ranks
    logits_BSV, labels_BS = (
        F.pad(logits_BSV, (0, 0, 0, missing)),
        F.pad(labels_BS, (0, missing), value=-100),
    )
    own = slice(rank * vocab // ranks, (rank + 1) * vocab // ranks)
    h = logits_BSV.chunk(ranks, dim=1)[rank].clone().requires_grad_()
    loss = summed_loss(
        h,
        nn.Parameter(torch.eye(vocab)[own].clone()),
        labels_BS,
        group=dist.group.WORLD,
        chunk_tokens=chunk,
    )
    loss.backward()
    return loss.item(), h.grad.numpy()


@pytest.mark.parametrize("chunk", [None, 2])
@pytest.mark.parametrize("case", PLAIN, ids=lambda case: f"tp{case['tp']}")
def test_loss_equals_golden(case: dict[str, Any], chunk: int | None):
    vocab = len(case["logits"][0][0])
    losses, grads = zip(*run_distributed(golden_loss, case["tp"], case, chunk), strict=True)
    wanted = torch.tensor(case["grad_logits"]) / torch.tensor(case["upstream"])[..., None]
    found = torch.cat([torch.from_numpy(grad) for grad in grads], dim=1)
    expect_sums({"gradient": found[:, : wanted.shape[1]]}, {"gradient": wanted}, terms=2 * vocab)
    assert not found[:, wanted.shape[1] :].any()
    total = torch.tensor(case["loss_per_rank"][0]).sum().item()
    assert set(losses) == {losses[0]}
    expect_sums({"loss": losses[0]}, {"loss": total}, terms=2 * vocab)


def embedded(rank: int, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    table = torch.randn(12, 5, generator=torch.Generator().manual_seed(0))
    embedding = VocabParallelEmbedding(5, 12, dist.group.WORLD)
    embedding.weight.data = table.chunk(dist.get_world_size())[rank].clone()
    x = embedding.lookup(tokens)
    weights = torch.arange(40.0).view(2, 4, 5).chunk(dist.get_world_size(), dim=1)[rank]
    (x * weights).sum().backward()
    return x.detach().numpy(), embedding.weight.grad.numpy()


@pytest.mark.parametrize("ranks", [2, 4])
def test_lookup_equals_one_rank(ranks: int):
    tokens = torch.tensor([[0, 11, 3, 3], [5, 6, 7, 11]])
    (whole, whole_grad), parts = (
        run_distributed(embedded, 1, tokens)[0],
        run_distributed(embedded, ranks, tokens),
    )
    assert (
        torch.cat([torch.from_numpy(x) for x, _ in parts], dim=1) == torch.from_numpy(whole)
    ).all()
    assert (
        torch.cat([torch.from_numpy(grad) for _, grad in parts]) == torch.from_numpy(whole_grad)
    ).all()


def feed_forward(rank: int) -> dict[str, Any]:
    """Output and input gradient of this rank's tokens; the parts of the weights are those of one
    matrix.
    """
    ranks, generator = dist.get_world_size(), torch.Generator().manual_seed(0)
    mlp = Mlp(8, 12, Peers(tp=dist.group.WORLD))
    gate_up, down, x = (
        torch.randn(*shape, generator=generator).float()
        for shape in ((2, 12, 8), (8, 12), (2, 4, 8))
    )
    mlp.w_up.weight.data = gate_up.chunk(ranks, dim=1)[rank].flatten(0, 1).clone()
    mlp.w_down.weight.data = down.chunk(ranks, dim=1)[rank].clone()
    own = x.chunk(ranks, dim=1)[rank].clone().requires_grad_()
    out = mlp(own)
    out.square().sum().backward()
    return {"out": out.detach().numpy(), "gradient": own.grad.numpy()}


def exact_feed_forward(rank: int) -> dict[str, Any]:
    with in_fp64():
        return feed_forward(rank)


@pytest.mark.parametrize("ranks", [2, 4])
def test_feed_forward_equals_one_rank(ranks: int):
    plain, exact = (
        run_distributed(compute, 1)[0] for compute in (feed_forward, exact_feed_forward)
    )
    parts = run_distributed(feed_forward, ranks)
    found = {name: np.concatenate([part[name] for part in parts], axis=1) for name in plain}
    for name in plain:
        expect_alike(*({name: values[name]} for values in (found, plain, exact)))
