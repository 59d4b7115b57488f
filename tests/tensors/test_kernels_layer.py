"""Kernels of a layer against plain torch in fp64: values, gradients, and equal bits when repeated.

Runs on a GPU where there is one, and interpreted otherwise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from app.choices import Recompute
from app.config import ModelConfig
from app.kernels import swiglu as kernels
from app.kernels import tiling
from app.kernels.rms_norm import rms_norm, rms_norm_beside
from app.kernels.swiglu import swiglu
from app.model.attention import modules as attention
from app.model.attention.modules import Attention
from app.model.block import DenseBody
from app.model.layers import layers
from app.model.layers.layers import Context, Mlp, RMSNorm, RotaryTable
from app.model.layers.recompute import Recomputation
from app.plan.model.mlp import MlpWeights
from app.plan.model.norm import NormWeights
from app.plan.recompute import RecomputeChoice
from tests.rounding import expect_alike, numbered, plain_and_exact
from tests.tensors.kernels_layer import (
    DEVICE,
    EPS,
    Outputs,
    check,
    check_geglu,
    check_rms_norm,
    check_rms_norm_beside,
    check_swiglu,
    close,
    head_cases,
    normal,
    plain_swiglu,
    results,
)

DTYPES = [torch.float32, torch.bfloat16]
MODEL = ModelConfig(num_layers=1, hidden_size=48, num_heads=6, num_kv_heads=2, ffn_hidden_size=40)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 5, 14), (9, 1024), (7, 2 * 1100), (0, 8)], ids=str)
def test_swiglu(shape: tuple[int, ...], dtype: torch.dtype):
    check_swiglu(*shape, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_geglu(dtype: torch.dtype):
    check_geglu(3, 5, 2 * 70, dtype=dtype)


@pytest.mark.parametrize("used", [0, 5, 9, 20])
def test_swiglu_of_the_rows_that_count(used: int, monkeypatch: pytest.MonkeyPatch):
    """Two programs for more tiles; what lies behind is no number, and is left as it was."""
    for name, value in (("MULTIPROCESSORS", 1), ("PROGRAMS", 2), ("TILE", 32)):
        monkeypatch.setattr(f"app.kernels.swiglu.{name}", value)
    rows = 14
    both, grad = (normal(rows, width, dtype=torch.float32, seed=width) for width in (24, 12))
    exact = results(lambda x: (swiglu(x),), (both[:used],), (grad[:used],))
    both[used:], grad[used:] = float("nan"), float("nan")
    count = torch.tensor([used], dtype=torch.int32, device=DEVICE)
    found = results(lambda x: (swiglu(x, count),), (both,), (grad,))
    for ours, wanted in zip(found, exact, strict=True):
        assert torch.equal(ours[:used], wanted)
    act, grad_both = torch.full_like(grad, 7.0), torch.full_like(both, 7.0)
    kernels.launch(kernels._forward, act, count, both, act, GELU=False)
    kernels.launch(kernels._backward, act, count, grad, both, grad_both, GELU=False)
    assert act[used:].eq(7).all() and grad_both[used:].eq(7).all()


def test_swiglu_of_large_gates_and_expanded_gradients():
    both = torch.tensor([[-80.0, 80.0, 2.0, 3.0], [0.0, -0.0, 5.0, 7.0]], device=DEVICE)
    one = torch.ones(1, 1, device=DEVICE).expand(2, 2)
    found, exact = (
        results(lambda x: (swiglu(x),), (both,), (one,)),
        results(plain_swiglu, (both.double(),), (one.double(),)),
    )
    for mine, right in zip(found, exact, strict=True):
        close(mine, right)


# a row in many blocks: seconds in Triton's interpreter
WIDE = pytest.param((2, 8192), marks=pytest.mark.full)


@pytest.mark.cover(1)
@pytest.mark.parametrize("norms", [False, True], ids=["plain", "norms"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("batch", "length", "groups", "queries", "width", "tables", "strided"),
    [
        (1, 37, 4, 1, 64, 1, True),
        (2, 5, 2, 3, 12, 2, False),
        (2, 5, 2, 3, 12, 2, True),
        (1, 9, 1, 4, 8, 1, True),
        (3, 45, 3, 1, 16, 3, True),
        (1, 0, 2, 2, 8, 1, True),
    ],
)
def test_heads(batch, length, groups, queries, width, tables, strided, dtype, norms):
    check(
        *head_cases(
            batch,
            length,
            groups,
            queries=queries,
            width=width,
            dtype=dtype,
            tables=tables,
            norms=norms,
        ),
        strided=strided,
    )


@pytest.mark.cover(1)
@pytest.mark.parametrize("norms", [False, True], ids=["plain", "norms"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("width", "rotated"), [(12, 2), (16, 8), (24, 22), (8, 8)])
def test_heads_of_which_a_part_is_rotated(width, rotated, dtype, norms):
    check(
        *head_cases(
            2, 5, 2, queries=3, width=width, dtype=dtype, tables=2, norms=norms, rotated=rotated
        ),
        strided=True,
    )


def test_heads_of_a_gradient_whose_values_lie_apart():
    kernel, plain, inputs = head_cases(
        1, 5, 2, queries=1, width=8, dtype=torch.float32, tables=1, norms=True
    )
    grads = tuple(
        normal(8, 1, 5, 2, dtype=torch.float32, seed=seed).permute(1, 2, 3, 0) for seed in range(3)
    )
    exact = results(
        plain, tuple(x.double() for x in inputs), tuple(grad.double() for grad in grads)
    )
    for mine, right in zip(results(kernel, inputs, grads), exact, strict=True):
        close(mine, right)


@pytest.mark.cover(1)
@pytest.mark.parametrize("programs", [132, 1], ids=["one tile each", "several tiles each"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 5, 14), (2, 75, 64), (5, 1100), WIDE, (0, 8)], ids=str)
def test_rms_norm(
    shape: tuple[int, ...], dtype: torch.dtype, programs: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tiling, "MULTIPROCESSORS", programs)
    check_rms_norm(*shape, dtype=dtype)


@pytest.mark.cover(1)
@pytest.mark.parametrize("programs", [132, 1], ids=["one tile each", "several tiles each"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 5, 14), (2, 75, 64), WIDE, (0, 8)], ids=str)
def test_rms_norm_beside_a_residual(
    shape: tuple[int, ...], dtype: torch.dtype, programs: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tiling, "MULTIPROCESSORS", programs)
    check_rms_norm_beside(*shape, dtype=dtype)


def test_gradients_beside_a_norm_may_be_strided_or_missing():
    x, weight = normal(3, 7, 16, dtype=torch.float32), normal(16, dtype=torch.float32, seed=1)
    grads = normal(3, 7, 16, dtype=torch.float32, seed=2), normal(7, 3, 16, dtype=torch.float32)
    whole = (grads[0], grads[1].transpose(0, 1))
    found = results(lambda x, w: rms_norm_beside(x, w, EPS), (x, weight), whole)
    laid = tuple(grad.contiguous() for grad in whole)
    wanted = results(lambda x, w: rms_norm_beside(x, w, EPS), (x, weight), laid)
    assert all(map(torch.equal, found, wanted))
    # of the norm alone
    alone = results(lambda x, w: rms_norm_beside(x, w, EPS)[1:], (x, weight), laid[1:])
    assert all(
        map(torch.equal, alone, results(lambda x, w: (rms_norm(x, w, EPS),), (x, weight), laid[1:]))
    )


def test_rms_norm_of_a_strided_input():
    x, weight = (
        normal(3, 7, 2, 16, dtype=torch.float32)[:, :, 0],
        normal(16, dtype=torch.float32, seed=1),
    )
    close(rms_norm(x, weight, EPS), F.rms_norm(x.double(), (16,), weight.double(), EPS))
    transposed = normal(16, 9, dtype=torch.float32).T
    close(
        rms_norm(transposed, weight, EPS),
        F.rms_norm(transposed.double(), (16,), weight.double(), EPS),
    )


def test_swiglu_under_a_checkpoint():
    both, grad = normal(3, 40, dtype=torch.bfloat16), normal(3, 20, dtype=torch.bfloat16, seed=1)
    kept = results(lambda x: (swiglu(x),), (both,), (grad,))
    dropped = results(lambda x: (checkpoint(swiglu, x, use_reentrant=False),), (both,), (grad,))
    assert all(map(torch.equal, kept, dropped))


def set_parameters(module: torch.nn.Module) -> None:
    """Its parameters, set to the same values in every test."""
    for number, param in enumerate(module.to(DEVICE).parameters()):
        param.data = normal(*param.shape, dtype=torch.float32, seed=number) * 0.2


def trained(module: torch.nn.Module, forward: Callable[[Tensor], Tensor]) -> Outputs:
    """Output, gradient of the input, gradients of the parameters."""
    module.zero_grad()
    x = normal(2, 6, MODEL.hidden_size, dtype=torch.float32, seed=9).requires_grad_()
    out = forward(x)
    out.backward(normal(*out.shape, dtype=torch.float32, seed=8))
    return (out.detach(), x.grad, *(param.grad.clone() for param in module.parameters()))


def same_with_kernels(
    run: Callable[[torch.nn.Module], Outputs],
    module: torch.nn.Module,
    switch: Callable[[bool], None],
) -> None:
    """A module's results with kernels are as near to fp64 as those without."""
    switch(False)
    plain, exact = plain_and_exact(run, module)
    switch(True)
    expect_alike(numbered(run(module)), plain, exact)


@pytest.fixture
def switch(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Has the model use kernels or not, whatever the device."""

    def use(kernels: bool) -> None:
        for module in (attention, layers):
            monkeypatch.setattr(module, "usable", lambda *tensors: kernels)

    return use


@pytest.mark.parametrize("parts", [(), (Recompute.norm,)], ids=["kept", "again"])
def test_a_residual_block_is_the_same_with_kernels(
    parts: tuple[Recompute, ...], switch: Callable[[bool], None]
):
    body = DenseBody(MODEL)
    set_parameters(body)

    def run(module: torch.nn.Module) -> Outputs:
        recompute = Recomputation(RecomputeChoice(parts=frozenset(parts)))

        def forward(x: Tensor) -> Tensor:
            with recompute.forward():
                x, h = module.norm.beside(x, recompute)
                return x + module.mlp(h, None, recompute)

        return trained(module, forward)

    same_with_kernels(run, body, switch)


@pytest.mark.parametrize("parts", [(), (Recompute.attn_core,)], ids=["kept", "again"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"qk_norm": True}, {"qk_norm": True, "rotary_dim": 6}],
    ids=["plain", "norms", "part"],
)
def test_attention_is_the_same_with_kernels(
    changes: dict[str, Any], parts: tuple[Recompute, ...], switch: Callable[[bool], None]
):
    model = dataclasses.replace(MODEL, **changes)
    module = Attention(model.layer_specs[0].attention)
    set_parameters(module)
    table = RotaryTable.of(torch.arange(6, device=DEVICE).expand(2, 6), model.rope)

    def run(module: torch.nn.Module) -> Outputs:
        like = next(module.parameters()).dtype
        own = table.moved("", lambda _, tensor: tensor.to(like))
        recompute = Recomputation(RecomputeChoice(frozenset(parts)))
        context = Context({model.rope: own}, None, recompute=recompute)
        return trained(module, lambda x: module(x, context))

    same_with_kernels(run, module, switch)


@pytest.mark.parametrize("parts", [(), (Recompute.mlp_act,)], ids=["kept", "again"])
def test_feed_forward_is_the_same_with_kernels(
    parts: tuple[Recompute, ...], switch: Callable[[bool], None]
):
    module = torch.nn.ModuleList(
        [
            RMSNorm(NormWeights.of_hidden(MODEL), EPS),
            Mlp(MlpWeights.of(MODEL.hidden_size, MODEL.ffn_hidden_size)),
        ]
    )
    set_parameters(module)

    def run(module: torch.nn.Module) -> Outputs:
        again = Recomputation(RecomputeChoice(frozenset(parts)))

        def forward(x: Tensor) -> Tensor:
            with again.forward():
                return module[1](module[0](x), recompute=again)

        return trained(module, forward)

    same_with_kernels(run, module, switch)
