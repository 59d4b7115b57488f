"""Runs one step's list of actions on this rank: the only place where forwards and backwards happen.

What differs between schedules is the list, never this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.profiler import record_function

from app.engine.data_feed import StepInput
from app.model.chunk import Chunk, summed_loss
from app.moe.phases import RoutingReport
from app.plan.schedule import Action, Backward, Forward, GatherParams, ReduceGrads


class Parameters(Protocol):
    """What the executor asks of the optimizer."""

    def gather_params(self, chunk: int) -> None:
        """Make a chunk's parameters whole before their first use."""

    def reduce_grads(self, chunk: int) -> None:
        """Sum a chunk's gradients over the data-parallel ranks after their last microbatch."""


@dataclass(slots=True)
class StepTotals:
    """Sums over this rank's microbatches, on the device."""

    loss: Tensor | float = 0.0  # weighted token losses, nats
    aux_loss: Tensor | float = 0.0  # weighted balancing losses of all MoE layers
    z_loss: Tensor | float = 0.0  # weighted router z-losses of all MoE layers
    counts: dict[tuple[int, int], Tensor] = field(default_factory=dict)  # (chunk, n-th MoE layer) -> tokens per expert

    def add(self, chunk: int, loss: Tensor, routing: Sequence[RoutingReport], weight: float) -> None:
        """Count one microbatch of one chunk; `weight` is its share of the routers' losses."""
        self.loss = self.loss + loss.detach()
        for layer, report in enumerate(routing):
            self.aux_loss = self.aux_loss + report.aux_loss * weight
            self.z_loss = self.z_loss + report.z_loss * weight
            before = self.counts.get((chunk, layer))
            self.counts[chunk, layer] = report.counts_E if before is None else before + report.counts_E


ForwardBackward = Callable[[StepInput], StepTotals]


def execute(actions: Sequence[Action], chunks: Sequence[Chunk], params: Parameters, step: StepInput) -> StepTotals:
    """Run `actions` over the microbatches of `step`; a list without backwards runs without autograd."""
    training = any(isinstance(action, Backward) for action in actions)
    totals, live = StepTotals(), {}
    with torch.set_grad_enabled(training):
        for position, action in enumerate(actions):
            with record_function(str(action)), _blame(actions, position):
                match action:
                    case GatherParams(chunk):
                        params.gather_params(chunk)
                    case Forward(mb, chunk):
                        root = _forward(chunks[chunk], chunk, mb, step, totals)
                        if training:
                            live[mb, chunk] = root
                    case Backward(mb, chunk):
                        live.pop((mb, chunk)).backward()
                    case ReduceGrads(chunk):
                        params.reduce_grads(chunk)
                    case _:
                        raise AssertionError(f"no way to run {action}")
    assert not live, f"forwards without a backward: {sorted(live)}"
    return totals


def _forward(chunk: Chunk, index: int, mb: int, step: StepInput, totals: StepTotals) -> Tensor:
    """Forward of one microbatch; the scalar whose gradient is this microbatch's share of the step's."""
    batch = step.batches[mb]
    out = chunk(batch.tokens_BS, chunk.context(batch.positions_BS, batch.documents_BS))
    loss = summed_loss(out.x, batch.labels_BS) * step.loss_weights_M[mb]
    totals.add(index, loss, out.routing, step.routing_weight)
    return sum((report.loss * step.routing_weight for report in out.routing), loss)


@contextmanager
def _blame(actions: Sequence[Action], position: int) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        before, after = " ".join(map(str, actions[:position])), " ".join(map(str, actions[position + 1 :]))
        error.add_note(f"while running this rank's actions: {before} >>> {actions[position]} <<< {after}")
        raise
