"""Stages of a pipeline that take equally long, by measured speeds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

from app.config import ModelConfig
from app.plan.cost.times import stage_times
from app.plan.pipeline.dependencies import Pipeline
from app.plan.plan import Plan
from app.plan.stages import Stage, spelled_layout

ROUNDS = 64  # layers that are moved at most
GAIN = 1e-3  # of the slowest rank's time: less is not worth moving a layer for


def even_layout(plan: Plan) -> str | None:
    """`parallel.layout` whose slowest pipeline rank, and of those the slowest stage, takes least
    time; None: a run's stages cannot be made quicker by moving single layers, or no profile says
    what they take.
    """
    if plan.profile is None or plan.stages.pp == 1:
        return None
    sizes = [len(stage.layers) for stage in plan.stages.in_order]
    split = _Split(plan)
    moved = _moved(sizes, split)
    if split.slowest(moved)[0] > (1 - GAIN) * split.slowest(sizes)[0]:
        return None
    return spelled_layout(moved)


class _Split:
    """What stages of so many layers take at full clocks: a rank with more to do has lower ones."""

    def __init__(self, plan: Plan) -> None:
        model = plan.run.model
        self.pipeline: Pipeline = plan.stages.pipeline
        kinds = {model.is_moe_layer(layer): layer for layer in range(model.num_layers)}
        ends = [Stage((), embedding=True, head=False), Stage((), embedding=False, head=True)]
        layers = [Stage((layer,), embedding=False, head=False) for layer in kinds.values()]
        assert plan.profile is not None
        found = stage_times(plan.run, [*ends, *layers], plan.layout, plan.profile)
        seconds = [sum(times.by_kind().values()) for times in found]
        self.embedding, self.head, *per_kind = seconds
        self.layers = _by_layer(model, dict(zip(kinds, per_kind, strict=True)))

    def slowest(self, sizes: Sequence[int]) -> tuple[float, float]:
        """Seconds of a microbatch on the slowest rank, and in the slowest stage."""
        stages = []
        begun = 0
        for size in sizes:
            stages.append(sum(self.layers[begun : begun + size]))
            begun += size
        stages[0] += self.embedding
        stages[-1] += self.head
        ranks = [0.0] * self.pipeline.pp
        for stage, seconds in enumerate(stages):
            ranks[self.pipeline.rank(stage)] += seconds
        return max(ranks), max(stages)


def _by_layer(model: ModelConfig, seconds: dict[bool, float]) -> list[float]:
    return [seconds[model.is_moe_layer(layer)] for layer in range(model.num_layers)]


def _moved(sizes: Sequence[int], split: _Split) -> list[int]:
    """Layers moved one at a time from one stage to another, as long as that helps most."""
    best = list(sizes)
    for _ in range(ROUNDS):
        tried = []
        for giver, taker in permutations(range(len(best)), 2):
            if best[giver]:
                other = list(best)
                other[giver] -= 1
                other[taker] += 1
                tried.append(other)
        nearest = min(tried, key=split.slowest)
        if split.slowest(nearest) >= split.slowest(best):
            break
        best = nearest
    return best
