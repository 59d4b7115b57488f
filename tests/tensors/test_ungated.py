"""Feed-forwards without a gate (model.mlp_gate=false)."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from app.choices import ActivationKind
from app.cli.options.compose import load_overrides
from app.config import ModelConfig
from app.model.layers.layers import Mlp
from tests.tensors.models import make_chunk

MODEL = ModelConfig(hidden_size=32, num_heads=4, num_kv_heads=4, init_std=0.3, mlp_gate=False)
FORMULAS = {
    ActivationKind.silu: F.silu,
    ActivationKind.gelu_tanh: lambda up: F.gelu(up, approximate="tanh"),
    ActivationKind.gelu: F.gelu,
    ActivationKind.relu2: lambda up: F.relu(up) ** 2,
}


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("kind", ActivationKind)
def test_it_is_its_formula(kind: ActivationKind, biased: bool):
    model = dataclasses.replace(MODEL, activation=kind, mlp_bias=biased)
    mlp = next(each for each in make_chunk(model).modules() if isinstance(each, Mlp))
    parameters = dict(mlp.named_parameters())
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for each in parameters.values():
            each.copy_(torch.randn(each.shape, generator=random) / 4)
    x = torch.randn(2, 5, 32, generator=random)
    up, down = (parameters[f"w_{name}.weight"] for name in ("up", "down"))
    b_up, b_down = (parameters.get(f"b_{name}") for name in ("up", "down"))
    assert up.shape == (model.ffn_hidden_size, 32) and (b_up is not None) == biased

    def gradients(out: Tensor) -> list[Tensor]:
        return [out, *torch.autograd.grad(out.square().sum(), [*parameters.values()])]

    expected = F.linear(FORMULAS[kind](F.linear(x, up, b_up)), down, b_down)
    torch.testing.assert_close(gradients(mlp(x)), gradients(expected))


def test_silu_without_a_gate_is_a_run():
    run = load_overrides(["model=dense_tiny", "model.mlp_gate=false"])
    assert run.model.activation is ActivationKind.silu
