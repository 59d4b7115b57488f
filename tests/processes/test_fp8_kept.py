"""Planned memory in FP8 against that of chunks sharded over ranks, with deferred weight gradients.

GEMMs and quantisers allocate like those of Transformer Engine, and compute nothing.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from app.choices import Fp8Part, Fp8Recipe, ScheduleName
from app.config import Fp8Config, Run, ScheduleConfig
from app.engine.build import build_chunks
from app.fp8.linear import Fp8Layers
from app.model.chunk import Chunk
from app.plan.model.fp8 import fp8_weights
from app.plan.stages import Stage
from app.rules import check
from tests.cases import chosen
from tests.distributed import run_distributed
from tests.processes import kept_memory as unnarrowed
from tests.processes.kept_memory import DENSE, measured, planned, run_of
from tests.tensors.activation_memory import with_kernels
from tests.tensors.fp8_memory import Allocating

kernels = pytest.fixture(autouse=True)(with_kernels)
WIDE = dataclasses.replace(DENSE, vocab_size=1024)
RECIPES = {recipe: recipe.value for recipe in (Fp8Recipe.current, Fp8Recipe.block)}


def narrowed(run: Run, *given: Any, **named: Any) -> tuple[Chunk, ...]:
    """Build the chunks of a run, with GEMMs that only allocate."""
    recipe = run.precision.fp8.recipe
    assert recipe is not None
    chunks = build_chunks(run, *given, **named)
    layers = Fp8Layers(chunks, lambda name: Allocating(recipe))
    for chunk in chunks:
        stage = Stage(tuple(map(int, chunk.layers)), embedding=chunk.first, head=chunk.last)
        layers.use(chunk, [each.name for each in fp8_weights(run.model, run.precision.fp8, stage)])
    return chunks


def in_8(run: Run, recipe: Fp8Recipe, splits: bool = False) -> Run:
    fp8 = Fp8Config(recipe, include=(Fp8Part.linear, Fp8Part.head))
    name = ScheduleName.zero_bubble_h1 if splits else ScheduleName.auto
    precision = dataclasses.replace(run.precision, fp8=fp8)
    return dataclasses.replace(check(run), precision=precision, schedule=ScheduleConfig(name=name))


LAYOUTS = [({"tp": 2}, None), ({"tp": 2}, 64), ({}, 64), ({"tp": 4}, None)]
CASES = [(recipe, *layout) for recipe in RECIPES for layout in LAYOUTS]


@pytest.mark.parametrize(
    ("recipe", "layout", "chunk"),
    chosen(CASES, [(Fp8Recipe.block, {"tp": 2}, None), (Fp8Recipe.current, {"tp": 2}, 64)]),
)
def test_what_ranks_keep_and_have_alive_is_planned(
    recipe: Fp8Recipe,
    layout: dict[str, int],
    chunk: int | None,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(unnarrowed, "build_chunks", narrowed)
    model = dataclasses.replace(WIDE, ffn_hidden_size=384)
    run = in_8(run_of(model, chunk_tokens=chunk, **layout), recipe)
    memory = planned(run)
    found = run_distributed(measured, run.world_size, run)
    for kept, *_ in found:
        assert sum(kept.values()) == pytest.approx(memory.total, rel=0.05)
    forward, _, backward = (min(sizes) for sizes in list(zip(*found, strict=True))[1:4])
    assert forward == pytest.approx(memory.total + memory.forward, rel=0.05)
    assert backward == pytest.approx(memory.total + memory.backward, rel=0.05)


@pytest.mark.cover(1)
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("recipe", RECIPES, ids=RECIPES.values())
def test_inputs_kept_for_weight_gradients_are_planned(
    recipe: Fp8Recipe, tp: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(unnarrowed, "build_chunks", narrowed)
    run = in_8(run_of(WIDE, tp=tp), recipe, splits=True)
    memory = planned(run)
    found = run_distributed(measured, tp, run)
    _, left, _, end = (min(sizes) for sizes in list(zip(*found, strict=True))[1:])
    assert left == pytest.approx(memory.total, rel=0.05)
    assert end == pytest.approx(memory.waiting, rel=0.05)
