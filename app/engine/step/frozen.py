"""Passes through stages of which the first have no trained parameters.

Backward ends at the first trained layer. Stages before it still take part in the schedule: they
receive gradients and send on zeros, which nothing reads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from app.engine.step.executor import InFlight, RankStages
from app.engine.step.records import StepInput
from app.plan.actions import MicrobatchChunk, P2POp


class PartlyTrained(InFlight):
    """`InFlight` of a rank with chunks, `ends`, before which nothing is trained."""

    def __init__(
        self,
        stages: RankStages,
        step: StepInput,
        training: bool,
        splits: bool,
        *,
        ends: frozenset[int],
    ) -> None:
        super().__init__(stages, step, training, splits=splits)
        self.ends = ends

    def _pass_on(self, key: MicrobatchChunk, output_BSD: Tensor) -> None:
        super()._pass_on(key, output_BSD)
        mb, chunk = key
        if (after := self.stages.next_here.get(chunk)) in self.ends:
            self.inputs[mb, after].requires_grad_(False)

    def complete(self, ops: Sequence[P2POp]) -> None:
        """See `InFlight`; inputs of `ends` need no gradient."""
        super().complete(ops)
        for op in ops:
            if not op.send and op.flow == "F" and op.chunk in self.ends:
                self.inputs[op.mb, op.chunk].requires_grad_(False)

    def backward(self, mb: int, chunk: int) -> None:
        """See `InFlight`."""
        key = mb, chunk
        if chunk in self.ends:
            if key in self.inputs:
                self.inputs[key].grad = torch.zeros_like(self.inputs[key])
            root, *losses = self.roots[key]
            if not root.requires_grad:  # nothing is trained up to the end of the chunk
                end = torch.empty_like(self.output_grads[key])
                self.roots[key] = [end.requires_grad_(), *losses]
        super().backward(mb, chunk)
