"""Cache that plans of related runs share, as a search makes hundreds of them."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from app.config import Run
from app.hashed import hashed_once
from app.plan.layout import ParallelLayout
from app.plan.parts.known import KnownParts
from app.plan.pipeline.known import KnownSchedules
from app.plan.sharding.frozen import frozen_in
from app.plan.sharding.parameters import ChunkBuffers, chunk_buffers, chunk_parameters
from app.plan.stages import Stage

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Known:
    """What plans share; treated as immutable."""

    schedules: KnownSchedules = field(default_factory=KnownSchedules)
    parts: KnownParts = field(default_factory=KnownParts)
    stages: dict[Hashable, Any] = field(default_factory=dict)

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the value of this key, made once."""
        if key not in self.stages:
            self.stages[key] = make()
        found: T = self.stages[key]
        return found

    def buffers(self, run: Run, layout: ParallelLayout, stage: Stage) -> ChunkBuffers:
        """Return the layout of a chunk's parameter and gradient buffers, and their shards.

        Stages of like layers have equal ones.
        """

        def made() -> ChunkBuffers:
            frozen, lora = frozen_in(run), run.adapters
            held = chunk_parameters(run.model, stage, layout, frozen=frozen, lora=lora)
            return chunk_buffers(held, layout, run.optim)

        key = "buffers", layout, run.optim, _Weights.of(run), _kinds(run, stage)
        return self.once(key, made)


@hashed_once
@dataclass(frozen=True)
class _Weights:
    """Everything that the weights of a stage depend on, beside its layers."""

    values: tuple[Hashable, ...]

    @classmethod
    def of(cls, run: Run) -> _Weights:
        """Return that of a run, made once."""
        if "weights" not in run.derived:
            model = _values(run.model, "moe")
            # how tokens travel changes no weight
            experts = run.model.moe and _values(run.model.moe, "dispatcher", "static")
            run.derived["weights"] = cls((model, experts, run.lora, run.train.frozen))
        found: _Weights = run.derived["weights"]
        return found


def _kinds(run: Run, stage: Stage) -> Hashable:
    """Return the kinds of a stage's layers, or the stage itself if some are frozen."""
    if run.freezes:
        return stage
    specs = tuple(run.model.layer_specs[layer] for layer in stage.layers)
    return specs, stage.embedding, stage.head


def _values(section: Any, *without: str) -> tuple[Hashable, ...]:
    """Return the values of a section's keys, without some."""
    names = (each.name for each in fields(section))
    return tuple(getattr(section, name) for name in names if name not in without)
