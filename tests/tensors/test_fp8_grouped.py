"""FP8 experts: grouped GEMMs against fp64, every way of a weight's gradient, what is saved, the
layouts that a GPU's kernel takes, and the gradient format with the smallest error.

Bounds are those of the format: an FP8 entry is off by half a step, a share of itself, or near zero
a share of its row's amax (`tests.fp8_cases.off_by`).

Shapes: E experts, T rows, IN and OUT widths.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from app.choices import DispatcherKind, Dtype, Fp8Part, Fp8Recipe, LinearBackendKind
from app.config import Fp8Config, ParallelConfig, PrecisionConfig
from app.config.experts import EchoConfig
from app.engine.fp8 import build_fp8, experts_arithmetic, fp8_line
from app.errors import ConfigError
from app.fp8.experts import Fp8GroupedLinear
from app.fp8.reference import E4M3, E5M2, rounded, scale_for
from app.fp8.row_scaled import RowScaled, by_reference, on_tensor_cores
from app.model.layers.linear import GroupedLinear
from app.model.layers.weight_grads import MainGradSink, WeightGrad, WeightGradQueue
from app.plan.model.weight import Weight
from tests.fp8_cases import expect_within
from tests.runs import TINY, make_run
from tests.tensors.fp8_linear import kept_bytes
from tests.tensors.models import make_chunk

E, T, IN, OUT = 5, 90, 80, 48
ENDS = torch.tensor([16, 16, 37, 80, 83], dtype=torch.int32)  # one has none; the last rows' nobody
USED = int(ENDS[-1])
CPU = torch.device("cpu")
REFERENCE = RowScaled(by_reference)


def uneven(*shape: int, seed: int = 0) -> Tensor:
    """Entries of very different sizes, rows too."""
    generator = torch.Generator().manual_seed(seed)
    entries = torch.randn(shape, generator=generator) * torch.rand(shape, generator=generator) ** 4
    return entries * 10 ** torch.randn(*shape[:-1], 1, generator=generator)


def expert_of_rows() -> Tensor:
    return torch.searchsorted(ENDS, torch.arange(USED, dtype=torch.int32), right=True)


def test_gemms_are_as_near_to_fp64_as_fp8_allows():
    weight, rows, grad = uneven(E, IN, OUT, seed=1), uneven(T, IN), uneven(T, OUT, seed=2) * 1e-6
    held = REFERENCE.weight(weight)
    out = REFERENCE.output(REFERENCE.rows(rows, ENDS), held, ENDS, torch.float32)
    expect_within(out, rows, weight.mT, ENDS)
    back = REFERENCE.input_grad(REFERENCE.rows(grad, ENDS), held, ENDS, torch.float32)
    expect_within(back, grad, weight, ENDS)


def test_what_fp8_hold_is_exact():
    generator = torch.Generator().manual_seed(0)
    weight, rows = (
        torch.randint(-7, 8, shape, generator=generator).float()
        for shape in ((E, IN, OUT), (T, IN))
    )
    rows[:, 0] = weight[:, 0] = weight[:, :, 0] = 7.0  # 448 is 7 · 64: scales are powers of two
    held = REFERENCE.weight(weight)
    out = REFERENCE.output(REFERENCE.rows(rows, ENDS), held, ENDS, torch.float32)[:USED]
    exact = torch.einsum("ti,tio->to", rows[:USED].double(), weight.double()[expert_of_rows()])
    assert torch.equal(out.double(), exact)


def test_a_rows_bits_depend_on_that_row_alone():
    """So they are the same however rows are spread over ranks and microbatches."""
    weight, rows = REFERENCE.weight(uneven(E, IN, OUT, seed=1)), uneven(T, IN)
    whole = REFERENCE.output(REFERENCE.rows(rows, ENDS), weight, ENDS, torch.float32)
    alone = rows.clone()
    alone[:40], alone[41:] = 0, torch.nan
    found = REFERENCE.output(REFERENCE.rows(alone, ENDS), weight, ENDS, torch.float32)
    assert torch.equal(found[40], whole[40]) and found[:40].eq(0).all()


@pytest.mark.parametrize("spread", [0.0, 2.0, 8.0])
def test_gradients_err_half_as_much_in_e4m3_as_in_e5m2(spread: float):
    """Entries of a row differ by factors of exp(spread · normal): even if many of them fall out of
    E4M3's range, those that matter in a GEMM have one more digit.
    """
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    grad = draw(512, 1024) * torch.exp(spread * draw(512, 1024)) * 1e-7
    matrix = draw(1024, 256).double()
    exact = grad.double() @ matrix
    errors = {}
    for dtype in (E4M3, E5M2):
        scale = scale_for(grad.abs().amax(1, keepdim=True), dtype)
        found = (rounded(grad, scale, dtype).double() / scale.double()) @ matrix
        errors[dtype] = ((found - exact).norm(dim=1) / exact.norm(dim=1)).mean().item()
    assert errors[E4M3] < 0.6 * errors[E5M2] and errors[E4M3] < 0.03


def module() -> Any:
    found = GroupedLinear(Weight((E, IN, OUT))).to(torch.bfloat16)
    found.weight.data = uneven(E, IN, OUT, seed=1).to(torch.bfloat16)
    found.backend = Fp8GroupedLinear(REFERENCE, found.weight)
    return found


def results(grouped: Any, route: str) -> tuple[Tensor, Tensor, Tensor]:
    """Output, and the gradients of the input and, in fp32 by the sinks, of the weight."""
    total = torch.zeros(E, IN, OUT)

    def add(param: nn.Parameter, gradient: WeightGrad) -> None:
        assert param is grouped.weight
        gradient.add_to(total)

    queue = WeightGradQueue()
    sink = {"autograd": None, "at once": MainGradSink(add), "deferred": queue}[route]
    grouped.weight.grad = None
    rows = uneven(T, IN).to(torch.bfloat16).requires_grad_()
    out = grouped(rows, ENDS, sink)
    out.backward(uneven(T, OUT, seed=2).to(torch.bfloat16))
    queue.run(add)
    assert rows.grad is not None and (grouped.weight.grad is None) == (route != "autograd")
    gradient = grouped.weight.grad if route == "autograd" else total.to(torch.bfloat16)
    return out.detach()[:USED], rows.grad[:USED], gradient


def test_every_way_of_a_gradient_has_the_same_numbers():
    """That of the weight is of rows and gradients as they are, to the bit of a layer in bf16."""
    grouped = module()
    rows, grad = uneven(T, IN).to(torch.bfloat16), uneven(T, OUT, seed=2).to(torch.bfloat16)
    held = REFERENCE.weight(grouped.weight.detach())
    plain = GroupedLinear(Weight((E, IN, OUT))).to(torch.bfloat16)
    plain.weight.data = grouped.weight.data
    wanted = (
        REFERENCE.output(REFERENCE.rows(rows, ENDS), held, ENDS, torch.bfloat16)[:USED],
        REFERENCE.input_grad(REFERENCE.rows(grad, ENDS), held, ENDS, torch.bfloat16)[:USED],
        results(plain, "autograd")[2],
    )
    for route in ("autograd", "at once", "deferred"):
        found = results(grouped, route)
        assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True)), route
    assert grouped.backend.times == 1


def test_backward_keeps_rows_as_they_came():
    rows = uneven(T, IN).to(torch.bfloat16).requires_grad_()
    kept = kept_bytes(lambda: module()(rows, ENDS, WeightGradQueue()))
    assert kept == rows.nbytes + ENDS.nbytes


def test_a_weight_is_quantised_again_in_the_same_memory():
    grouped = module()
    backend = grouped.backend
    places = [each.data_ptr() for each in backend.held.tensors()]
    before = results(grouped, "at once")
    with torch.no_grad():
        grouped.weight[0] *= -1
    assert all(torch.equal(*pair) for pair in zip(results(grouped, "at once"), before, strict=True))
    backend.stale = True
    after = results(grouped, "at once")
    first = int(ENDS[0])
    assert torch.equal(after[0][:first], -before[0][:first]) and before[0][:first].any()
    assert torch.equal(after[1][:first], -before[1][:first])
    assert torch.equal(after[0][first:], before[0][first:])
    assert [each.data_ptr() for each in backend.held.tensors()] == places and backend.times == 2


def test_tensor_cores_take_these_layouts():
    """torch's own checks of types, strides and scales, without a GPU."""
    given = RowScaled(on_tensor_cores)
    meta = torch.device("meta")
    weight = given.weight(torch.empty(E, IN, OUT, dtype=torch.bfloat16)).with_tensors
    held = weight(tuple(each.to(meta) for each in given.weight(uneven(E, IN, OUT)).tensors()))  # type: ignore[arg-type]
    for width, made, gemm in ((IN, OUT, given.output), (OUT, IN, given.input_grad)):
        rows = given.rows(torch.zeros(T, width), ENDS)
        rows = rows.with_tensors(
            tuple(None if each is None else each.to(meta) for each in rows.tensors())  # type: ignore[arg-type]
        )
        out = gemm(rows, held, ENDS.to(meta), torch.bfloat16)
        assert out.shape == (T, made) and out.dtype == torch.bfloat16
    nobody = given.rows(torch.zeros(0, IN), ENDS)
    assert given.output(nobody, held, ENDS, torch.bfloat16).shape == (0, OUT)


IN_8 = Fp8Config(Fp8Recipe.current, include=(Fp8Part.experts,))
WIDE = dataclasses.replace(TINY, moe=dataclasses.replace(TINY.moe, ffn_hidden_size=32))


def precision(fp8: Fp8Config = IN_8, params: Dtype = Dtype.bfloat16) -> PrecisionConfig:
    return PrecisionConfig(params, fp8=fp8)


@pytest.mark.parametrize("first", [0, 2])
def test_experts_are_in_fp8_and_nothing_else(first: int):
    fp8 = dataclasses.replace(IN_8, first_layers=first)
    chunk = make_chunk(WIDE)
    layers = build_fp8(
        make_run(WIDE, precision=precision(fp8)), [chunk], SimpleNamespace(), device=CPU
    )
    assert layers is not None and layers.scales is None
    found = {
        name
        for name, inner in chunk.named_modules()
        if isinstance(getattr(inner, "backend", None), Fp8GroupedLinear)
    }
    grouped = {
        name
        for name, inner in chunk.named_modules()
        if isinstance(inner, GroupedLinear) and int(name.split(".")[1]) >= first
    }
    assert found == grouped == set(layers.linears) and len(found) == (2 if first else 4)


def test_a_run_says_at_its_start_what_computes_experts():
    both = dataclasses.replace(IN_8, include=(Fp8Part.linear, Fp8Part.experts))
    reference = "by the reference in torch, multiplied in fp32: slow"
    alone, beside = (
        fp8_line(make_run(WIDE, precision=precision(fp8)), CPU) for fp8 in (IN_8, both)
    )
    experts = f"4 of experts, a scale per row, {reference}; else bfloat16"
    assert alone == experts
    assert beside == f"12 matrices of linear, recipe current, {reference}; {experts}"


CLONING = dataclasses.replace(WIDE.moe, dispatcher=DispatcherKind.static, echo=EchoConfig(spares=1))
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no experts": (
        {"model": dataclasses.replace(WIDE, moe=None)},
        "precision.fp8.include=[experts]: asks for routed experts, and this model has none; did "
        "you mean [linear]?",
    ),
    "clones": (
        {
            "model": dataclasses.replace(WIDE, moe=CLONING),
            "parallel": ParallelConfig(dp=2, ep=2),
        },
        "model.moe.echo.spares=1: clones experts in the type of parameters",
    ),
    "widths": (
        {"model": dataclasses.replace(TINY, moe=dataclasses.replace(TINY.moe, ffn_hidden_size=24))},
        "widths of a matrix in FP8 are multiples of 16, and layers.1.body.experts.w_down "
        "has 24 × 32; did you mean [linear] or precision.fp8.recipe=null?",
    ),
    "widths of a rank": (
        {
            "model": dataclasses.replace(
                TINY, moe=dataclasses.replace(TINY.moe, ffn_hidden_size=16)
            ),
            "parallel": ParallelConfig(tp=2),
        },
        "layers.1.body.experts.w_down has 8 × 32 on each of etp=2 ranks",
    ),
    "another back end": (
        {
            "precision": precision(
                dataclasses.replace(IN_8, backend=LinearBackendKind.transformer_engine)
            )
        },
        "precision.fp8.backend=transformer_engine: computes linear layers and the head, and",
    ),
    "no layers": (
        {"precision": precision(dataclasses.replace(IN_8, first_layers=3))},
        "precision.fp8.first_layers=3: with last_layers=0 leaves none of 3 layers in FP8",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_experts_in_fp8_do_not_go_with_is_said_in_one_line(case: str):
    sections, words = REFUSED[case]
    model = sections.get("model", WIDE)
    rest = {name: section for name, section in sections.items() if name != "model"}
    with pytest.raises(ConfigError) as refused:
        make_run(model, **({"precision": precision()} | rest))
    assert words in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("major", "params", "words"),
    [
        (10, Dtype.bfloat16, "include=[experts]: torch's row-scaled FP8 grouped GEMM"),
        (9, Dtype.float32, "include=[experts]: experts in FP8 need bfloat16 parameters"),
    ],
)
def test_a_gpu_that_lacks_the_gemm_is_told_so(
    major: int, params: Dtype, words: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    gpu = torch.device("cuda")
    with pytest.raises(ConfigError) as refused:
        experts_arithmetic(LinearBackendKind.auto, params, gpu)
    assert words in str(refused.value) and "precision.fp8.backend=torch" in str(refused.value)
    if major != 9:  # kernels of the reference are for Hopper and later ones
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
        both = (Fp8Part.head, Fp8Part.experts)
        for asked in (LinearBackendKind.auto, LinearBackendKind.torch):
            with pytest.raises(ConfigError, match=r"include=\[head, experts\].*") as refused:
                experts_arithmetic(asked, params, gpu, include=both)
            assert "[head]" in str(refused.value) and "backend=torch" not in str(refused.value)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    plain = experts_arithmetic(LinearBackendKind.torch, params, gpu)
    assert plain.multiply is by_reference
