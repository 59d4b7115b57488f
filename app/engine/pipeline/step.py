"""One optimizer step of one rank, and one validation: microbatches in, numbers out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from app.choices import GraphImpl, Normalize
from app.collectives import all_reduce
from app.data.feed import Batch
from app.engine.build import Engine, build_partial_graphs, select_forward_backward
from app.engine.capture.whole import WholeStep
from app.engine.pipeline.data_feed import Loader, StepInput, step_input
from app.engine.pipeline.executor import ForwardBackward
from app.engine.pipeline.in_flight import StepTotals
from app.engine.report.metrics import StepFacts
from app.engine.run.signals import StopRequest
from app.moe.router import update_bias


@dataclass(frozen=True, slots=True)
class Passes:
    """What forwards and backwards of a step have left on this rank, on the device."""

    totals: StepTotals
    norm_sq: Tensor  # fp32 scalar: of this rank's gradients
    zeros: Tensor | float  # their zero elements, where they are counted


def run_passes(engine: Engine, forward_backward: ForwardBackward, step: StepInput) -> Passes:
    """From cleared gradient sums to their norm: everything of a step that one graph can hold."""
    optimizer = engine.optimizer
    optimizer.zero_grad()
    for _, router in engine.routers():
        router.start_step()
    totals = forward_backward(step)
    optimizer.finish_grads()
    return Passes(
        totals,
        optimizer.local_norm_sq(),
        optimizer.local_zeros() if engine.plan.run.optim.count_zeros else 0.0,
    )


class TrainingStep:
    """Forward, backward, clipping and update over the schedule's action list.

    The host waits once, at the end; an all-to-all dispatcher adds a wait per MoE layer and
    microbatch. From step `cuda_graph.warmup_steps` + 1 of this process on, what the run captures is
    recorded and then replayed.
    """

    def __init__(self, engine: Engine, request: StopRequest | None = None) -> None:
        self.run = engine.plan.run
        self.engine = engine
        self.request = request or StopRequest()
        self.taken = 0  # steps of this process
        self.loader = Loader(engine.groups, engine.device)
        forward_backward = select_forward_backward(engine, engine.plan.actions)
        self.eager = partial(run_passes, engine, forward_backward)
        self.captured = self._captured()

    def _captured(self) -> Callable[[StepInput], Passes]:
        engine = self.engine
        recorder = self.engine.recorder
        if recorder is None:
            return self.eager
        if self.run.cuda_graph.impl is GraphImpl.full_iteration:
            return WholeStep(self.eager, engine.make_parameters_whole, recorder)
        graphs = build_partial_graphs(engine)
        forward_backward = select_forward_backward(engine, engine.plan.actions, graphs)
        return partial(run_passes, engine, forward_backward)

    def __call__(
        self,
        batches: Sequence[Batch],
        lr: float,
        weight_decay: float,
        following: Callable[[], Sequence[Batch]] | None = None,
    ) -> tuple[StepFacts, StepTotals]:
        """Train on a step's microbatches; while the device computes, load the `following` ones."""
        optimizer = self.engine.optimizer
        loss_scale = self.engine.loss_scale
        scale = None if loss_scale is None else loss_scale.value
        step = step_input(
            self.loader.take(batches),
            self.run.loss.normalize,
            self.run.dp,
            groups=self.engine.groups,
            scale=scale,
        )
        # for the watchdog: a replayed graph notes no actions
        self.engine.watchdog.note("forwards and backwards of a step")
        captures = self.taken >= self.run.cuda_graph.warmup_steps
        passes = self.captured(step) if captures else self.eager(step)
        self.taken += 1
        totals = passes.totals
        facts_6 = _pack(passes.norm_sq, totals, passes.zeros, request=self.request)
        all_reduce(facts_6, self.engine.groups.world)
        skipped = optimizer.step(lr, weight_decay, facts_6[0].sqrt(), scale)
        self._balance(totals, skipped)
        facts_7 = torch.cat((facts_6, skipped[None]))
        if following is not None:
            self.engine.watchdog.rest("reading the next batches")
            # an error comes up again when these batches are trained on: report and save first
            with suppress(Exception):
                self.loader.start(following())
            self.engine.watchdog.note("the end of the step")
        facts = _unpack(facts_7)
        self.engine.watchdog.rest("between steps")
        if loss_scale is None:
            return facts, totals
        used = loss_scale.scale
        loss_scale.update(bool(facts.skipped))
        return replace(facts, norm_sq=facts.norm_sq / used**2, scale=used), totals

    def _balance(self, totals: StepTotals, skipped: Tensor) -> None:
        """Move the routers' bias against the step's load, if it is on; not on a skipped step."""
        moe = self.run.model.moe
        if moe is None or not moe.bias_update_rate:
            return
        for key, router in self.engine.routers():
            counts_E = totals.counts[key].clone()
            all_reduce(counts_E, self.engine.groups.tp_cp_dp_control)
            moved_E = update_bias(router.bias_E, counts_E, moe.bias_update_rate)
            router.bias_E.copy_(torch.where(skipped > 0, router.bias_E, moved_E))


def _pack(
    norm_sq: Tensor, totals: StepTotals, zeros: Tensor | float, request: StopRequest
) -> Tensor:
    """Sums of this rank that one all-reduce turns into sums over the step; fp32 [6]."""

    def scalar(part: Tensor | float) -> Tensor:
        # new_full is a kernel; a tensor made from a number of the host would wait for the device
        return part.float() if isinstance(part, Tensor) else norm_sq.new_full((), part)

    parts = (norm_sq, totals.loss, totals.aux_loss, totals.z_loss, zeros, float(request.wanted))
    return torch.stack([scalar(part) for part in parts])


def _unpack(facts_7: Tensor) -> StepFacts:
    """Waits for what `_pack` has packed, and whether the update was skipped."""
    norm_sq, loss, aux_loss, z_loss, zeros, stop, skipped = facts_7.tolist()
    return StepFacts(
        norm_sq=norm_sq,
        loss=loss,
        aux_loss=aux_loss,
        z_loss=z_loss,
        zeros=zeros,
        stop=stop,
        skipped=skipped,
    )


class Validation:
    """Mean token loss over fixed microbatches, forward only.

    What the run captures is recorded by the first validation after training has been, but never by
    the first one of this process: kernels without a backward, and exchanges of other sizes, have to
    be prepared outside of a capture too.
    """

    def __init__(self, engine: Engine, num_microbatches: int) -> None:
        self.run = engine.plan.run
        self.engine = engine
        self.taken = 0  # validations of this process
        actions = engine.plan.validation_actions(num_microbatches)
        self.eager = select_forward_backward(engine, actions)
        self.loader = Loader(engine.groups, engine.device)
        self.captured = self.eager
        if self.run.cuda_graph.impl is GraphImpl.full_iteration and engine.recorder is not None:
            self.captured = WholeStep(self.eager, engine.make_parameters_whole, engine.recorder)

    def __call__(self, batches: Sequence[Batch]) -> tuple[float, int]:
        """(nats per token, tokens) over the microbatches of all ranks."""
        loaded = self.loader.take(batches)
        step = step_input(loaded, Normalize.token, self.run.dp, groups=self.engine.groups)
        self.engine.watchdog.note("forwards of a validation")
        recorder = self.engine.recorder
        captures = recorder is not None and recorder.recordings and self.taken
        totals = (self.captured if captures else self.eager)(step)
        self.taken += 1
        # ranks without the last stage have the number 0.0: a tensor, for the group to sum
        loss = torch.as_tensor(totals.loss, dtype=torch.float32, device=self.engine.device).clone()
        all_reduce(loss, self.engine.groups.world)
        found = float(loss), int(step.valid)
        self.engine.watchdog.rest("between steps")
        return found
