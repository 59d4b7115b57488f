"""Kernels of the loss and of the experts' rows on a GPU, at the sizes of training."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from app.model.layers.linear import TorchLinear
from app.model.layers.loss import summed_loss
from app.model.layers.weight_grads import GroupedLinearGrad
from app.moe.permute import combine, permute, sort_by_expert
from app.moe.router import choose
from tests.moe_kernels import (
    check_gradients,
    check_grouped_gradient,
    check_into_gradient,
    check_spread,
    check_statistics,
    check_sums,
    check_top_experts,
    draw_rows,
    without_kernels,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
plain = pytest.fixture(without_kernels)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("tokens", "vocabulary"), [(8192, 50304), (4096, 151936)])
def test_statistics_and_gradient_of_the_loss(
    tokens: int, vocabulary: int, dtype: torch.dtype, plain: None
):
    check_statistics(tokens, vocabulary, dtype)
    check_into_gradient(tokens, vocabulary, dtype)


def test_logits_beyond_32_bits(plain: None):
    check_statistics(8400, 256_000, torch.bfloat16)
    check_into_gradient(8400, 256_000, torch.bfloat16)


@pytest.mark.parametrize(("drops", "rows_per_expert"), [(False, None), (True, None), (True, 1500)])
@pytest.mark.parametrize(
    "size", [(8192, 6, 64, 1024), (4096, 8, 128, 2048), (1024, 8, 16, 5120)], ids=str
)
def test_dispatched_rows_match_reference(
    size: tuple[int, int, int, int], drops: bool, rows_per_expert: int | None, plain: None
):
    drawn = draw_rows(*size, torch.bfloat16, drops, rows_per_expert)
    for check in (check_spread, check_sums, check_gradients):
        check(drawn)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("width", "columns"), [(1024, 1024), (768, 2048), (40, 200)])
@pytest.mark.parametrize("counts", [[700, 0, 33, 1500, 64, 1], [0, 5], [0, 0]], ids=str)
def test_grouped_gradient(counts: list[int], width: int, columns: int, dtype: torch.dtype):
    for spare in (0, 3):
        check_grouped_gradient(counts, width, columns, dtype=dtype, spare=spare)


@pytest.mark.parametrize(("first", "adds"), [(2, True), (0, False), (3, False)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_grouped_gradient_of_some_experts(first: int, adds: bool, dtype: torch.dtype):
    given = {"width": 768, "columns": 2048, "dtype": dtype}
    counts = [700, 0, 33, 1500, 64, 0]
    check_grouped_gradient(counts, spare=3, first=first, adds=adds, **given)
    if not adds:
        check_grouped_gradient(counts, spare=3, first=first, adds=False, fills=True, **given)


def test_grouped_gradient_beyond_32_bits():
    check_grouped_gradient([70_000, 300_000, 9, 230_000], 4096, 128, dtype=torch.bfloat16, spare=3)


def test_grouped_gradient_adds_to_wider_main_gradients():
    """Bits below those of the weights count."""
    rows_TI, grad_TO = (
        torch.randn(500, 64, device="cuda").bfloat16(),
        torch.randn(500, 128, device="cuda").bfloat16(),
    )
    gradient = GroupedLinearGrad(rows_TI, grad_TO, torch.tensor([100, 500], device="cuda").int())
    sums_EIO = torch.zeros(2, 64, 128, device="cuda")
    gradient.add_to(sums_EIO)
    torch.testing.assert_close(sums_EIO, gradient().float(), rtol=2.0**-8, atol=1e-4)
    assert sums_EIO.ne(sums_EIO.bfloat16()).any()


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"), [(8192, 64, 6), (4096, 128, 8), (5000, 512, 22)]
)
def test_top_experts(tokens: int, experts: int, top_k: int, plain: None):
    check_top_experts(tokens, experts, top_k)


def layer(leaves: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Routing, rows there and back and the loss, with the gradients of all."""
    x_TD, logits_TE, weight_VD, labels_BS = leaves
    probs_TK, experts_TK = choose(logits_TE, 6)
    record = sort_by_expert(experts_TK, logits_TE.shape[1])
    # unequal experts: probabilities matter
    factors_R = (1 + torch.arange(probs_TK.numel(), device="cuda") % 5).bfloat16()
    out_TD = combine(permute(x_TD, record) * factors_R[:, None], probs_TK, record)
    out_BSD = out_TD.view(*labels_BS.shape, -1)
    total, _ = summed_loss(out_BSD, weight_VD, labels_BS, backend=TorchLinear())
    loss = total / 1024
    return loss.detach(), *torch.autograd.grad(loss, (x_TD, logits_TE, weight_VD))


def drawn_leaves() -> tuple[Tensor, ...]:
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = (1024, 512), (1024, 64), (5000, 512)
    x_TD, logits_TE, weight_VD = (
        torch.randn(*shape, generator=generator, device="cuda") for shape in shapes
    )
    labels_BS = torch.randint(-500, 5000, (2, 512), generator=generator, device="cuda")
    weight_VD = torch.nn.Parameter((weight_VD / 20).bfloat16())
    return x_TD.bfloat16().requires_grad_(), logits_TE.requires_grad_(), weight_VD, labels_BS


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"), [(8192, 64, 6), (4096, 128, 8), (1, 64, 6)]
)
def test_counts_match_sorted_rows(
    tokens: int, experts: int, top_k: int, drops: bool, monkeypatch: pytest.MonkeyPatch
):
    scores_TE = torch.rand(tokens, experts, device="cuda")
    experts_TK = scores_TE.topk(top_k, dim=1).indices.sort(dim=1).values
    if drops:
        experts_TK = experts_TK.masked_fill(
            torch.rand(experts_TK.shape, device="cuda") < 0.2, experts
        )
    counted = sort_by_expert(experts_TK, experts, drops)
    with monkeypatch.context() as patch:
        patch.setattr("app.moe.permute.usable", lambda *_: False)
        wanted = sort_by_expert(experts_TK, experts, drops)
    kept_TK, used = experts_TK < experts, int(wanted.ends_E[-1])
    assert torch.equal(counted.ends_E, wanted.ends_E)
    assert torch.equal(counted.row_of_TK[kept_TK], wanted.row_of_TK[kept_TK])
    assert torch.equal(counted.token_of_row_R[:used], wanted.token_of_row_R[:used])
    assert not counted.token_of_row_R[used:].any()


def test_callers_take_the_kernels(monkeypatch: pytest.MonkeyPatch):
    leaves = drawn_leaves()
    fast = layer(leaves)
    with monkeypatch.context() as patch:
        for module in ("app.model.layers.loss", "app.moe.permute", "app.moe.router"):
            patch.setattr(f"{module}.usable", lambda *_: False)
        slow = layer(leaves)
    for name, ours, theirs in zip(("loss", "x", "logits", "weight"), fast, slow, strict=True):
        # of the largest: a gradient may round to the next bf16 on the way
        tight = 1e-6 if name == "loss" else 2e-2
        assert (
            ours.double() - theirs.double()
        ).abs().max() <= tight * theirs.double().abs().max(), name


def captured(run: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Return the results of a replay."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()  # kernels are compiled
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            found = run()
        graph.replay()
    stream.synchronize()
    return found


def test_a_graph_repeats_the_bits():
    leaves = drawn_leaves()
    for ours, theirs in zip(captured(lambda: layer(leaves)), layer(leaves), strict=True):
        assert torch.equal(ours, theirs)
