"""Planned FP8 activations against real chunks. Stand-ins for GEMMs and quantizers compute nothing,
and allocate what Transformer Engine's do on a Hopper GPU.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from app.choices import Dtype, Fp8Part, Fp8Recipe, Recompute
from app.config import Fp8Config, Run
from app.fp8.dispatch import Fp8LocalDispatcher
from app.fp8.linear import Fp8Layers
from app.fp8.quantised import Quantised
from app.fp8.ready import ReadyRows
from app.fp8.row_scaled import RowScaled
from app.model.chunk import Chunk
from app.moe.phases import MoEBody
from app.plan.model.fp8 import fp8_weights
from app.plan.stages import Stage
from tests.tensors import activation_memory as unnarrowed
from tests.tensors.activation_memory import (
    DENSE,
    SIGMOID,
    chunk_of,
    forward_and_backward,
    measured,
    planned,
    run_of,
    with_kernels,
)
from tests.tensors.fp8_memory import Allocating

kernels = pytest.fixture(autouse=True)(with_kernels)
WIDE = dataclasses.replace(DENSE, vocab_size=1024)
SHARED = dataclasses.replace(WIDE, moe=SIGMOID)
BOTH = (Fp8Part.linear, Fp8Part.head)
MODELS = {  # and what of them is in FP8
    "dense": (WIDE, BOTH),
    "shared": (SHARED, BOTH),
    "experts": (SHARED, (Fp8Part.experts,)),
    "all": (SHARED, (*BOTH, Fp8Part.experts)),
}


def allocated(
    rows: Quantised, matrix_ENK: Tensor, scales_EN: Tensor, ends_E: Tensor, dtype: torch.dtype
) -> Tensor:
    """Stand-in for an expert GEMM that only allocates its result (`GroupedGemm`)."""
    assert rows.by_rows is not None
    return torch.zeros(len(rows.by_rows), matrix_ENK.shape[1], dtype=dtype)


def in_8(run: Run, recipe: Fp8Recipe, include: tuple[Fp8Part, ...] = BOTH) -> Run:
    fp8 = Fp8Config(recipe, include=include)
    return dataclasses.replace(run, precision=dataclasses.replace(run.precision, fp8=fp8))


def narrowed(run: Run, embedding: bool = True, head: bool = True) -> Chunk:
    recipe = run.precision.fp8.recipe
    assert recipe is not None
    chunk = chunk_of(run, embedding, head)
    ready = ReadyRows() if Fp8Part.experts in run.precision.fp8.include else None
    layers = Fp8Layers(
        [chunk], lambda name: Allocating(recipe), experts=RowScaled(allocated), ready=ready
    )
    if ready is not None:
        for body in (layer.body for layer in chunk.in_order):
            if isinstance(body, MoEBody):
                body.dispatcher = Fp8LocalDispatcher(body.moe.num_experts, ready)
    stage = Stage(tuple(map(int, chunk.layers)), embedding, head)
    layers.use(chunk, [each.name for each in fp8_weights(run.model, run.precision.fp8, stage)])
    return chunk


@pytest.mark.parametrize("recipe", Fp8Recipe, ids=lambda recipe: recipe.value)
@pytest.mark.parametrize("model", MODELS)
def test_autograd_keeps_what_is_planned(
    model: str, recipe: Fp8Recipe, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(unnarrowed, "chunk_of", narrowed)
    sizes, include = MODELS[model]
    run = in_8(run_of(sizes, Dtype.bfloat16, ordered=True), recipe, include)
    assert sum(measured(run).values()) == pytest.approx(planned(run).total, rel=0.05)


PARTS = {
    "nothing": {},
    "parts": {"phases": (Recompute.norm, Recompute.mlp_act, Recompute.attn_core)},
    "layers": {"full": True},
}


@pytest.mark.cover(1)
@pytest.mark.parametrize("recompute", PARTS)
@pytest.mark.parametrize("recipe", Fp8Recipe, ids=lambda recipe: recipe.value)
@pytest.mark.parametrize("model", MODELS)
def test_what_is_alive_while_it_computes_is_within_five_percent(
    model: str, recipe: Fp8Recipe, recompute: str
):
    sizes, include = MODELS[model]
    wide = run_of(sizes, Dtype.bfloat16, **PARTS[recompute])
    run = in_8(wide, recipe, include)
    memory = planned(run)
    forward, kept, backward = forward_and_backward(run, narrowed(run), True)
    assert kept == pytest.approx(memory.total, rel=0.05)
    peak = memory.total + max(memory.forward, memory.backward)
    assert max(forward, backward) == pytest.approx(peak, rel=0.05)
