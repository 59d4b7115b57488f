"""Experts in FP8 on a GPU: quantisation kernels, and torch's grouped GEMM.

Compared with fp64 and the reference, in CUDA graphs, with weights quantised once, and in runs.

Shapes: E experts, T rows, IN and OUT widths.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from app.choices import Dtype, LinearBackendKind
from app.engine.fp8 import experts_arithmetic
from app.fp8.experts import Fp8GroupedLinear
from app.fp8.row_scaled import RowScaled, by_reference, on_tensor_cores
from app.model.layers.linear import GroupedLinear
from app.model.layers.weight_grads import MainGradSink
from app.plan.model.weight import Weight
from tests.fp8_cases import check_rows, check_spread, check_swiglu, check_weight, expect_within
from tests.gpu.programs import GPUS, losses, no_waits

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a GPU like Hopper")]
GPU = torch.device("cuda")
CORES, REFERENCE = RowScaled(on_tensor_cores), RowScaled(by_reference)
# experts, rows that there is memory for, widths: those of known models, and small ones
SHAPES = [
    (32, 32768, 2048, 1536),
    (32, 32768, 768, 2048),
    (128, 4096, 2048, 1536),
    (8, 600, 80, 48),
]
# tensor cores keep 13 bits of a partial sum where 32 products are added at once
SUMS, BF16 = 2**-13 / 32, 2**-8


def normal(*shape: int, seed: int = 0, std: float = 1.0) -> Tensor:
    generator = torch.Generator(GPU).manual_seed(seed)
    return (torch.randn(shape, generator=generator, device=GPU) * std).bfloat16()


def uneven_ends(experts: int, rows: int) -> Tensor:
    """No multiples of 16, some experts without rows, and rows of nobody at the end."""
    generator = torch.Generator().manual_seed(0)
    share = torch.rand(experts, generator=generator) ** 3
    share[::5] = 0
    counts = (share / share.sum() * 0.9 * rows).int()
    return counts.cumsum(0).to(GPU, torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kernels_round_as_torch_does(dtype: torch.dtype):
    for shape in ((32768, 2048), (4096, 768), (300, 80), (17, 5120)):
        check_rows(*shape, dtype=dtype)
    for weight in ((8, 2048, 1536), (8, 768, 2048), (3, 80, 48)):
        check_weight(*weight, dtype=dtype)
    for rows, width, used in ((32768, 768, 30000), (5000, 1408, 5000), (100, 48, 0)):
        check_swiglu(rows, width, used, dtype)
    for tokens, top_k, width in ((4096, 8, 2048), (512, 8, 7168), (100, 3, 80)):
        check_spread(tokens, top_k, width, dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gemms_are_as_accurate_as_fp8_allows(shape: tuple[int, int, int, int]):
    """With rows of nobody that hold NaN; the reference's results are within its sums' rounding."""
    experts, count, width, made = shape
    ends = uneven_ends(experts, count)
    used = int(ends[-1])
    weight, rows = normal(experts, width, made, seed=1, std=0.02), normal(count, width)
    grad = normal(count, made, seed=2, std=1e-4)
    rows[used:] = grad[used:] = torch.nan
    held = CORES.weight(weight)
    for given, gemm, matrix in (
        (rows, "output", weight.mT),
        (grad, "input_grad", weight),
    ):
        in_8 = CORES.rows(given, ends)
        found = getattr(CORES, gemm)(in_8, held, ends, torch.bfloat16)
        expect_within(found, given, matrix, ends, sums=SUMS, rounding=BF16)
        wanted = getattr(REFERENCE, gemm)(in_8, held, ends, torch.float32)[:used]
        apart = (found[:used].float() - wanted).norm() / wanted.norm()
        assert apart < 4e-3, f"{gemm}: {apart:.1e} off the reference"


class Layer:
    """A layer of experts whose weight's gradients are added to an fp32 sum."""

    def __init__(self, experts: int, rows: int, width: int, made: int) -> None:
        self.ends = uneven_ends(experts, rows)
        self.used = int(self.ends[-1])
        self.rows, self.grad = normal(rows, width), normal(rows, made, seed=2, std=1e-4)
        self.module = GroupedLinear(Weight((experts, width, made)))
        self.module.weight = nn.Parameter(normal(experts, width, made, seed=1, std=0.02))
        arithmetic = experts_arithmetic(LinearBackendKind.auto, Dtype.bfloat16, GPU)
        self.fp8 = Fp8GroupedLinear(arithmetic, self.module.weight)
        self.module.backend = self.fp8
        self.total = torch.zeros(self.module.weight.shape, device=GPU)
        self.leaf = self.rows.clone().requires_grad_()

    def both(self) -> tuple[Tensor, Tensor]:
        """Output and input gradient."""
        sink = MainGradSink(lambda param, gradient: gradient.add_to(self.total))
        out = self.module.forward(self.leaf, self.ends, sink)
        return out.detach(), torch.autograd.grad(out, self.leaf, self.grad)[0]

    def results(self, run: Callable[[], tuple[Tensor, Tensor]]) -> list[Tensor]:
        """Output, input gradient and the weight's of one pass, of rows that are somebody's."""
        self.total.zero_()
        return [*(each[: self.used].clone() for each in run()), self.total.clone()]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_captured_layer_equals_eager_after_update(
    shape: tuple[int, int, int, int],
):
    layer = Layer(*shape)
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
            layer.leaf.copy_(layer.rows.flip(0))
            layer.ends.copy_(layer.ends // 2)
        stale = layer.results(replayed)
        layer.fp8.stale = True
        layer.fp8.refresh()
        layer.used = int(layer.ends[-1])
        updated = layer.results(replayed)
        assert not torch.equal(stale[0][: layer.used], updated[0]) and layer.fp8.times == 2
        for found, wanted in zip(updated, layer.results(layer.both), strict=True):
            assert torch.equal(found, wanted)
    torch.cuda.current_stream().wait_stream(side)


def test_no_host_sync_and_weights_quantised_once():
    layer = Layer(*SHAPES[-1])
    first = layer.results(layer.both)
    places = [each.data_ptr() for each in layer.fp8.held.tensors()]  # type: ignore[union-attr]
    with torch.no_grad():
        layer.module.weight.zero_()  # nobody has said so: what was quantised counts
    with no_waits():
        again = layer.both()
    assert torch.equal(again[0][: layer.used], first[0]) and layer.fp8.times == 1
    layer.fp8.stale = True
    with no_waits():
        gone = layer.both()
    assert not gone[0][: layer.used].any() and layer.fp8.times == 2
    now = [each.data_ptr() for each in layer.fp8.held.tensors()]  # type: ignore[union-attr]
    assert now == places


def test_the_reference_waits_for_nothing_either():
    layer = Layer(*SHAPES[-1])
    layer.fp8.arithmetic = REFERENCE
    layer.both()
    with no_waits():
        layer.both()


MOE = (
    "model=moe_tiny",
    "precision=bf16",
    "precision.fp8.recipe=current",
    "precision.fp8.include=[experts]",
    "optim.decay_steps=60",
)
LAYOUTS: dict[str, Any] = {
    "ep2 static": ("parallel.dp=2", "parallel.ep=2", "model.moe.dispatcher=static"),
    "zero bubble": ("parallel.pp=2", "schedule=zero_bubble_h1"),
    "etp2": ("parallel.tp=2", "model.moe.dispatcher=static"),
}


def test_graphs_repeat_sixty_eager_steps(tmp_path: Path):
    given = (*MOE, "parallel.dp=1", "train.steps=60", "train.eval_interval=10")
    eager = losses(tmp_path / "eager", *given)
    assert len(eager) == 60 and eager[-1][0] < 0.8 * eager[0][0]
    for graph in ("partial", "layer", "moe", "full_iteration"):
        assert losses(tmp_path / graph, *given, f"cuda_graph={graph}") == eager, graph


@pytest.mark.parametrize("graph", ["none", "full_iteration"])
def test_a_resumed_run_repeats_one_that_was_not_stopped(tmp_path: Path, graph: str):
    given = (*MOE, "parallel.dp=1", f"cuda_graph={graph}")
    whole = losses(tmp_path / "whole", *given, "train.steps=20", first=11)
    saved = (*given, "checkpoint=default")
    losses(tmp_path / "parts", *saved, "train.steps=10")
    assert losses(tmp_path / "parts", *saved, "train.steps=20", "resume=auto", first=11) == whole


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_several_gpus_in_one_graph_each(tmp_path: Path, layout: str):
    given = (*MOE, *LAYOUTS[layout], "train.steps=120")
    eager = losses(tmp_path / "eager", *given)
    assert losses(tmp_path / "graphs", *given, "cuda_graph=full_iteration") == eager
    one = losses(tmp_path / "one", *MOE, "parallel.dp=1", "train.steps=120")
    assert abs(eager[0][0] - one[0][0]) < 0.02 and abs(eager[-1][0] - one[-1][0]) < 0.2
