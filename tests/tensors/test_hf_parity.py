"""Logits and gradients equal those of Hugging Face `transformers` on the same weights, fp32.

Llama, Qwen2 and Qwen3 (dense), Qwen3-MoE and Mixtral; Qwen2-MoE for the gated shared expert;
GLM-4-MoE for sigmoid scores with a selection bias, groups, a scale and an ungated shared expert;
DeepSeek-V2 and -V3 for multi-head latent attention with YaRN.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from app.choices import Score
from app.model.chunk import Chunk
from app.model.layers.linear import named_parameters
from tests.cases import chosen
from tests.rounding import expect_alike, numbered, plain_and_exact
from tests.tensors.hf_parity import CASES
from tests.tensors.hf_weights import converted, copy_weights, spread_weights
from tests.tensors.models import draw_tokens, forward, make_chunk


@pytest.fixture(scope="module", params=CASES)
def pair(request: pytest.FixtureRequest) -> tuple[nn.Module, Chunk]:
    """Their model and ours with the same weights."""
    build, theirs, ours = CASES[request.param]()
    hf, chunk = build(theirs).eval(), make_chunk(ours)
    spread_weights(hf)
    copy_weights(converted(hf.state_dict(), ours), chunk)
    return hf, chunk


@pytest.mark.every(3)
@pytest.mark.parametrize("length", chosen([1, 7, 33], [33]))
@torch.no_grad()
def test_logits_equal_transformers(pair: tuple[nn.Module, Chunk], length: int):
    hf, chunk = pair
    tokens = draw_tokens(chunk.model, 3, length, seed=length)
    plain, exact = plain_and_exact(
        lambda model: [model(input_ids=tokens, use_cache=False).logits], hf
    )
    assert exact["0"].std() > 0.5  # logits so small that anything would agree prove nothing
    expect_alike({"0": forward(chunk, tokens).x}, plain, exact)


@pytest.mark.every(6)
@torch.no_grad()
def test_logits_equal_transformers_at_any_positions(pair: tuple[nn.Module, Chunk]):
    hf, chunk = pair
    tokens = draw_tokens(chunk.model, 2, 6)
    positions = torch.tensor([[0, 1, 2, 3, 4, 5], [3, 7, 8, 21, 40, 63]])
    given = {
        "input_ids": tokens,
        "position_ids": positions,
        "attention_mask": torch.ones_like(tokens),
    }
    theirs = plain_and_exact(lambda model: [model(**given, use_cache=False).logits], hf)
    expect_alike({"0": forward(chunk, tokens, positions).x}, *theirs)


def test_gradients_equal_transformers(pair: tuple[nn.Module, Chunk]):
    hf, chunk = pair
    tokens = draw_tokens(chunk.model, 2, 9)
    weight = torch.randn(2, 9, chunk.model.vocab_size, generator=torch.Generator().manual_seed(1))

    def gradients(model: nn.Module, logits: Tensor) -> dict[str, Tensor]:
        model.zero_grad()
        (logits * weight).sum().backward()
        return {
            name: torch.zeros_like(p) if p.grad is None else p.grad
            for name, p in model.named_parameters()
        }

    def theirs(model: nn.Module) -> list[Tensor]:
        found = converted(
            gradients(model, model(input_ids=tokens, use_cache=False).logits), chunk.model
        )
        return [found[name] for name in compared]

    moe = chunk.model.moe
    # one probability over itself is 1, so that gradients of its router are noise around 0
    constant = (
        moe is not None
        and moe.top_k == 1
        and (moe.normalizes_sigmoids if moe.score is Score.sigmoid else not moe.pre_softmax)
    )
    found = gradients(chunk, forward(chunk, tokens).x).values()
    own = dict(zip((name for name, _ in named_parameters(chunk)), found, strict=True))
    compared = [name for name in own if not (constant and name.endswith("router.weight"))]
    assert all(own[name].abs().max() < 1e-3 for name in own.keys() - set(compared))
    ours = numbered(own[name] for name in compared)
    expect_alike(ours, *plain_and_exact(theirs, hf))
