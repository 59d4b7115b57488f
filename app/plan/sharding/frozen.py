"""Parameters that a run does not train, and what that changes in a plan.

A frozen parameter has no gradient, no fp32 main values and no optimizer state, and lies outside the
optimizer's buffers. `train.frozen` lists patterns of names; every reader asks `frozen_names`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import translate

from app.config import ModelConfig, Run
from app.plan.layout import ParallelLayout
from app.plan.model.stage import NamedWeight, model_weights, stage_weights
from app.plan.model.weight import Weight
from app.plan.sharding.blocks import ShardCoords
from app.plan.stages import Stage

NUMBERS = re.compile(r"(?<=\.)(\d+)-(\d+)(?=\.|$)")  # a range of layers: layers.0-3
KEEPS = "!"  # first character of a pattern of parameters that are trained after all


def names_of(pattern: str, names: Sequence[str]) -> list[str]:
    """Return the names that a pattern matches, without its `!`.

    `*`, `?` and `[…]` as in a shell, `*` across dots too; `layers.0-3` is each of these layers, and
    a name stands for everything below it.
    """
    parts = NUMBERS.split(pattern.removeprefix(KEEPS))
    texts, ranges = parts[::3], list(zip(map(int, parts[1::3]), map(int, parts[2::3]), strict=True))
    spelt = r"(\d+)".join(translate(text)[len("(?s:") : -len(")\\Z")] for text in texts)
    expression = re.compile(rf"{spelt}(?:\..*)?")

    def fits(name: str) -> bool:
        found = expression.fullmatch(name)
        return found is not None and all(
            low <= int(number) <= high
            for number, (low, high) in zip(found.groups(), ranges, strict=True)
        )

    return list(filter(fits, names))


def frozen_names(model: ModelConfig, patterns: Sequence[str]) -> frozenset[str]:
    """Return the names of the frozen parameters; the last pattern that matches a name decides."""
    if not patterns:
        return frozenset()
    names = [each.name for each in model_weights(model)]
    frozen: set[str] = set()
    for pattern in patterns:
        found = names_of(pattern, names)
        frozen = frozen.difference(found) if pattern.startswith(KEEPS) else frozen.union(found)
    return frozenset(frozen)


def frozen_in(run: Run) -> frozenset[str]:
    """Return the names of the parameters that a run does not train."""
    return frozen_names(run.model, run.train.frozen)


def trained_matrices(run: Run, stages: Sequence[Stage]) -> list[Weight]:
    """Return the trained weights of linear layers and experts of these stages, in order of use."""
    frozen = frozen_in(run)
    weights = (named for stage in stages for named in stage_weights(run.model, stage))
    return [each.weight for each in weights if each.weight.linear and each.name not in frozen]


def frozen_numel(run: Run, layout: ParallelLayout, stages: Sequence[Stage]) -> int:
    """Return the elements of a rank's frozen parameters in these stages."""
    frozen, coords = frozen_in(run), ShardCoords.of(layout, 0)
    return sum(
        coords.block(named.weight).numel
        for stage in stages
        for named in stage_weights(run.model, stage)
        if named.name in frozen
    )


def counts(run: Run) -> tuple[int, int]:
    """Return the elements of the model's trained and of its frozen parameters."""
    frozen = frozen_in(run)
    sizes = [(each.name in frozen, each.weight.numel) for each in model_weights(run.model)]
    held = sum(size for is_frozen, size in sizes if is_frozen)
    return sum(size for _, size in sizes) - held, held


def trains(run: Run, stage: Stage) -> bool:
    """Return whether a stage has a trained parameter."""
    frozen = frozen_in(run)
    return any(each.name not in frozen for each in stage_weights(run.model, stage))


def needs_input_grads(run: Run, stages: Sequence[Stage]) -> list[bool]:
    """Return for each stage, in stage order, whether the gradient of its input is of use: whether a
    stage before it has a trained parameter.

    With partial graphs always: a graph of a layer has hidden states as its only input with a
    gradient.
    """
    if run.cuda_graph.of_parts:
        return [True] * len(stages)
    trained = [trains(run, stage) for stage in stages]
    return [any(trained[:place]) for place in range(len(stages))]


@dataclass(frozen=True, slots=True)
class BackwardShare:
    """Parts of a stage's backward that are left, relative to training all of its parameters."""

    inputs: float
    weights: float


def backward_shares(run: Run, stages: Sequence[Stage]) -> list[BackwardShare]:
    """Return what is left of each stage's backward, in stage order.

    Weight gradients count by FLOPs, 2 per token and element that the token uses. Backward ends at
    the first layer with a trained parameter, and layers count alike.
    """
    frozen, needed = frozen_in(run), needs_input_grads(run, stages)
    return [
        BackwardShare(
            1.0 if whole else _layers_above(run.model, stage, frozen),
            _trained_share(run.model, stage, frozen),
        )
        for whole, stage in zip(needed, stages, strict=True)
    ]


def _trained_share(model: ModelConfig, stage: Stage, frozen: frozenset[str]) -> float:
    """Return the share of FLOPs of weight gradients that are computed."""
    sizes = [
        (each.name in frozen, _used(model, each, stage)) for each in stage_weights(model, stage)
    ]
    total = sum(size for _, size in sizes)
    return sum(size for is_frozen, size in sizes if not is_frozen) / total if total else 1.0


def _used(model: ModelConfig, named: NamedWeight, stage: Stage) -> float:
    """Return the elements of a matrix that a token uses; 0 for norms and looked-up tables."""
    weight, moe = named.weight, model.moe
    looked_up = named.name == "embedding" and not (model.tie_embeddings and stage.head)
    if len(weight.shape) == 1 or looked_up:
        return 0
    return weight.numel / moe.num_experts * moe.top_k if moe and weight.expert else weight.numel


def _layers_above(model: ModelConfig, stage: Stage, frozen: frozenset[str]) -> float:
    """Return the share of a stage's layers that backward reaches, if none before it is trained."""
    trained = [each.name for each in stage_weights(model, stage) if each.name not in frozen]
    if not stage.layers or (stage.embedding and "embedding" in trained):
        return 1.0
    reached = [
        place
        for place, layer in enumerate(stage.layers)
        if any(name.startswith(f"layers.{layer}.") for name in trained)
    ]
    return (len(stage.layers) - min(reached)) / len(stage.layers) if reached else 0.0
