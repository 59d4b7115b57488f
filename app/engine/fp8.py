"""Build the layers whose GEMMs run in FP8 from the run's recipe."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain

import torch

from app.choices import Dtype, Fp8Part, Fp8Recipe, LinearBackendKind
from app.config import Run
from app.engine.ranks.groups import Groups
from app.errors import ConfigError, Instead
from app.fp8.delayed import DelayedScales, LinearScales
from app.fp8.linear import Fp8Layers
from app.fp8.quantised import Fp8Arithmetic
from app.fp8.ready import ReadyRows
from app.fp8.reference import LARGEST, BlockScaled, TensorScaled
from app.fp8.row_scaled import RowScaled, by_reference, on_tensor_cores
from app.fp8.transformer_engine import TransformerEngine, fp8_library
from app.model.chunk import Chunk
from app.model.layers.transformer_engine import library_version
from app.plan.model.fp8 import fp8_weights, part_of
from app.plan.model.stage import NamedWeight
from app.plan.stages import Stage
from app.rules.attention import ON_CPU

REFERENCE = "the reference in torch, multiplied in fp32: slow"
HOPPER = 9  # major compute capability


def build_fp8(
    run: Run,
    chunks: Sequence[Chunk],
    groups: Groups,
    *,
    device: torch.device,
    ready: ReadyRows | None = None,
) -> Fp8Layers | None:
    """Build the FP8 layers of these chunks, whose weights must be set already; None without any.

    `ready` is where kernels leave rows of experts in FP8. Raises ConfigError for what this host
    lacks.
    """
    fp8 = run.precision.fp8
    if fp8.recipe is None:
        return None
    named = [_weights(run, chunk) for chunk in chunks]
    scales = None
    if fp8.recipe is Fp8Recipe.delayed and fp8.by_library:
        scales = DelayedScales(
            [each.name for each in chain(*named) if part_of(each) is not Fp8Part.experts],
            LARGEST,
            margin=fp8.margin,
            history=fp8.amax_history,
            group=groups.tp_cp_dp_control,
            device=device,
        )
    make = None
    if fp8.by_library:
        maker = arithmetic_maker(fp8.backend, fp8.recipe, device)

        def make(name: str) -> Fp8Arithmetic:
            return maker(scales.of[name] if scales else None)

    experts = None
    if Fp8Part.experts in fp8.include:
        experts = experts_arithmetic(fp8.backend, run.precision.params, device, include=fp8.include)
    layers = Fp8Layers(chunks, make, scales, experts=experts, ready=ready)
    for chunk, weights in zip(chunks, named, strict=True):
        layers.use(chunk, [each.name for each in weights])
    return layers


def _weights(run: Run, chunk: Chunk) -> list[NamedWeight]:
    """Return the weights of a chunk that are read in FP8."""
    stage = Stage(tuple(map(int, chunk.layers)), embedding=chunk.first, head=chunk.last)
    return [*fp8_weights(run.model, run.precision.fp8, stage)]


def fp8_line(run: Run, device: torch.device) -> str:
    """Say which GEMMs run in FP8, and what computes them."""
    fp8 = run.precision.fp8
    assert fp8.recipe is not None, "there are such layers"
    whole = Stage(tuple(range(run.model.num_layers)), embedding=True, head=True)
    counts = Counter(map(part_of, fp8_weights(run.model, fp8, whole)))
    experts = counts.pop(Fp8Part.experts, 0)
    on_cores = _by_library(fp8.backend, device)
    said = []
    if counts:
        parts = " and ".join(part.value for part in fp8.include if part in counts)
        name = f"Transformer Engine {library_version()}" if on_cores else REFERENCE
        matrices = f"{counts.total()} matrices of {parts}"
        said.append(f"{matrices}, recipe {fp8.recipe.value}, by {name}")
    if experts:
        name = "torch's grouped GEMM" if on_cores else REFERENCE
        said.append(f"{experts} of experts, a scale per row, by {name}")
    return f"{'; '.join(said)}; else {run.precision.params.value}"


def _by_library(asked: LinearBackendKind, device: torch.device) -> bool:
    return device.type == "cuda" and asked is not LinearBackendKind.torch


Maker = Callable[[LinearScales | None], Fp8Arithmetic]  # from the scales of a layer, if it has any


def arithmetic_maker(asked: LinearBackendKind, recipe: Fp8Recipe, device: torch.device) -> Maker:
    """Choose the FP8 arithmetic of a recipe on this device. Raises ConfigError if unavailable."""
    if asked is LinearBackendKind.transformer_engine and device.type != "cuda":
        near = (LinearBackendKind.auto, LinearBackendKind.torch)
        raise ConfigError("precision.fp8.backend", asked, ON_CPU, nearest=near)
    if _by_library(asked, device):
        return partial(TransformerEngine, fp8_library(asked, recipe), recipe, device)
    if recipe is Fp8Recipe.block:
        return lambda scales: BlockScaled()
    return TensorScaled


def experts_arithmetic(
    asked: LinearBackendKind,
    dtype: Dtype,
    device: torch.device,
    include: Sequence[Fp8Part] = (Fp8Part.experts,),
) -> RowScaled:
    """Choose the FP8 arithmetic of experts on this device. Raises ConfigError if unavailable.

    `include` lists all parts asked to run in FP8; a refusal suggests it without the experts.
    """
    if device.type != "cuda":
        return RowScaled(by_reference)
    key, off = "precision.fp8.include", Instead("precision.fp8.backend=torch")
    rest = tuple(part for part in include if part is not Fp8Part.experts) or (Fp8Part.linear,)
    generation = torch.cuda.get_device_capability(device)[0]
    if asked is LinearBackendKind.torch and generation >= HOPPER:
        return RowScaled(by_reference)
    if generation != HOPPER:
        rule = "torch's row-scaled FP8 grouped GEMM runs on Hopper GPUs only"
        # the reference's kernels also need Hopper or newer
        near = (rest, off) if generation > HOPPER else (rest,)
        raise ConfigError(key, tuple(include), rule, nearest=near)
    if dtype is not Dtype.bfloat16:
        rule = f"experts in FP8 need bfloat16 parameters, and these are {dtype.value}"
        raise ConfigError(key, tuple(include), rule, nearest=(Instead("precision=bf16"), off))
    return RowScaled(on_tensor_cores)
