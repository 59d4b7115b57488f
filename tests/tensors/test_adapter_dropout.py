"""Dropout of adapters' inputs: as `peft` has it, and how its masks are spread."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from app.config.lora import LoraConfig
from app.model.adapter_dropout import AdapterDropout
from app.model.layers.frozen import FrozenLinear
from app.model.lora import AdapterPair, DroppingLoraLinear
from app.plan.model.lora import adapted
from app.plan.model.mlp import MlpWeights
from app.plan.sharding.blocks import ShardCoords

RATE = 0.2
TOKENS, WIDTH = 96, 64


def dropout_of(replica: tuple[int, int] = (0, 1)) -> AdapterDropout:
    found = AdapterDropout(RATE, 7, torch.arange(TOKENS), sequences=2, replica=replica)
    found.start(0)
    return found


def kept(dropout: AdapterDropout, name: str = "layers.0.mlp", channel: int = 0) -> Tensor:
    ones = torch.ones(2, TOKENS, WIDTH)
    return dropout.dropped(ones, 0, dropout.channels(name, channel, WIDTH)).bool()


def test_a_share_of_values_is_kept_in_every_row_and_column():
    found = kept(dropout_of()).float()
    assert found.mean().item() == pytest.approx(1 - RATE, abs=0.015)
    for dims in ((0, 1), 2):  # of channels, of tokens: a standard deviation is 0.03, 0.05
        assert (found.mean(dim=dims) - (1 - RATE)).abs().max() < 0.25


def test_masks_are_independent_of_each_other():
    """Of another adapter, channel, token, sequence, microbatch, replica and update."""
    first, later, other = dropout_of(), dropout_of(), dropout_of()
    mask = kept(first)
    later.start(1)
    other.finish_step(torch.zeros(()))
    other.start(0)
    others = {
        "adapter": kept(first, "layers.1.mlp"),
        "channel": kept(first, channel=WIDTH),
        "token": mask.roll(1, dims=1),
        "sequence": mask.flip(0),
        "microbatch": kept(later),
        "replica": kept(dropout_of((1, 2))),
        "update": kept(other),
    }
    for name, each in others.items():
        same = (mask == each).float().mean().item()
        assert same == pytest.approx((1 - RATE) ** 2 + RATE**2, abs=0.025), name


def test_masks_repeat_and_follow_the_sequence():
    """A skipped update repeats them; so does the same sequence on another replica."""
    first, second = dropout_of(), dropout_of((1, 2))
    first.finish_step(torch.ones(()))
    first.start(1)
    assert torch.equal(kept(first), kept(second))
    first.restored(0)
    first.start(0)
    assert torch.equal(kept(first), kept(dropout_of()))


class Given(nn.Module):
    """Masks of ours in the place of `nn.Dropout`."""

    def __init__(self, dropout: AdapterDropout, channels_I: Tensor) -> None:
        super().__init__()
        self.dropout, self.channels_I = dropout, channels_I

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout.dropped(x, 0, self.channels_I) / (1 - RATE)


def by_formula(x: Tensor, base: nn.Linear, a: nn.Parameter, b: nn.Parameter, drop: Given) -> Tensor:
    return base(x) + LORA.scale * drop(x) @ a.T @ b.T


def by_peft(x: Tensor, base: nn.Linear, a: nn.Parameter, b: nn.Parameter, drop: Given) -> Tensor:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, lora_alpha=6, lora_dropout=RATE)
    layer = peft.tuners.lora.Linear(base, "default", r=4, lora_alpha=6, config=config)
    assert isinstance(layer.lora_dropout["default"], nn.Dropout)
    layer.lora_dropout["default"] = drop
    layer.lora_A["default"].weight = a
    layer.lora_B["default"].weight = b
    return layer(x)


LORA = LoraConfig(rank=4, alpha=6.0, dropout=RATE)


@pytest.mark.parametrize("reference", [by_formula, pytest.param(by_peft, marks=pytest.mark.full)])
def test_layer_drops_inputs_of_adapters_alone(reference: Callable[..., Tensor]):
    """Output and gradients; outside of training nothing is dropped."""
    weight = adapted(MlpWeights.of(WIDTH, 48), LORA, "body.mlp.").w_down
    torch.manual_seed(0)
    base = nn.Linear(48, WIDTH, bias=False).requires_grad_(False)
    pair = AdapterPair(weight.adapters[0], ShardCoords(), base.weight)
    nn.init.normal_(pair.a)
    nn.init.normal_(pair.b)
    dropout = dropout_of()
    channels_I = dropout.channels("layer", 0, 48)
    ours = DroppingLoraLinear(FrozenLinear(), [pair], LORA.scale, dropout, 0, [channels_I])
    x, grad = torch.randn(2, TOKENS, 48).requires_grad_(), torch.randn(2, TOKENS, WIDTH)
    inputs = x, pair.a, pair.b
    with dropout.during(training=True):
        out = ours.linear(x, base.weight, None, None)
        found = out, *torch.autograd.grad(out, inputs, grad)
    out = reference(x, base, pair.a, pair.b, Given(dropout, channels_I))
    wanted = out, *torch.autograd.grad(out, inputs, grad)
    plain = by_formula(x, base, pair.a, pair.b, nn.Identity())
    found, wanted = (*found, ours.linear(x, base.weight, None, None)), (*wanted, plain)
    for each, value in zip(found, wanted, strict=True):
        torch.testing.assert_close(each, value, rtol=1e-4, atol=1e-4)
