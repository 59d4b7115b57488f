"""Linear attention: blocks of tokens against one token at a time, documents against each alone,
the convolution against torch's.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from app.model.attention import delta_library
from app.model.attention.delta_rule import (
    BLOCK,
    by_torch,
    forgetting,
    one_token,
    short_convolution,
    with_state,
)
from tests.rounding import EPS, error, in_fp64
from tests.tensors.kernels_layer import check_convolution

TOKENS = 2 * BLOCK + 7


@pytest.fixture
def exact() -> Iterator[None]:
    with in_fp64():
        yield


def drawn(tokens: int, *, fastest: float = 1.0) -> tuple[Tensor, ...]:
    """Queries, keys, values, decays and shares of what is written, of 2 and 4 heads."""
    random = torch.Generator().manual_seed(tokens)

    def normal(*shape: int) -> Tensor:
        return torch.randn(2, tokens, *shape, generator=random, dtype=torch.float64)

    decay = -fastest * normal(4).abs()
    return normal(2, 8), normal(2, 8), normal(4, 6), decay, normal(4).sigmoid()


def by_token(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    state = torch.zeros(2, 4, 8, 6, dtype=torch.float64)
    tokens = zip(*(each.unbind(1) for each in (q, k, v, g, beta)), strict=True)
    found = [
        one_token(q, k, v, g_BH=g, beta_BH=beta, state_BHKV=state) for q, k, v, g, beta in tokens
    ]
    return torch.stack(found, dim=1), state


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("tokens", [1, 5, BLOCK, TOKENS])
@pytest.mark.parametrize("fastest", [0.1, 20.0])
def test_blocks_equal_one_token_at_a_time(tokens: int, fastest: float):
    q, k, v, g, beta = drawn(tokens, fastest=fastest)
    found = with_state(q, k, v, g_BSH=g, beta_BSH=beta)
    for ours, wanted in zip(found, by_token(q, k, v, g, beta), strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("exact")
def test_gradients_equal_finite_differences():
    given = [each[:1].requires_grad_() for each in drawn(4)]

    def out(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        return by_torch(q, k, v, g_BSH=g, beta_BSH=beta)

    assert torch.autograd.gradcheck(out, given)


def test_gradients_of_strong_decay_keep_their_digits():
    """In fp32: they are smaller by exp(-20) than what passes at a token's own place."""
    given = drawn(BLOCK)
    weight = torch.randn(2, BLOCK, 4, 6, generator=torch.Generator().manual_seed(1)).double()

    def gradient(*given: Tensor) -> dict[str, Tensor]:
        q, k, v, g, beta = given
        decay = (g - 20).requires_grad_()
        out = by_torch(q, k, v, g_BSH=decay, beta_BSH=beta)
        (out * weight.to(out.dtype)).sum().backward()
        assert decay.grad is not None
        return {"decay": decay.grad}

    with in_fp64():
        exact = gradient(*given)
    found = gradient(*(each.float() for each in given))
    assert found["decay"].dtype == torch.float32
    # decays are differences of sums that grow by 20 per token
    assert error(found["decay"], exact["decay"]) < 20 * BLOCK * EPS


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("begins", [1, 3, BLOCK, BLOCK + 9])
def test_documents_are_computed_as_if_alone(begins: int):
    q, k, v, g, beta = drawn(TOKENS)
    number = (torch.arange(TOKENS) >= begins).long().expand(2, -1)
    found = by_torch(q, k, v, g_BSH=forgetting(g, number), beta_BSH=beta)
    for part in (slice(0, begins), slice(begins, None)):
        alone = [each[:, part] for each in (q, k, v, g, beta)]
        wanted = by_torch(*alone[:3], g_BSH=alone[3], beta_BSH=alone[4])
        torch.testing.assert_close(found[:, part], wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("exact")
def test_convolution_equals_torch():
    x, taps = torch.randn(2, 9, 5).double(), torch.randn(5, 4).double()
    padded = F.pad(x.transpose(1, 2), (3, 0))
    wanted = F.silu(F.conv1d(padded, taps[:, None], groups=5)).transpose(1, 2)
    torch.testing.assert_close(short_convolution(x, taps, None), wanted)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("tokens", [2, 9])
@pytest.mark.parametrize("documents", [False, True])
def test_gradients_of_convolution_equal_finite_differences(tokens: int, documents: bool):
    x = torch.randn(2, tokens, 3).double().requires_grad_()
    taps = torch.randn(3, 4).double().requires_grad_()
    number = torch.tensor([[0, 0, 0, 1, 1, 1, 2, 3, 3], [4, 5, 5, 5, 5, 5, 5, 5, 5]])[:, :tokens]
    number = number if documents else None
    assert torch.autograd.gradcheck(lambda x, taps: short_convolution(x, taps, number), (x, taps))


@pytest.mark.usefixtures("exact")
def test_convolution_sees_one_document():
    x, taps = torch.randn(1, 9, 5).double(), torch.randn(5, 4).double()
    number = (torch.arange(9) >= 4).long()[None]
    found = short_convolution(x, taps, number)
    alone = [short_convolution(part, taps, None) for part in (x[:, :4], x[:, 4:])]
    torch.testing.assert_close(found, torch.cat(alone, dim=1))


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("tokens", "channels", "width"), [(3, 5, 4), (150, 70, 4), (65, 64, 2)])
def test_convolution_kernel_equals_fp64(
    tokens: int, channels: int, width: int, dtype: torch.dtype, documents: bool
):
    check_convolution(tokens, channels, width, dtype=dtype, documents=documents)


BF16, GPU = torch.bfloat16, torch.device("cuda")


@pytest.mark.parametrize(
    ("version", "told"),
    [
        (None, "by torch: slow; pip install 'graphfold[linear]' brings kernels"),
        ("0.4.2", "by torch: slow; fla-core 0.4.2 is older than 0.5"),
        ("0.5.1", "by flash-linear-attention"),
    ],
)
def test_opening_says_what_computes_linear_attention(
    version: str | None, told: str, monkeypatch: pytest.MonkeyPatch
):
    def installed(name: str) -> str:
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(delta_library.metadata, "version", installed)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    line = delta_library.linear_attention_line
    assert line(BF16, GPU, deterministic=False) == told
    ordered = line(BF16, GPU, deterministic=True)
    assert ("other hosts may round otherwise" in ordered) == (told == "by flash-linear-attention")
    assert line(BF16, torch.device("cpu"), deterministic=True) == "by torch: on a CPU"
    assert line(torch.float32, GPU, deterministic=True) == "by torch: in float32"


@pytest.mark.parametrize(
    ("triton", "major", "by"),
    [("3.6.0", 9, "Triton 3.6.0"), ("3.7.1", 9, None), ("3.7.0", 9, "Triton 3.7.0"),
     ("3.6.0", 8, None), ("3.3.1", 9, None)],
)  # fmt: skip
def test_kernels_with_a_wrong_backward_are_not_taken(
    triton: str, major: int, by: str | None, monkeypatch: pytest.MonkeyPatch
):
    versions = {"fla-core": "0.6.0", "triton": triton}
    monkeypatch.setattr(delta_library.metadata, "version", versions.__getitem__)
    monkeypatch.setattr(delta_library, "find_spec", lambda name: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    why = delta_library.why_by_torch(torch.bfloat16, torch.device("cuda"))
    assert why is None if by is None else by in why
