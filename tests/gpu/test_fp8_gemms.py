"""Transformer Engine's FP8 GEMMs on a GPU, against fp64 and the reference's scales and entries.

Also in CUDA graphs, and with weights quantised once.

Shapes: T rows, IN and OUT widths.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from app.choices import Fp8Recipe, LinearBackendKind
from app.engine.fp8 import arithmetic_maker
from app.fp8.delayed import DelayedScales, LinearScales
from app.fp8.linear import Fp8Linear
from app.fp8.quantised import Fp8Arithmetic
from app.fp8.reference import LARGEST, BlockScaled, Reference, TensorScaled
from app.model.layers.linear import ColumnParallelLinear
from app.model.layers.weight_grads import MainGradSink, WeightGradQueue
from app.plan.model.weight import Weight
from tests.gpu.programs import no_waits
from tests.tensors.fp8_gemms import check_gemms

pytest.importorskip("transformer_engine")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
GPU = torch.device("cuda")
SHAPES = [(4096, 2048, 5120), (2048, 1024, 2816), (272, 144, 80)]


def normal(*shape: int, seed: int = 0, std: float = 1.0) -> Tensor:
    generator = torch.Generator(GPU).manual_seed(seed)
    return (torch.randn(shape, generator=generator, device=GPU) * std).bfloat16()


def operands(rows: int, given: int, made: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return input, weight, and gradient of the output."""
    return (
        normal(rows, given),
        normal(made, given, seed=1, std=0.02),
        normal(rows, made, seed=2, std=1e-4),
    )


def earlier(*matrices: Tensor) -> LinearScales:
    """Scales of a step in which a layer had these matrices."""
    scales = DelayedScales(["one"], LARGEST, margin=0, history=4, group=None, device=GPU)
    for which, matrix in enumerate(matrices):
        scales.of["one"].note(which, matrix.abs().amax())
    scales.finish_step(torch.zeros((), device=GPU))
    scales.stepped()
    return scales.of["one"]


def library(recipe: Fp8Recipe, *matrices: Tensor) -> Fp8Arithmetic:
    make = arithmetic_maker(LinearBackendKind.transformer_engine, recipe, GPU)
    return make(earlier(*matrices) if recipe is Fp8Recipe.delayed else None)


def reference(recipe: Fp8Recipe, *matrices: Tensor) -> Reference:
    if recipe is Fp8Recipe.block:
        return BlockScaled()
    return TensorScaled(earlier(*matrices) if recipe is Fp8Recipe.delayed else None)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("recipe", Fp8Recipe, ids=lambda recipe: recipe.value)
def test_gemms_are_as_accurate_as_fp8_allows(recipe: Fp8Recipe, shape: tuple[int, int, int]):
    """Tensor cores keep 13 bits of a partial sum where 32 products are added at once."""
    matrices = operands(*shape)
    kind = "block" if recipe is Fp8Recipe.block else "current"
    check_gemms(library(recipe, *matrices), kind, *matrices, sums=2**-13 / 32)


@pytest.mark.parametrize("recipe", Fp8Recipe, ids=lambda recipe: recipe.value)
def test_scales_and_entries_are_those_of_the_reference(recipe: Fp8Recipe):
    matrices = operands(2048, 1024, 2816)
    theirs, ours = library(recipe, *matrices), reference(recipe, *matrices)
    for name, matrix in zip(("input", "weight", "grad"), matrices, strict=True):
        found, wanted = getattr(theirs, name)(matrix), getattr(ours, name)(matrix)
        assert found.by_rows is not None and wanted.by_rows is not None
        same = found.by_rows.view(torch.uint8) == wanted.by_rows.view(torch.uint8)
        assert same.all(), f"{name}: {(~same).sum().item()} of {same.numel()} entries differ"
        if recipe is not Fp8Recipe.block:  # whose scales lie as its kernels want them
            torch.testing.assert_close(
                found.row_scales.flatten(), wanted.row_scales.flatten(), rtol=1e-6, atol=0.0
            )
        elif name != "weight":
            columns = found.by_columns.view(torch.uint8) == wanted.by_columns.view(torch.uint8)
            assert columns.all(), name


@pytest.mark.parametrize("known", [True, False], ids=["later", "first step"])
def test_the_largest_entries_of_a_step_are_noted(known: bool):
    matrices = operands(1024, 512, 256)
    scales = earlier(*matrices)
    scales.known = known
    scales.largest_3.zero_()
    make = arithmetic_maker(LinearBackendKind.transformer_engine, Fp8Recipe.delayed, GPU)
    arithmetic = make(scales)
    held = arithmetic.weight(matrices[1])
    arithmetic.update_weight(matrices[1], held)
    for part in (matrices[0] / 2, matrices[0]):
        arithmetic.input(part)
    arithmetic.grad(matrices[2])
    assert torch.equal(scales.largest_3, torch.stack([m.abs().amax().float() for m in matrices]))


class Layer:
    """A linear layer whose weight's gradients are added to an fp32 sum."""

    def __init__(self, recipe: Fp8Recipe, shape: tuple[int, int, int]) -> None:
        self.x, weight, self.grad = operands(*shape)
        self.module = ColumnParallelLinear(Weight(tuple(weight.shape)))
        self.module.weight = nn.Parameter(weight.clone())
        arithmetic = library(recipe, self.x, weight, self.grad)
        self.fp8 = Fp8Linear(arithmetic, self.module.weight)
        self.module.backend = self.fp8
        self.total = torch.zeros(weight.shape, device=GPU)
        self.leaf = self.x.clone()[None].requires_grad_()

    def both(self) -> tuple[Tensor, Tensor]:
        """Output and input gradient."""
        sink = MainGradSink(lambda param, gradient: gradient.add_to(self.total))
        out = self.module.forward(self.leaf, sink)
        return out.detach(), torch.autograd.grad(out, self.leaf, self.grad[None])[0]

    def results(self, run: Callable[[], tuple[Tensor, Tensor]]) -> list[Tensor]:
        """Output, input gradient and the weight's of one pass."""
        self.total.zero_()
        return [*(each.clone() for each in run()), self.total.clone()]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("recipe", Fp8Recipe, ids=lambda recipe: recipe.value)
def test_captured_layer_equals_eager_after_update(recipe: Fp8Recipe, shape: tuple[int, int, int]):
    layer = Layer(recipe, shape)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        eager = layer.results(layer.both)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            outs = layer.both()

        def replayed() -> tuple[Tensor, Tensor]:
            graph.replay()
            return outs

        for found, wanted in zip(layer.results(replayed), eager, strict=True):
            assert torch.equal(found, wanted)
        with torch.no_grad():
            layer.module.weight.mul_(-0.5)
            layer.leaf.copy_(layer.x.flip(0)[None])
        stale = layer.results(replayed)
        layer.fp8.stale = True
        layer.fp8.refresh()
        updated = layer.results(replayed)
        assert not torch.equal(stale[0], updated[0]) and layer.fp8.times == 2
        for found, wanted in zip(updated, layer.results(layer.both), strict=True):
            assert torch.equal(found, wanted)
    torch.cuda.current_stream().wait_stream(side)


@pytest.mark.parametrize("recipe", Fp8Recipe, ids=lambda recipe: recipe.value)
def test_no_host_sync_and_weights_quantised_once(recipe: Fp8Recipe):
    layer = Layer(recipe, SHAPES[1])
    first = layer.results(layer.both)
    places = [each.data_ptr() for each in layer.fp8.held.tensors() if each is not None]
    with torch.no_grad():
        layer.module.weight.zero_()  # nobody has said so: what was quantised counts
    with no_waits():
        again = layer.both()
    assert torch.equal(again[0], first[0]) and layer.fp8.times == 1
    layer.fp8.stale = True
    with no_waits():
        gone = layer.both()
    assert not gone[0].any() and layer.fp8.times == 2
    now = [each.data_ptr() for each in layer.fp8.held.tensors() if each is not None]
    assert now == places


@pytest.mark.parametrize("recipe", Fp8Recipe, ids=lambda recipe: recipe.value)
def test_rows_are_padded_for_tensor_cores(recipe: Fp8Recipe):
    """One row, as when a token is generated, and 37: the same as the first of more."""
    layer = Layer(recipe, (64, 256, 128))
    for rows in (1, 37):
        part = layer.x[:rows]
        found = layer.module.forward(part[None])[0]
        assert found.shape == (rows, 128)
        whole = torch.cat((part, part.new_zeros(-rows % 16, 256)))
        assert torch.equal(found, layer.module.forward(whole[None])[0, :rows])


@pytest.mark.parametrize("recipe", Fp8Recipe, ids=lambda recipe: recipe.value)
def test_a_gradient_that_waits_is_the_one_added_at_once(recipe: Fp8Recipe):
    layer = Layer(recipe, SHAPES[1])
    *_, at_once = layer.results(layer.both)
    queue = WeightGradQueue()
    layer.module.forward(layer.leaf, queue).backward(layer.grad[None])
    layer.total.zero_()
    queue.run(lambda param, gradient: gradient.add_to(layer.total))
    assert torch.equal(layer.total, at_once)
