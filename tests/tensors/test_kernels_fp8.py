"""Kernels that quantise rows and weights of experts, against plain torch to the bit; interpreted
where there is no GPU.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from app.choices import DispatcherKind, Recompute
from app.config import MoEConfig
from app.fp8 import dispatch, ready, row_scaled
from app.fp8.dispatch import Fp8LocalDispatcher, Fp8Transport
from app.fp8.experts import Fp8GroupedLinear
from app.fp8.quantised import Quantised
from app.fp8.ready import ReadyRows
from app.fp8.row_scaled import RowScaled, by_reference
from app.kernels.quantise import (
    Fp8Rows,
    empty_fp8_rows,
    quantise_rows,
    quantise_rows_into,
)
from app.kernels.rows import combine_gradients
from app.model.layers import layers
from app.model.layers.recompute import Recomputation
from app.moe import permute
from app.moe.dispatch import expert_rows
from app.moe.dispatch.local import LocalDispatcher
from app.moe.dispatch.static import StaticDispatcher
from app.moe.experts import Experts
from app.plan.model.experts import ExpertWeights
from app.plan.parts.static import PlannedStatic
from app.plan.recompute import RecomputeChoice
from tests.fp8_cases import (
    DEVICE,
    E4M3,
    check_rows,
    check_spread,
    check_swiglu,
    check_weight,
    entries,
    rounds_to_nearest,
    same,
)

pytest.importorskip("triton")
nearest = pytest.fixture(autouse=True)(rounds_to_nearest)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@DTYPES
@pytest.mark.parametrize("shape", [(5, 16), (3, 2064), (40, 48)])
def test_rows_have_a_scale_each(shape: tuple[int, int], dtype: torch.dtype):
    check_rows(*shape, dtype=dtype)


@pytest.mark.parametrize("used", [0, 1, 37, 64, 80])
def test_rows_of_nobody_are_neither_read_nor_written(used: int, monkeypatch: pytest.MonkeyPatch):
    """80 rows are those that the memory is for; with one program they are gone through in turn."""
    monkeypatch.setattr("app.kernels.quantise.PROGRAMS", 1)
    monkeypatch.setattr("app.kernels.quantise.MULTIPROCESSORS", 2)
    x = entries(80, 144, dtype=torch.bfloat16)
    wanted = row_scaled._rows_of(x[:used])
    x[used:] = math.nan
    found = (
        torch.full((80, 144), 0.5, device=DEVICE).to(E4M3),
        torch.full((80,), 0.5, device=DEVICE),
    )
    quantise_rows_into(x, *found, torch.tensor([used], dtype=torch.int32, device=DEVICE))
    for one, other in zip(found, wanted, strict=True):
        assert same(one[:used], other) and one[used:].float().eq(0.5).all()


@DTYPES
@pytest.mark.cover(1)
@pytest.mark.parametrize("shape", [(2, 16, 48), (3, 272, 80), (1, 130, 64), (1, 1104, 16)])
def test_weights_have_a_scale_for_each_row_and_each_column(
    shape: tuple[int, int, int], dtype: torch.dtype
):
    check_weight(*shape, dtype=dtype)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter
def test_what_has_no_scale():
    """Infinity becomes the largest number, NaN stays; either shares its row with nobody."""
    x = torch.ones(5, 32, device=DEVICE)
    x[0, 3], x[1, 3], x[2, 3], x[3] = math.inf, math.nan, 1e-45, 1e-45
    data, scales = quantise_rows(x)
    assert data[0].float()[3] == 448 and data[1].float()[3].isnan() and data[2].float()[3] == 0
    assert scales[0] == 1 and scales[4] == 1 / 448 and data[4].float().eq(448).all()
    # so small that no factor in fp32 makes it a number of the type
    assert not data[3].float().any() and scales.isfinite().all()


@pytest.mark.cover(1)
@DTYPES
@pytest.mark.parametrize(
    ("rows", "width", "used"), [(5, 16, 5), (12, 528, 7), (3, 2064, 2), (40, 48, 0)]
)
def test_swiglu_leaves_its_rows_in_fp8(
    rows: int, width: int, used: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("app.kernels.fp8.swiglu.MULTIPROCESSORS", 1)
    monkeypatch.setattr("app.kernels.fp8.swiglu.PROGRAMS", 2)
    check_swiglu(rows, width, used, dtype)


@pytest.mark.every(5)
@DTYPES
@pytest.mark.parametrize("width", [16, 2064, 4112])
def test_rows_leave_and_gradients_return_in_fp8(width: int, dtype: torch.dtype):
    check_spread(6, 3, width, dtype)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter
def test_gradients_of_rows_that_have_no_scale():
    """A row's largest entry, made of its token's largest one, is that of the row as it was written,
    whatever is infinite, no number, zero or next to it.
    """
    odd = [0.0, 1e-40, 1.0, -3e38, math.inf, -math.inf, math.nan]
    pairs = torch.tensor([[one, other] for one in odd for other in odd], device=DEVICE)
    tokens, top_k, width = len(pairs), len(odd), 32
    grad = pairs.repeat(1, width // 2).bfloat16()
    probs = torch.tensor([0.0, 1e-42, 0.3, 1.0, -2.0, math.inf, math.nan], device=DEVICE)
    probs = probs.expand(tokens, top_k).contiguous()
    row_of = torch.arange(tokens * top_k, dtype=torch.int32, device=DEVICE).view(tokens, top_k)
    rows = entries(tokens * top_k, width, dtype=torch.bfloat16)
    found = empty_fp8_rows(rows.shape, rows.device)
    made, _ = combine_gradients(grad, rows, probs, row_of, fp8_rows=found)
    wanted = quantise_rows(made)
    assert all(same(one, other) for one, other in zip(found, wanted, strict=True))


TOKENS, TOP_K, WIDTH, EXPERTS = 12, 2, 48, 4
WEIGHTS = ExpertWeights.of(WIDTH, 32, EXPERTS)


class OneRank:
    """The exchanges of the only rank of a group (`TokenTransport`)."""

    def gather_choices(self, experts_TK: Tensor) -> Tensor:
        return experts_TK

    def spread(self, x_TD: Tensor, *where: Any, fp8_rows: Fp8Rows | None = None) -> Tensor:
        return expert_rows.spread_rows(x_TD, *where, fp8_rows=fp8_rows)

    def combine(
        self, rows_RD: Tensor, probs_TK: Tensor | None, row_of_NK: Tensor, experts_TK: Tensor
    ) -> Tensor:
        return permute.sum_rows(rows_RD, row_of_NK, probs_TK, drops=True, dtype=rows_RD.dtype)

    def spread_gradients(
        self, *given: Tensor, fp8_rows: Fp8Rows | None = None
    ) -> tuple[Tensor, Tensor]:
        *given, _ = given
        return expert_rows.row_gradients(*given, fp8_rows=fp8_rows)


def dispatcher_of(kind: str, cache: ReadyRows | None) -> Any:
    if kind == "local":
        return LocalDispatcher(EXPERTS) if cache is None else Fp8LocalDispatcher(EXPERTS, cache)
    moe = MoEConfig(EXPERTS, TOP_K, dispatcher=DispatcherKind.static)
    planned = PlannedStatic(moe, ep=1, etp=1)
    device = torch.device(DEVICE)
    transport: Any = OneRank()
    if cache is not None:
        transport = Fp8Transport(transport, cache)
    return StaticDispatcher(planned, transport, None, ep_rank=0, device=device)


def trained(kind: str, fused: bool, part: Recompute | None) -> tuple[list[Tensor], int]:
    """Output and gradients of experts in FP8, and how often rows were quantised on their
    own.
    """
    quantised = 0
    arithmetic = RowScaled(by_reference)
    rows_of = arithmetic.rows

    def counted(x: Tensor, ends: Tensor) -> Quantised:
        nonlocal quantised
        quantised += 1
        return rows_of(x, ends)

    arithmetic.rows = counted  # type: ignore[method-assign]
    experts = Experts(WEIGHTS).to(DEVICE, torch.bfloat16)
    cache = ReadyRows() if fused else None
    if cache is not None:
        experts.activation = cache.swiglu
    generator = torch.Generator().manual_seed(1)
    for grouped in (experts.w_up, experts.w_down):
        shape = grouped.weight.shape
        grouped.weight.data = (torch.randn(shape, generator=generator) * 0.1).to(grouped.weight)
        grouped.backend = Fp8GroupedLinear(arithmetic, grouped.weight, cache)
    x = entries(TOKENS, WIDTH, dtype=torch.bfloat16).requires_grad_()
    chosen = torch.rand(TOKENS, EXPERTS, generator=generator).to(DEVICE).topk(TOP_K).indices
    probs = torch.rand(TOKENS, TOP_K, generator=generator).to(DEVICE).requires_grad_()
    parts = frozenset[Recompute]() if part is None else frozenset((part,))
    recompute = Recomputation(RecomputeChoice(parts=parts))
    dispatcher = dispatcher_of(kind, cache)
    with recompute.forward():
        prepared = dispatcher.preprocess(chosen.sort(1).values)
        dispatched, origin = dispatcher.dispatch(x, prepared)
        rows_RD = experts(dispatched, recompute=recompute)
        out = dispatcher.combine(rows_RD, probs, origin)
    weights = [experts.w_up.weight, experts.w_down.weight]
    grad = entries(TOKENS, WIDTH, dtype=torch.bfloat16).flip(0)
    return [out.detach(), *torch.autograd.grad(out, [x, probs, *weights], grad)], quantised


@pytest.mark.every(4)
@pytest.mark.parametrize("kind", ["local", "static"])
@pytest.mark.parametrize("part", [None, Recompute.experts_act])
def test_rows_that_are_ready_are_those_that_gemms_would_quantise(
    kind: str, part: Recompute | None, monkeypatch: pytest.MonkeyPatch
):
    """Four of them."""
    for module in (layers, row_scaled, permute, expert_rows, dispatch, ready):
        # kernels for bf16 only
        monkeypatch.setattr(module, "usable", lambda *given: given[0].dtype == torch.bfloat16)
    apart, of_own = trained(kind, False, part)
    found, quantised = trained(kind, True, part)
    assert all(same(one, other) for one, other in zip(found, apart, strict=True))
    assert (of_own, quantised) == (4, 0)
