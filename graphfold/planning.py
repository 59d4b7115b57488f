"""Plan a run before any GPU is used; no torch is loaded."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from app.cli.plan import PlanView


@dataclass(frozen=True, slots=True, repr=False)
class Plan:
    """A run's layout, memory and speed, as `graphfold-plan` shows them; `print(plan)` shows all."""

    layout: dict[str, Any]  # model, world_size, degrees (tp, cp, pp, dp, ep, …), parameters
    world_size: int  # ranks: parallel.world_size
    fits: bool  # whether the rank with the most memory fits into a GPU
    memory: tuple[int, ...]  # bytes on a rank; one entry per pipeline rank
    gpu_memory: int  # bytes that a GPU has
    step_seconds: float  # estimated
    tokens_per_second: float  # estimated, of all ranks together
    gpu_hours: float  # estimated, of all train.steps
    _view: PlanView = field(compare=False)

    def to_dict(self, what: str = "all") -> dict[str, Any]:
        """Return the values that `graphfold-plan --json what=…` prints. Raises ValueError for
        another `what` than groups, stages, schedule, graphs, memory, decoding or all.
        """
        values: dict[str, Any] = json.loads(json.dumps(self._view.values(what)))
        return values

    def __str__(self) -> str:
        """Return the tables that `graphfold-plan` prints."""
        text = io.StringIO()
        self._view.show("all", text)
        return text.getvalue().rstrip("\n")

    def __repr__(self) -> str:
        """Return one line."""
        most = max(self.memory) / 2**30
        return (
            f"<Plan of {self.layout['model']} on {self.world_size} ranks: {most:.1f} GiB of "
            f"{self.gpu_memory / 2**30:.1f}, {self.step_seconds:.3g} s per step>"
        )


def plan(overrides: Sequence[str] = ()) -> Plan:
    """Plan the run that these overrides describe, on parallel.world_size ranks.

    Raises ConfigError.
    """
    from app.cli.options.arguments import flags_to_overrides
    from app.cli.options.given import given, typed_given
    from app.cli.options.messages import mistakes_raised
    from app.cli.plan import PlanView, asked_plan
    from app.planner.export import Estimate, layout_json

    words = given(overrides)
    with mistakes_raised(lambda: asked_plan(typed_given(flags_to_overrides(words)))):
        view = PlanView.of(typed_given(words))
        found = view.plan
        estimate = Estimate.of(found)
        return Plan(
            layout_json(found),
            found.run.world_size,
            fits=found.fits,
            memory=tuple(rank.total for rank in found.memory),
            gpu_memory=found.gpu_memory,
            step_seconds=estimate.seconds,
            tokens_per_second=estimate.tokens_per_second_per_gpu * found.run.world_size,
            gpu_hours=estimate.gpu_hours,
            _view=view,
        )
