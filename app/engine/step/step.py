"""Run one optimizer step of a rank, or one validation: microbatches in, metrics out.

Shapes: E experts of a layer, N numbers of a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from app.choices import GraphImpl, Normalize
from app.collectives import all_reduce
from app.data.feed import Batch
from app.engine.capture.full_iteration import FullIteration
from app.engine.capture.partial import PartialGraphs
from app.engine.files.signals import StopRequest
from app.engine.step.data_feed import Loader, StepInput, step_input
from app.engine.step.engine import Engine, build_partial_graphs, select_forward_backward
from app.engine.step.executor import ForwardBackward
from app.engine.step.in_flight import StepTotals
from app.engine.step.shortage import RowShortage
from app.kernels.adamw import update_rates
from app.moe.router import update_bias
from app.plan.recompute import recompute_policy, with_full_recompute


@dataclass(frozen=True, slots=True)
class Passes:
    """Results of a step's forwards and backwards on this rank, on the device."""

    totals: StepTotals
    norm_sq: Tensor  # fp32 scalar; squared norm of this rank's gradients


def run_passes(engine: Engine, forward_backward: ForwardBackward, step: StepInput) -> Passes:
    """Clear main gradients, run all passes, and compute the norm; one graph can hold all of it."""
    optimizer = engine.optimizer
    optimizer.begin()
    optimizer.zero_grad()
    for state in engine.states:
        state.start_step()
    totals = forward_backward(step)
    optimizer.finish_grads()
    return Passes(totals, optimizer.local_norm_sq())


def run_forwards(engine: Engine, forwards: ForwardBackward, step: StepInput) -> StepTotals:
    """Run the forwards of a validation."""
    engine.optimizer.begin()
    return forwards(step)


@dataclass(frozen=True, slots=True)
class UpdateInput:
    """Microbatches of a step and host values of its update, on the device."""

    step: StepInput
    rates_2: Tensor  # learning rate and weight decay (`update_rates`)
    # fp32 scalar: 1 if this process was asked to stop, else 0. None if the host checks only at the
    # update, later and therefore with the latest state
    stop: Tensor | None


@dataclass(frozen=True, slots=True)
class StepFacts:
    """Numbers of a step that the host reads in its one wait per step."""

    norm_sq: float
    loss: float
    aux_loss: float
    z_loss: float
    missing: float  # ranks whose experts lacked memory for dispatched tokens
    stop: float  # ranks that were told to stop
    skipped: float
    scale: float | None = None  # factor on the loss
    # 1 if the step was rerun with memory for all tokens; None if memory cannot lack
    reruns: int | None = None
    # sums over all ranks of their groups' clone counters (`app.moe.clones.cloning`)
    busiest_before: float = 0.0
    busiest_after: float = 0.0
    routed_rows: float = 0.0
    clones: float = 0.0


@dataclass(frozen=True, slots=True)
class StepSums:
    """Numbers of a step in one device tensor, so that one all-reduce sums them over all ranks."""

    names: tuple[str, ...]  # fields of `StepFacts`
    values_N: Tensor  # fp32

    @classmethod
    def of(cls, parts: Mapping[str, Tensor | float], like: Tensor) -> StepSums:
        """Stack this rank's numbers; `like` is any tensor on the device."""

        def scalar(part: Tensor | float) -> Tensor:
            # new_full only launches a kernel; copying a host number would wait for the device
            return part.float() if isinstance(part, Tensor) else like.new_full((), part)

        return cls(tuple(parts), torch.stack([scalar(part) for part in parts.values()]))

    def __getitem__(self, name: str) -> Tensor:
        """Return one of the numbers, a scalar."""
        return self.values_N[self.names.index(name)]

    def with_value(self, name: str, value: Tensor) -> StepSums:
        """Append a number that is equal on all ranks."""
        return StepSums((*self.names, name), torch.cat((self.values_N, value[None])))

    def read(self) -> StepFacts:
        """Copy the numbers to the host, which waits for the device."""
        return StepFacts(**dict(zip(self.names, self.values_N.tolist(), strict=True)))


StepOutcome = tuple[StepTotals, StepSums]
TakeStep = Callable[[UpdateInput], StepOutcome]


class TrainingStep:
    """Training step: forwards, backwards, clipping and update by the schedule's action list.

    The host waits once, at the end. An all-to-all dispatcher adds a wait per MoE layer and
    microbatch; a rerun step (`RowShortage`) adds one. From step `cuda_graph.warmup_steps` + 1 of
    this process on, captured parts are recorded once and then replayed.
    """

    def __init__(self, engine: Engine, request: StopRequest | None = None) -> None:
        self.run = engine.plan.run
        self.engine = engine
        self.request = request or StopRequest()
        self.taken = 0  # steps of this process
        self.loader = Loader(engine.groups, engine.device)
        forward_backward = select_forward_backward(engine, engine.plan.actions)
        self.shortage = RowShortage.of(engine)
        self.passes = partial(run_passes, engine, forward_backward)
        self.eager: TakeStep = partial(self._take, self.passes)
        self.graphs: PartialGraphs | None = None
        self.captured = self._captured()
        self.with_all_rows = self.eager
        if self.shortage is not None:
            # A rerun has memory for all rows: full recomputation makes room for it.
            whole_layers = recompute_policy(with_full_recompute(self.run))
            again = select_forward_backward(engine, engine.plan.actions, policy=whole_layers)
            self.with_all_rows = partial(self._take, partial(run_passes, engine, again))

    def _captured(self) -> TakeStep:
        engine = self.engine
        recorder = self.engine.recorder
        if recorder is None:
            return self.eager
        if self.run.cuda_graph.optimizer:
            in_graph = partial(engine.optimizer.in_graph, updates=True)
            return FullIteration(self.eager, in_graph, recorder)
        if self.run.cuda_graph.impl is GraphImpl.full_iteration:
            passes = FullIteration(self.passes, engine.optimizer.in_graph, recorder)
            return partial(self._take, passes)
        self.graphs = build_partial_graphs(engine)
        forward_backward = select_forward_backward(engine, engine.plan.actions, self.graphs)
        return partial(self._take, partial(run_passes, engine, forward_backward))

    def _capture_anew(self) -> None:
        recorder = self.engine.recorder
        if recorder is not None:
            recorder.release()
            self.captured = self._captured()

    def __call__(
        self,
        batches: Sequence[Batch],
        lr: float,
        weight_decay: float,
        following: Callable[[], Sequence[Batch]] | None = None,
    ) -> tuple[StepFacts, StepTotals]:
        """Train on a step's microbatches; while the device computes, load the `following` ones."""
        # 1. Inputs: microbatches, loss weights, learning rate; all on the device.
        loss_scale = self.engine.loss_scale
        scale = None if loss_scale is None else loss_scale.value
        step = step_input(
            self.loader.take(batches),
            self.run.loss.normalize,
            self.run.dp,
            groups=self.engine.groups,
            scale=scale,
        )
        # noted for the watchdog here, since a replayed graph notes no actions
        self.engine.watchdog.step("forwards and backwards of a step")
        captures = self.taken >= self.run.cuda_graph.warmup_steps and self.engine.capturable
        if captures and self.graphs is not None:
            self.graphs.before_step(step.batches[0])
        given = UpdateInput(
            step,
            update_rates(lr, weight_decay, self.engine.device),
            self._wanted() if captures and self.run.cuda_graph.optimizer else None,
        )
        # 2. Passes and update. On a GPU this only launches work.
        if self.shortage is not None:
            self.shortage.begin()
        totals, sums = (self.captured if captures else self.eager)(given)
        self.taken += 1
        # 3. Load the next batches while the device works.
        if following is not None:
            self.engine.watchdog.rest("reading the next batches")
            # Suppress read errors here. `next_step` raises them after report and save.
            with suppress(Exception):
                self.loader.start(following())
            self.engine.watchdog.note("the end of the step")
        # 4. The one wait of the host.
        facts = sums.read()
        # 5. Rerun the step if experts lacked memory; its update was skipped on the device.
        if self.shortage is not None:
            lacked = facts.missing > 0
            if lacked:
                with self.shortage.again():
                    totals, sums = self.with_all_rows(given)
                facts = sums.read()
            facts = replace(facts, reruns=int(lacked))
            if self.shortage.grows(lacked):
                self._capture_anew()
        self.engine.watchdog.rest("between steps")
        for state in self.engine.states:
            state.stepped(bool(facts.skipped))
        if loss_scale is None:
            return facts, totals
        used = loss_scale.scale  # the gradients of this step were computed with it
        loss_scale.update(bool(facts.skipped))
        return replace(facts, norm_sq=facts.norm_sq / used**2, scale=used), totals

    def _take(self, run_all: Callable[[StepInput], Passes], given: UpdateInput) -> StepOutcome:
        """Run all passes and the update; return totals, and the numbers for the host.

        All values that differ between steps are read on the device, so that a graph can hold this.
        The update is skipped on the device if the norm is not finite.
        """
        passes = run_all(given.step)
        totals = passes.totals
        states = self.engine.states
        sums = StepSums.of(
            {
                "norm_sq": passes.norm_sq,
                "loss": totals.loss,
                "aux_loss": totals.aux_loss,
                "z_loss": totals.z_loss,
                "missing": 0.0 if self.shortage is None else self.shortage.lacks(),
                "stop": self._wanted() if given.stop is None else given.stop,
                **{name: each for state in states for name, each in state.sums().items()},
            },
            passes.norm_sq,
        )
        all_reduce(sums.values_N, self.engine.groups.world)
        norm = sums["norm_sq"].sqrt()  # global, over all ranks; the optimizer clips by it
        if self.shortage is not None:  # an infinite norm skips the update: some rows were missing
            norm = norm.masked_fill(sums["missing"] > 0, math.inf)
        skipped = self.engine.optimizer.step(given.rates_2, norm, given.step.scale)
        self._balance(totals, skipped)
        for state in states:
            state.finish_step(skipped)
        return totals, sums.with_value("skipped", skipped)

    def _wanted(self) -> Tensor:
        """Return 1.0 on the device if this process has been asked to stop, else 0.0."""
        return torch.full((), float(self.request.wanted), device=self.engine.device)

    def _balance(self, totals: StepTotals, skipped: Tensor) -> None:
        """Update router biases against the step's expert load, unless the step was skipped."""
        moe = self.run.model.moe
        if moe is None or not moe.bias_update_rate:
            return
        for key, router in self.engine.routers():
            counts_E = totals.counts[key].clone()  # reports use the rank's own counts later
            all_reduce(counts_E, self.engine.groups.tp_cp_dp_control)
            moved_E = update_bias(router.bias_E, counts_E, moe.bias_update_rate)
            router.bias_E.copy_(torch.where(skipped > 0, router.bias_E, moved_E))


class Validation:
    """Validation: mean token loss over fixed microbatches, forward only.

    With full-iteration graphs it is captured by the first validation after the training step was,
    but never by the first of this process: that one runs eagerly to compile kernels without a
    backward, and to set up collectives of other sizes.
    """

    def __init__(self, engine: Engine, num_microbatches: int) -> None:
        self.run = engine.plan.run
        self.engine = engine
        self.taken = 0  # validations of this process
        actions = engine.plan.validation_actions(num_microbatches)
        forwards = select_forward_backward(engine, actions)
        self.eager = partial(run_forwards, engine, forwards)
        self.loader = Loader(engine.groups, engine.device)
        self.captured: ForwardBackward = self.eager
        self.shortage = RowShortage.of(engine)
        if self.run.cuda_graph.impl is GraphImpl.full_iteration and engine.recorder is not None:
            self.captured = FullIteration(self.eager, engine.optimizer.in_graph, engine.recorder)

    def __call__(self, batches: Sequence[Batch]) -> tuple[float, int]:
        """Return (nats per token, tokens) over the microbatches of all ranks."""
        loaded = self.loader.take(batches)
        step = step_input(loaded, Normalize.token, self.run.dp, groups=self.engine.groups)
        self.engine.watchdog.note("forwards of a validation")
        recorder = self.engine.recorder
        recorded = recorder is not None and recorder.recordings and self.taken
        captures = recorded and self.engine.capturable
        if self.shortage is not None:
            self.shortage.begin()
        loss, missing = self._sums(self.captured if captures else self.eager, step)
        self.taken += 1
        if self.shortage is not None and missing:
            with self.shortage.again():
                loss, _ = self._sums(self.eager, step)
        found = loss, int(step.valid)
        self.engine.watchdog.rest("between steps")
        return found

    def _sums(self, run: ForwardBackward, step: StepInput) -> tuple[float, float]:
        """Return, over all ranks, the loss and the number of ranks that lacked expert rows."""
        totals = run(step)
        missing = 0.0 if self.shortage is None else self.shortage.lacks()
        # ranks without the last stage have a float 0.0, which must be a tensor to be reduced
        sums_2 = torch.stack(
            [
                torch.as_tensor(each, dtype=torch.float32, device=self.engine.device)
                for each in (totals.loss, missing)
            ]
        )
        all_reduce(sums_2, self.engine.groups.world)
        loss, lacking = sums_2.tolist()
        return loss, lacking
