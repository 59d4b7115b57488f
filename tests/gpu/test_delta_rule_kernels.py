"""The gated delta rule by flash-linear-attention on a GPU, beside torch in fp64; runs with it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor

from app.model.attention.delta_library import by_library
from app.model.attention.delta_rule import DeltaRule, by_torch, forgetting
from tests.gpu.programs import GPUS, losses
from tests.rounding import in_fp64
from tests.tensors.kernels_layer import check_convolution

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not GPUS, reason="needs a CUDA device"),
    pytest.mark.skipif(find_spec("fla") is None, reason="needs flash-linear-attention"),
    # what fla and tilelang say of themselves
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ImportWarning"),
]
TOKENS = 200  # three blocks, and a part of one
LINEAR = (
    "train.steps=12",
    "model=qwen3_next_80b_a3b",
    "model.num_layers=2",
    "model.layer_types=[linear_attention,full_attention]",
    "model.hidden_size=64",
    "model.ffn_hidden_size=128",
    "model.num_heads=4",
    "model.num_kv_heads=2",
    "model.head_dim=16",
    "model.rotary_dim=8",
    "model.vocab_size=264",
    "model.moe=null",
    "model.linear_attention.key_heads=2",
    "model.linear_attention.value_heads=4",
    "model.linear_attention.key_head_dim=32",
    "model.linear_attention.value_head_dim=32",
    "data.document_mask=true",
    "parallel.dp=1",
    "precision=bf16",
)


def results(rule: DeltaRule, given: list[Tensor], grad: Tensor, number: Tensor) -> list[Tensor]:
    """Output, and gradients of queries, keys, values, decays and shares."""
    leaves = [each.detach().clone().requires_grad_() for each in given]
    q, k, v, g, beta = leaves
    out = rule(q, k, v, g_BSH=forgetting(g, number), beta_BSH=beta)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


@pytest.mark.parametrize("value_heads", [2, 4], ids=["equal heads", "two values per key"])
@pytest.mark.parametrize("begins", [TOKENS, 70], ids=["one document", "documents"])
def test_the_library_equals_fp64(value_heads: int, begins: int):
    generator = torch.Generator("cuda").manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(2, TOKENS, *shape, device="cuda", generator=generator)

    q, k, v, grad = (drawn(heads, 64).bfloat16() for heads in (2, 2, value_heads, value_heads))
    g, beta = -0.1 * drawn(value_heads).abs(), drawn(value_heads).sigmoid().bfloat16()
    number = (torch.arange(TOKENS, device="cuda") >= begins).long().expand(2, -1)
    given = [q, k, v, g, beta]
    found = results(by_library, given, grad, number)
    with in_fp64():
        exact = results(by_torch, [each.double() for each in given], grad.double(), number)
    for each, wanted in zip(found, exact, strict=True):
        assert (each.double() - wanted).norm() < 2e-2 * wanted.norm()


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_convolution_equals_fp64(dtype: torch.dtype, documents: bool):
    check_convolution(1000, 300, 4, dtype=dtype, documents=documents)


@pytest.fixture(scope="module")
def eager(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[float, float]]:
    """Losses and gradient norms without graphs, which repeat."""
    first, second = (losses(tmp_path_factory.mktemp("linear") / "run", *LINEAR) for _ in range(2))
    assert first == second
    return first


@pytest.mark.parametrize("graph", ["full_iteration", "partial", "attn"])
def test_a_run_with_graphs_repeats_one_without(
    graph: str, eager: list[tuple[float, float]], tmp_path: Path
):
    assert losses(tmp_path / "graphs", *LINEAR, f"cuda_graph={graph}") == eager
