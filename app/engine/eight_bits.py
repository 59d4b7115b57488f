"""From a run's choice of products in eight bits to the layers that compute them so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib import metadata

import torch

from app.choices import Fp8Recipe, LinearBackendKind
from app.config import Run
from app.engine.groups import Groups
from app.errors import ConfigError
from app.model.chunk import Chunk
from app.model.fp8.delayed import DelayedScales, LinearScales
from app.model.fp8.linear import Fp8Layers
from app.model.fp8.lost import LARGEST, LostEntries
from app.model.fp8.quantised import Fp8Arithmetic
from app.model.fp8.reference import BlockScaled, TensorScaled
from app.model.fp8.transformer_engine import LIBRARY, TransformerEngine, import_library
from app.plan.model.fp8 import fp8_weights
from app.plan.stages import Stage


def build_fp8(
    run: Run, chunks: Sequence[Chunk], groups: Groups, device: torch.device
) -> Fp8Layers | None:
    """The layers of these chunks whose products are in eight bits, as the run says; None: it asks
    for none. Weights have to be set. Raises ConfigError for what this host lacks.
    """
    fp8 = run.precision.fp8
    if fp8.recipe is None:
        return None
    names = [_names(run, chunk) for chunk in chunks]
    scales = None
    if fp8.recipe is Fp8Recipe.delayed:
        scales = DelayedScales(
            [name for of_chunk in names for name in of_chunk],
            LARGEST,
            margin=fp8.margin,
            history=fp8.amax_history,
            group=groups.tp_cp_dp_control,
            device=device,
        )
    make = arithmetic_maker(fp8.backend, fp8.recipe, device)
    lost = LostEntries(device) if fp8.count_entries else None
    layers = Fp8Layers(chunks, lambda name: make(scales.of[name] if scales else None), scales, lost)
    for chunk, of_chunk in zip(chunks, names, strict=True):
        layers.use(chunk, of_chunk)
    return layers


def _names(run: Run, chunk: Chunk) -> list[str]:
    """Global names of the weights of a chunk that are read in eight bits."""
    stage = Stage(tuple(map(int, chunk.layers)), embedding=chunk.first, head=chunk.last)
    return [each.name for each in fp8_weights(run.model, run.precision.fp8, stage)]


def fp8_line(run: Run, device: torch.device) -> str:
    """Which products are in eight bits, and what computes them, in words."""
    fp8 = run.precision.fp8
    assert fp8.recipe is not None, "there are such layers"
    name = "the reference in torch: the same numbers, slowly"
    if _by_library(fp8.backend, device):
        name = f"Transformer Engine {metadata.version(LIBRARY)}"
    parts = " and ".join(part.value for part in fp8.include)
    whole = Stage(tuple(range(run.model.num_layers)), embedding=True, head=True)
    count = sum(1 for _ in fp8_weights(run.model, fp8, whole))
    rest = run.precision.params.value
    return f"{count} matrices of {parts}, recipe {fp8.recipe.value}, by {name}; else {rest}"


def _by_library(asked: LinearBackendKind, device: torch.device) -> bool:
    return device.type == "cuda" and asked is not LinearBackendKind.torch


Maker = Callable[[LinearScales | None], Fp8Arithmetic]  # from the scales of a layer, if it has any


def arithmetic_maker(asked: LinearBackendKind, recipe: Fp8Recipe, device: torch.device) -> Maker:
    """What computes by a recipe on this device. Raises ConfigError where it cannot be had."""
    if asked is LinearBackendKind.transformer_engine and device.type != "cuda":
        near = (LinearBackendKind.auto, LinearBackendKind.torch)
        rule = "Transformer Engine computes on GPUs, and this run does on a CPU"
        raise ConfigError("precision.fp8.backend", asked, rule, nearest=near)
    if _by_library(asked, device):
        return partial(TransformerEngine, import_library(asked, recipe), recipe, device)
    if recipe is Fp8Recipe.block:
        return lambda scales: BlockScaled()
    return TensorScaled
