"""Every expert of a small model gets tokens from the start, and the balancing losses keep the
load even while it learns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from app.choices import Score
from app.config import ModelConfig, MoEConfig
from app.moe.phases import Router
from app.moe.router import update_bias
from tests.cases import chosen, sampled
from tests.tensors.models import make_chunk, mean_loss

MOE = MoEConfig(num_experts=8, top_k=2, ffn_hidden_size=32, aux_loss_coeff=0.01)
MODEL = ModelConfig(
    num_layers=2, hidden_size=64, num_heads=4, num_kv_heads=2, vocab_size=264, moe=MOE
)
SIGMOID = dataclasses.replace(MOE, score=Score.sigmoid)
MANY = dataclasses.replace(MOE, num_experts=32, top_k=4)
STEPS = 40


def text_like(step: int) -> Tensor:
    """16 sequences of 65 bytes as skewed as text: Zipf's law over the ids, and every second byte
    follows from the one before.
    """
    random = torch.Generator().manual_seed(step)
    weights = 1 / torch.arange(1, 257, dtype=torch.float64)
    tokens = weights.multinomial(16 * 65, replacement=True, generator=random).view(16, 65)
    tokens[:, 1::2] = (tokens[:, 0:-1:2] * 7 + 3) % 256
    return tokens


def loads(model: ModelConfig, steps: int, **options: int) -> Iterator[Tensor]:
    """Tokens per expert, [layers, experts], of every step of a training run on text-like tokens."""
    chunk = make_chunk(model, **options)
    optimizer = torch.optim.AdamW(chunk.parameters(), lr=3e-3)
    routers = [module for module in chunk.modules() if isinstance(module, Router)]
    for step in range(steps):
        loss, out = mean_loss(chunk, text_like(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for router, report in zip(routers, out.routing, strict=True):
            router.bias_E.copy_(
                update_bias(router.bias_E, report.counts_E, model.moe.bias_update_rate)
            )
        yield torch.stack([report.counts_E for report in out.routing])


def imbalance(counts_LE: Tensor) -> float:
    """Largest load over the mean load, in the worst layer; 1 is even."""
    return (counts_LE.amax(dim=1) / counts_LE.double().mean(dim=1)).max().item()


@pytest.mark.parametrize("seed", sampled(range(1, 6), 5))
@pytest.mark.parametrize("moe", [MOE, SIGMOID, MANY], ids=["softmax", "sigmoid", "32 experts"])
def test_every_expert_gets_tokens_at_the_start(moe: MoEConfig, seed: int):
    (counts,) = loads(dataclasses.replace(MODEL, moe=moe), 1, seed=seed)
    assert counts.sum(dim=1).tolist() == [16 * 64 * moe.top_k] * 2
    assert counts.min() > 0 and imbalance(counts) < 3


def late_imbalance(moe: MoEConfig) -> tuple[float, float]:
    """Mean imbalance of the last quarter of a run, and the fewest tokens that an expert had over
    that quarter.
    """
    late = list(loads(dataclasses.replace(MODEL, moe=moe), STEPS))[-STEPS // 4 :]
    return sum(map(imbalance, late)) / len(late), sum(late).min().item()


@pytest.mark.full
def test_without_balancing_a_few_experts_take_all():
    # of at most num_experts / top_k = 4
    assert late_imbalance(dataclasses.replace(MOE, aux_loss_coeff=0))[0] > 3


BALANCED = {
    "aux-softmax": dataclasses.replace(MOE, aux_loss_coeff=0.1),
    "aux-sigmoid": dataclasses.replace(SIGMOID, aux_loss_coeff=0.1),
    "bias": dataclasses.replace(SIGMOID, aux_loss_coeff=0, bias_update_rate=0.01),
}


@pytest.mark.every(2)
@pytest.mark.parametrize(
    "moe",
    chosen(BALANCED.values(), [BALANCED["aux-softmax"], BALANCED["bias"]]),
    ids=BALANCED,
)
def test_balancing_keeps_every_expert_in_use(moe: MoEConfig):
    worst, fewest = late_imbalance(moe)
    assert worst < 2 and fewest > 0.3 * STEPS / 4 * 16 * 64 * moe.top_k / moe.num_experts
