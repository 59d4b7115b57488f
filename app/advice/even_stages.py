"""Pipeline stages that take equally long, by measured speeds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from app.plan.cost.times import stage_times
from app.plan.dependencies import Pipeline
from app.plan.stages import Stage, spelled_layout
from app.planner.plan import Plan

ROUNDS = 64  # layers that are moved at most
GAIN = 1e-3  # share of the slowest rank's time: a smaller gain is not worth another layout


def even_layout(plan: Plan) -> str | None:
    """Return the `parallel.layout` with the fastest slowest rank, then the fastest slowest stage.

    Layers are moved one at a time. None if no move is a gain, or no profile has speeds.
    """
    if plan.profile is None or plan.stages.pp == 1:
        return None
    sizes = [len(stage.layers) for stage in plan.stages.in_order]
    sizes[-1] -= plan.run.model.layers_behind  # these stay
    split = _Split(plan)
    moved = _moved(sizes, split)
    if split.slowest(moved)[0] > (1 - GAIN) * split.slowest(sizes)[0]:
        return None
    return spelled_layout(moved)


class _Split:
    """Times of stages by their numbers of layers, at full clocks.

    Power limits are left out: they slow the busiest rank most, so the order of splits stays.
    """

    def __init__(self, plan: Plan) -> None:
        model = plan.run.model
        self.pipeline: Pipeline = plan.stages.pipeline
        kinds = {spec: layer for layer, spec in enumerate(model.layer_specs)}
        ends = [Stage((), embedding=True, head=False), Stage((), embedding=False, head=True)]
        layers = [Stage((layer,), embedding=False, head=False) for layer in kinds.values()]
        assert plan.profile is not None
        stages = [*ends, *layers]
        found = stage_times(plan.run, stages, plan.layout, plan.profile, known=plan.known.parts)
        seconds = [sum(times.by_kind().values()) for times in found]
        self.embedding, self.head, *per_kind = seconds
        of_kind = dict(zip(kinds, per_kind, strict=True))
        every = [of_kind[spec] for spec in model.layer_specs]
        self.layers = every[: model.num_layers]
        self.head += sum(every[model.num_layers :])

    def slowest(self, sizes: Sequence[int]) -> tuple[float, float]:
        """Return seconds of a microbatch on the slowest rank, and in the slowest stage."""
        stages, ranks = self._seconds(sizes)
        return max(ranks), max(stages)

    def busiest(self, sizes: Sequence[int]) -> list[int]:
        """Return the slowest stage and all stages of the slowest rank."""
        stages, ranks = self._seconds(sizes)
        slowest, most = max(stages), max(ranks)
        return [
            place
            for place, seconds in enumerate(stages)
            if seconds == slowest or ranks[self.pipeline.rank(place)] == most
        ]

    def _seconds(self, sizes: Sequence[int]) -> tuple[list[float], list[float]]:
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
        return stages, ranks


def _moved(sizes: Sequence[int], split: _Split) -> list[int]:
    """Move one layer at a time between two stages, the best move first, while that helps."""
    best = list(sizes)
    for _ in range(ROUNDS):
        tried = []
        givers = split.busiest(best)  # a move from any other stage is no gain
        for giver, taker in product(givers, range(len(best))):
            if best[giver] and giver != taker:
                other = list(best)
                other[giver] -= 1
                other[taker] += 1
                tried.append(other)
        nearest = min(tried, key=split.slowest, default=best)
        if split.slowest(nearest) >= split.slowest(best):
            break
        best = nearest
    return best
