"""Feed-forwards without a gate (model.mlp_gate=false)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from app.choices import ActivationKind
from app.cli.options.compose import load_overrides
from app.config import ModelConfig
from app.model.layers.layers import Mlp
from tests.rounding import expect_alike, numbered, plain_and_exact
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
    assert parameters["w_up.weight"].shape == (model.ffn_hidden_size, 32)
    assert ("b_up" in parameters) == biased

    def gradients(out: Tensor, of: Sequence[Tensor]) -> list[Tensor]:
        return [out, *torch.autograd.grad(out.square().sum(), of)]

    def formula(x: Tensor, *of: Tensor) -> list[Tensor]:
        named = dict(zip(parameters, (each.requires_grad_() for each in of), strict=True))
        up, down = (named[f"w_{name}.weight"] for name in ("up", "down"))
        b_up, b_down = (named.get(f"b_{name}") for name in ("up", "down"))
        return gradients(F.linear(FORMULAS[kind](F.linear(x, up, b_up)), down, b_down), of)

    held = [each.detach() for each in parameters.values()]
    found = numbered(gradients(mlp(x), [*parameters.values()]))
    expect_alike(found, *plain_and_exact(formula, x, *held))


def test_silu_without_a_gate_is_a_run():
    run = load_overrides(["model=dense_tiny", "model.mlp_gate=false"])
    assert run.model.activation is ActivationKind.silu
