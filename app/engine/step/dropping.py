"""Passes of runs whose adapters drop some of their inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from app.engine.step.executor import Executor, InFlight, Parameters, RankStages, Transport
from app.engine.step.records import StepInput, StepTotals
from app.engine.watchdog.watchdog import Watchdog
from app.model.adapter_dropout import AdapterDropout
from app.plan.actions import Action, Backward, BackwardInput, Forward


class DroppingExecutor(Executor):
    """`Executor` that has a microbatch's masks ready before each pass of it in training."""

    def __init__(
        self,
        dropout: AdapterDropout,
        actions: Sequence[Action],
        stages: RankStages,
        params: Parameters,
        transport: Transport,
        watchdog: Watchdog,
        in_flight: Callable[..., InFlight] = InFlight,
    ) -> None:
        super().__init__(actions, stages, params, transport, watchdog, in_flight=in_flight)
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
