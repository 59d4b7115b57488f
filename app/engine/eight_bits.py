"""From a run's choice of products in eight bits to the layers that compute them so."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata

import torch

from app.choices import Fp8Recipe, LinearBackendKind
from app.config import Run
from app.errors import ConfigError
from app.model.chunk import Chunk
from app.model.fp8.linear import Fp8Layers
from app.model.fp8.quantised import Fp8Arithmetic
from app.model.fp8.reference import BlockScaled, TensorScaled
from app.model.fp8.transformer_engine import LIBRARY, TransformerEngine, import_library
from app.plan.model.fp8 import fp8_weights
from app.plan.stages import Stage


def build_fp8(run: Run, chunks: Sequence[Chunk], device: torch.device) -> Fp8Layers | None:
    """The layers of these chunks whose products are in eight bits, as the run says; None: it asks
    for none. Weights have to be set. Raises ConfigError for what this host lacks.
    """
    recipe = run.precision.fp8.recipe
    if recipe is None:
        return None
    layers = Fp8Layers(chunks, build_arithmetic(run.precision.fp8.backend, recipe, device))
    for chunk in chunks:
        stage = Stage(tuple(map(int, chunk.layers)), embedding=chunk.first, head=chunk.last)
        named = fp8_weights(run.model, run.precision.fp8, stage)
        layers.use(chunk, [each.name for each in named])
    return layers


def fp8_line(layers: Fp8Layers, run: Run) -> str:
    """Which products of this rank are in eight bits, and what computes them, in words."""
    recipe = run.precision.fp8.recipe
    assert recipe is not None, "there are such layers"
    name = "the reference in torch: the same numbers, slowly"
    if isinstance(layers.arithmetic, TransformerEngine):
        name = f"Transformer Engine {metadata.version(LIBRARY)}"
    parts = " and ".join(part.value for part in run.precision.fp8.include)
    rest = run.precision.params.value
    return (
        f"{len(layers.linears)} matrices of {parts}, recipe {recipe.value}, by {name}; else {rest}"
    )


def build_arithmetic(
    asked: LinearBackendKind, recipe: Fp8Recipe, device: torch.device
) -> Fp8Arithmetic:
    """What computes by a recipe on this device. Raises ConfigError where it cannot be had."""
    on_gpu = device.type == "cuda"
    if asked is LinearBackendKind.transformer_engine and not on_gpu:
        near = (LinearBackendKind.auto, LinearBackendKind.torch)
        rule = "Transformer Engine computes on GPUs, and this run does on a CPU"
        raise ConfigError("precision.fp8.backend", asked, rule, nearest=near)
    if on_gpu and asked is not LinearBackendKind.torch:
        return TransformerEngine(import_library(asked, recipe), recipe, device)
    match recipe:
        case Fp8Recipe.current:
            return TensorScaled()
        case Fp8Recipe.block:
            return BlockScaled()
