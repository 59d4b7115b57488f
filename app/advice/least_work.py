"""Lower bounds of time and memory, by which a search for layouts decides what to plan."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property

from app.advice.moves import with_values
from app.choices import GraphImpl
from app.config import Run
from app.plan.cost.flops import stage_seconds
from app.plan.cost.rates import measured
from app.plan.cost.times import stage_times
from app.plan.layout import select_layout
from app.plan.memory.activations import chunk_activations
from app.plan.parts.dispatcher import without_waits
from app.plan.parts.known import KnownParts
from app.plan.stages import Stage


@dataclass(frozen=True)
class LeastWork:
    """Lower bounds for a microbatch in all layers, however these are split into stages: by the
    better of two dispatchers, without launches of the host.
    """

    run: Run
    known: KnownParts

    @cached_property
    def seconds(self) -> float:
        """Seconds of its forward and backward."""
        graph = dataclasses.replace(self.run.cuda_graph, impl=GraphImpl.full_iteration)
        whole = [Stage(self._layers, embedding=True, head=True)]
        found = []
        for way in self._ways:
            launched = dataclasses.replace(way, cuda_graph=graph)
            profile, layout = measured(way), select_layout(way)
            if profile is None:
                found.append(stage_seconds(launched, whole, layout)[0].total)
            else:
                (times,) = stage_times(launched, whole, layout, profile, known=self.known)
                found.append(sum(times.by_kind().values()))
        return min(found)

    @cached_property
    def bytes(self) -> int:
        """Bytes saved for its backward."""
        inner = Stage(self._layers, embedding=False, head=False)
        kept = (chunk_activations(way, inner, select_layout(way), self.known) for way in self._ways)
        return min(each.usual.total for each in kept)

    @property
    def _layers(self) -> tuple[int, ...]:
        return tuple(range(self.run.model.num_layers))

    @cached_property
    def _ways(self) -> list[Run]:
        if self.run.model.moe is None:
            return [self.run]
        return [self.run, with_values(self.run, {**without_waits()})]
