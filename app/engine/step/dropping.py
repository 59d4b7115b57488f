"""Passes of runs whose adapters drop some of their inputs."""

from __future__ import annotations

from typing import Any

from app.engine.step.executor import Executor, InFlight
from app.engine.step.records import StepInput, StepTotals
from app.model.adapter_dropout import AdapterDropout
from app.plan.actions import Action, Backward, BackwardInput, Forward


class DroppingExecutor(Executor):
    """`Executor` that has a microbatch's masks ready before each pass of it in training."""

    def __init__(self, *arguments: Any, dropout: AdapterDropout, **how: Any) -> None:
        super().__init__(*arguments, **how)
        self.dropout = dropout

    def __call__(self, step: StepInput) -> StepTotals:
        """See `Executor`."""
        with self.dropout.during(training=self.training):
            return super().__call__(step)

    def _run(self, action: Action, in_flight: InFlight, last: bool) -> None:
        match action:
            case Forward(mb, _) | Backward(mb, _) | BackwardInput(mb, _):
                self.dropout.start(mb)
        super()._run(action, in_flight, last=last)
