"""What the memory of a run's pipeline ranks shares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from app.config import CudaGraphConfig, Run
from app.plan.actions import Action
from app.plan.layout import ParallelLayout
from app.plan.memory.activations import (
    ChunkActivations,
    Peak,
    find_peak,
    highest,
    rank_moments,
    stage_activations,
)
from app.plan.parts.dispatcher import with_rows
from app.plan.parts.known import KnownParts
from app.plan.parts.paged_buffer import with_paged_buffer
from app.plan.parts.stage import parts_of, sizes_of
from app.plan.parts.static import HEADROOM, PlannedStatic
from app.plan.parts.trace import Sizes
from app.plan.recompute import recompute_policy, with_full_recompute
from app.plan.stages import Stage


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """What the ranks of a run share: activations of stages, and the run with which a step that
    exceeds its capacity is rerun.
    """

    layout: ParallelLayout
    parts: KnownParts
    sizes: dict[Run, Sizes] = field(default_factory=dict)
    found: dict[object, ChunkActivations] = field(default_factory=dict)
    reruns: dict[Run, Run] = field(default_factory=dict)

    def chunks(self, run: Run, stages: Sequence[Stage]) -> list[ChunkActivations]:
        """Return the activations of these stages under a run."""
        if run not in self.sizes:
            self.sizes[run] = sizes_of(run, self.layout, known=self.parts)
        return [self._chunk(self.sizes[run], stage) for stage in stages]

    def again(self, run: Run, dispatcher: PlannedStatic, tokens: int) -> Run:
        """Return the run that reruns a step which exceeded its capacity."""
        if run not in self.reruns:
            # more than the capacity, or the step would not be rerun
            held = dispatcher.rows(tokens).computed / dispatcher.mean_rows(tokens)
            needed = max(dispatcher.busiest_load(tokens), HEADROOM * held)
            more = with_rows(with_paged_buffer(with_full_recompute(run), None), needed)
            self.reruns[run] = replace(more, cuda_graph=CudaGraphConfig())
        return self.reruns[run]

    def _chunk(self, s: Sizes, stage: Stage) -> ChunkActivations:
        key = s.run, parts_of(s, stage)
        if key not in self.found:
            self.found[key] = stage_activations(s, stage)
        return self.found[key]

    def peak(self, run: Run, actions: Sequence[Action], chunks: Sequence[ChunkActivations]) -> Peak:
        """Return the peak of a rank with these actions."""
        spared = recompute_policy(run).on_rank(actions).spared
        if spared:
            return find_peak(actions, chunks, spared)
        moments = self.parts.of_list(actions, rank_moments)
        return highest(moments, chunks)
