"""Execute one step's list of actions on this rank: all forwards, backwards, P2P and reductions.

Schedules differ in the list; this file is the same for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import nn
from torch.profiler import record_function

from app.engine.step.data_feed import StepInput
from app.engine.step.in_flight import InFlight, RankStages, StepTotals
from app.engine.step.transport import Transport
from app.engine.watchdog.watchdog import Watchdog
from app.model.layers.weight_grads import WeightGrad
from app.plan.actions import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Exchange,
    Forward,
    Free,
    GatherParams,
    ReduceGrads,
    Wait,
)
from app.plan.schedule import last_backwards


class Parameters(Protocol):
    """Interface of the optimizer to the executor."""

    def start_gather(self, chunk: int) -> None:
        """All-gather a chunk's parameters, or make the first use of each wait for that."""

    def add_grad(self, param: nn.Parameter, gradient: WeightGrad) -> None:
        """Add to the main gradient of a parameter."""

    def expect_grads(self, chunk: int, last: bool) -> None:
        """Announce a backward of a chunk; `last`: it is the chunk's last one in this step."""

    def reduce_grads(self, chunk: int) -> None:
        """Reduce a chunk's gradients over data-parallel ranks, after its last microbatch."""


ForwardBackward = Callable[[StepInput], StepTotals]


def execute(
    actions: Sequence[Action],
    stages: RankStages,
    params: Parameters,
    transport: Transport,
    watchdog: Watchdog,
    step: StepInput,
) -> StepTotals:
    """Run `actions` over the microbatches of `step`; autograd is off if none is a backward."""
    training = any(isinstance(action, Backward | BackwardInput) for action in actions)
    last = last_backwards(actions)  # positions after which a chunk's gradients are complete
    splits = any(isinstance(action, BackwardWeight) for action in actions)
    in_flight = InFlight(stages, step, training, splits=splits)
    with torch.set_grad_enabled(training):
        for position, action in enumerate(actions):
            watchdog.note(str(action))
            with record_function(watchdog.doing), _blame(actions, position):
                match action:
                    case GatherParams(chunk):
                        params.start_gather(chunk)
                    case Forward(mb, chunk):
                        in_flight.forward(mb, chunk)
                    case Backward(mb, chunk) | BackwardInput(mb, chunk):
                        params.expect_grads(chunk, last=position in last)
                        in_flight.backward(mb, chunk)
                    case BackwardWeight(mb, chunk):
                        in_flight.weight_gradients(mb, chunk, params.add_grad)
                    case Exchange(ops):
                        transport.post({op: in_flight.tensor_of(op) for op in ops})
                    case Wait(ops):
                        transport.wait(ops)
                        in_flight.complete(ops)
                    case Free(mb, chunk):
                        in_flight.free(mb, chunk)
                    case ReduceGrads(chunk):
                        params.reduce_grads(chunk)
                    case _:
                        raise AssertionError(f"no way to run {action}")
    in_flight.expect_empty()
    transport.forget()
    watchdog.note("the end of the step")
    return in_flight.totals


@contextmanager
def _blame(actions: Sequence[Action], position: int) -> Iterator[None]:
    """Add the list of actions, with the failing one marked, to an error raised in the block."""
    try:
        yield
    except Exception as error:
        before = " ".join(map(str, actions[:position]))
        after = " ".join(map(str, actions[position + 1 :]))
        marked = f"{before} >>> {actions[position]} <<< {after}"
        error.add_note(f"while running this rank's actions: {marked}")
        raise
