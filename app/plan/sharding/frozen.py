"""Parameters that a run does not train, and what that changes in a plan.

A frozen parameter has no gradient, no fp32 main values and no optimizer state, and lies outside the
optimizer's buffers. `train.frozen` lists patterns of names; every reader asks `frozen_names`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import translate
from math import inf, prod

from app.config import ModelConfig, Run
from app.plan.layout import ParallelLayout
from app.plan.model.held import held_bytes, is_held
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
    return frozen_names(run.model, ("*",) if run.adapters else run.train.frozen)


def run_weights(run: Run, stage: Stage) -> Iterator[NamedWeight]:
    """Yield the weights of a stage, and of the adapters of its run."""
    return stage_weights(run.model, stage, run.adapters)


def trained_matrices(run: Run, stages: Sequence[Stage]) -> list[Weight]:
    """Return the trained weights of linear layers and experts of these stages, in order of use."""
    frozen = frozen_in(run)
    weights = (named for stage in stages for named in run_weights(run, stage))
    return [each.weight for each in weights if each.weight.linear and each.name not in frozen]


def frozen_numel(run: Run, layout: ParallelLayout, stages: Sequence[Stage]) -> int:
    """Return the elements of a rank's frozen parameters in these stages."""
    if not run.freezes:
        return 0
    frozen, coords = frozen_in(run), ShardCoords.of(layout, 0)
    return sum(
        coords.block(named.weight).numel
        for stage in stages
        for named in stage_weights(run.model, stage)
        if named.name in frozen
    )


def frozen_bytes(run: Run, layout: ParallelLayout, stages: Sequence[Stage], size: int) -> int:
    """Return the bytes of a rank's frozen parameters in these stages, `size` each unless they are
    held in fewer bits.
    """
    if not run.freezes:
        return 0
    frozen, coords, base, found = frozen_in(run), ShardCoords.of(layout, 0), run.lora.base, 0
    for stage in stages:
        for named in stage_weights(run.model, stage):
            if named.name in frozen:
                held = base is not None and is_held(named.weight)
                shape = coords.block(named.weight).sizes
                found += held_bytes(base, shape) if held and base else size * prod(shape)
    return found


def counts(run: Run) -> tuple[int, int]:
    """Return the elements of the model's trained and of its frozen parameters."""
    frozen = frozen_in(run)
    weights = model_weights(run.model, run.adapters)
    sizes = [(each.name in frozen, each.weight.numel) for each in weights]
    held = sum(size for is_frozen, size in sizes if is_frozen)
    return sum(size for _, size in sizes) - held, held


def needs_input_grads(run: Run, stages: Sequence[Stage]) -> list[bool]:
    """Return for each stage, in stage order, whether the gradient of its input is of use: whether a
    stage before it has a trained parameter.

    With partial graphs always: a graph of a layer has hidden states as its only input with a
    gradient.
    """
    if run.cuda_graph.of_parts:
        return [True] * len(stages)
    frozen = frozen_in(run)
    trained = [any(each.name not in frozen for each in run_weights(run, stage)) for stage in stages]
    return [any(trained[:place]) for place in range(len(stages))]


@dataclass(frozen=True, slots=True)
class FrozenByPlace:
    """Frozen parameters of a model by place: "embedding", a layer's number, "head"."""

    names: Mapping[str, frozenset[str]]  # place -> their names, a layer's without its number
    first: float  # first layer with a trained parameter; −1 the embedding, num_layers the norm

    @classmethod
    def of(cls, run: Run) -> FrozenByPlace:
        """Sort the parameters of a run's model."""
        frozen, names = frozen_in(run), defaultdict[str, set[str]](set)
        trained = [inf]
        for each in model_weights(run.model, run.adapters):
            place, name = _place(each.name)
            if each.name in frozen:
                names[place].add(name)
            elif place == "embedding":
                trained.append(-1)
            elif place != "head":
                trained.append(int(place))
            elif name != "head":
                trained.append(run.model.num_layers)  # the final norm
        if run.model.tie_embeddings:
            names["head"] |= names["embedding"]
        # a graph of a layer has hidden states as its only input with a gradient
        first = -1 if run.cuda_graph.of_parts else min(trained)
        places = ("embedding", *map(str, run.model.all_layers), "head")
        return cls({place: frozenset(names[place]) for place in places}, first)

    def reached(self, place: str) -> bool:
        """Return whether backward reaches a place: whether it, or one before it, has a trained
        parameter, the head's own table left out.
        """
        if place == "embedding":
            return self.first < 0
        return self.first < inf if place == "head" else int(place) >= self.first


def _place(name: str) -> tuple[str, str]:
    """Return the place of a parameter and its name there."""
    layers, _, rest = name.partition(".")
    if layers == "layers":
        number, _, inner = rest.partition(".")
        return number, inner
    return ("embedding" if name == "embedding" else "head"), name
