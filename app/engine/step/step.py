"""Run one optimizer step of a rank, or one validation: microbatches in, metrics out.

Shapes: B sequences, S tokens per sequence, M microbatches, E experts of a layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor

from app.choices import GraphImpl, Normalize
from app.collectives import all_reduce
from app.data.feed import IGNORED, Batch
from app.engine.capture.full_iteration import FullIteration
from app.engine.capture.partial import PartialGraphs
from app.engine.capture.tree import flatten
from app.engine.files.signals import StopRequest
from app.engine.ranks.groups import Groups
from app.engine.step.engine import Engine, build_partial_graphs, select_forward_backward
from app.engine.step.executor import ForwardBackward
from app.engine.step.records import StepInput, StepReport, StepTotals
from app.engine.step.shortage import RowShortage
from app.engine.step.timer import StepTimer
from app.kernels.adamw import update_rates
from app.model.block import StepState
from app.model.layers.layer_groups import own_tokens
from app.moe.router import update_bias
from app.plan.recompute import recompute_policy, with_full_recompute

LoadedBatches = tuple[tuple[Batch, ...], Tensor]  # microbatches; tokens with a label, int64 [M]


class Loader:
    """Loader of this rank's part of microbatches; copies overlap with the GPU's computation."""

    def __init__(
        self, groups: Groups, device: torch.device, states: Sequence[StepState] = ()
    ) -> None:
        self.states = states  # whose inputs are loaded too
        self.cp, self.cp_rank = groups.layout.cp, groups.cp_rank
        self.device = device
        self.side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.ahead: tuple[Sequence[Batch], LoadedBatches, torch.cuda.Event | None] | None = None

    def start(self, batches: Sequence[Batch]) -> None:
        """Start to load the batches that `take` will get next."""
        if self.side is None:
            self.ahead = batches, self._load(batches), None
            return
        with torch.cuda.stream(self.side):
            loaded = self._load(batches)
            there = torch.cuda.Event()
            there.record()
        self.ahead = batches, loaded, there

    def take(self, batches: Sequence[Batch]) -> LoadedBatches:
        """Return the microbatches on the device, and how many tokens of each have a label."""
        if self.ahead is None or self.ahead[0] is not batches:
            self.start(batches)
        assert self.ahead is not None
        (_, loaded, there), self.ahead = self.ahead, None
        if there is not None:
            here = torch.cuda.current_stream()
            here.wait_event(there)
            # The tensors come from the side stream: the allocator must not reuse their memory
            # there while this stream still reads them.
            for tensor in flatten(loaded)[0]:
                tensor.record_stream(here)
        return loaded

    def _load(self, batches: Sequence[Batch]) -> LoadedBatches:
        seq_len = batches[0].tokens_BS.shape[1]
        own_S = own_tokens(seq_len, self.cp, self.cp_rank)
        # counted on the CPU over whole sequences, hence the same on all context-parallel ranks
        counts_M = torch.stack([(batch.labels_BS != IGNORED).sum() for batch in batches])
        return tuple(self._part(batch, own_S) for batch in batches), self._move(counts_M)

    def _part(self, batch: Batch, own_S: Tensor) -> Batch:
        ends, sources = batch.ends_BD, batch.sources_B
        whole = batch.tokens_BS, batch.labels_BS, batch.positions_BS
        extras = {name: x for state in self.states for name, x in state.inputs(*whole).items()}
        return Batch(
            tokens_BS=self._move(batch.tokens_BS[:, own_S]),
            labels_BS=self._move(batch.labels_BS[:, own_S]),
            positions_BS=self._move(batch.positions_BS[:, own_S]),
            ends_BD=None if ends is None else self._move(ends),
            sources_B=None if sources is None else self._move(sources),
            extras={name: self._move(x[..., own_S]) for name, x in extras.items()},
        )

    def _move(self, tensor: Tensor) -> Tensor:
        if self.side is None:
            return tensor
        # only copies from pinned memory are asynchronous to the host
        return tensor.pin_memory().to(self.device, non_blocking=True)


def step_input(
    loaded: LoadedBatches,
    normalize: Normalize,
    dp: int,
    groups: Groups,
    *,
    scale: Tensor | None = None,
    rates_2: Tensor | None = None,
    stop: Tensor | None = None,
) -> StepInput:
    """Return the input of a step: microbatches with the weights of their losses; the rest as given.

    `token` divides every microbatch's loss by the valid tokens of the global batch, so that all
    tokens weigh the same. `microbatch` divides it by its own valid tokens and by the number of
    microbatches. The divisor stays on the device.
    """
    batches, counts_M = loaded
    valid = counts_M.sum()
    all_reduce(valid, groups.dp_control)
    if normalize is Normalize.token:
        weights_M = valid.clamp(min=1).float().reciprocal().expand(len(batches))
    else:
        weights_M = (counts_M.clamp(min=1) * (len(batches) * dp)).float().reciprocal()
    return StepInput(
        batches,
        weights_M,
        1.0 / (len(batches) * dp),
        valid=valid,
        scale=scale,
        rates_2=rates_2,
        stop=stop,
    )


def run_passes(engine: Engine, forward_backward: ForwardBackward, step: StepInput) -> StepTotals:
    """Clear main gradients, run all passes, and compute the norm; one graph can hold all of it."""
    optimizer = engine.optimizer
    optimizer.begin()
    optimizer.zero_grad()
    for state in engine.states:
        state.start_step()
    totals = forward_backward(step)
    for state in engine.states:
        state.end_passes()
    optimizer.finish_grads()
    totals.norm_sq = optimizer.local_norm_sq()
    return totals


def run_forwards(engine: Engine, forwards: ForwardBackward, step: StepInput) -> StepTotals:
    """Run the forwards of a validation."""
    engine.optimizer.begin()
    return forwards(step)


class TrainingStep:
    """Training step: forwards, backwards, clipping and update by the schedule's action list.

    The host waits once, at the end. An all-to-all dispatcher adds a wait per MoE layer and
    microbatch; a rerun step (`RowShortage`) adds one. From step `cuda_graph.warmup_steps` + 1 of
    this process on, captured parts are recorded once and then replayed.
    """

    def __init__(self, engine: Engine, request: StopRequest | None = None) -> None:
        self.run = engine.plan.run
        self.dp = self.run.dp
        self.engine = engine
        self.request = request or StopRequest()
        self.stops = False  # True once a rank was asked to stop
        self.taken = 0  # steps of this process
        self.timer = StepTimer(engine.device)
        self.loader = Loader(engine.groups, engine.device, engine.states)
        forward_backward = select_forward_backward(engine, engine.plan.actions)
        self.shortage = RowShortage.of(engine)
        self.passes = partial(run_passes, engine, forward_backward)
        self.eager: ForwardBackward = partial(self._take, self.passes)
        self.graphs: PartialGraphs | None = None
        self.captured = self._captured()
        self.with_all_rows = self.eager
        if self.shortage is not None:
            # A rerun has memory for all rows: full recomputation makes room for it.
            whole_layers = recompute_policy(with_full_recompute(self.run))
            again = select_forward_backward(engine, engine.plan.actions, policy=whole_layers)
            self.with_all_rows = partial(self._take, partial(run_passes, engine, again))

    def _captured(self) -> ForwardBackward:
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
    ) -> tuple[StepReport, StepTotals]:
        """Train on a step's microbatches; while the device computes, load the `following` ones.

        The report has what the step has computed; times and rates are missing.
        """
        # 1. Input: microbatches, loss weights, learning rate; all on the device.
        engine, timer = self.engine, self.timer
        timer.begin()
        captures = self.taken >= self.run.cuda_graph.warmup_steps and engine.capturable
        loss_scale = engine.loss_scale
        step = step_input(
            self.loader.take(batches),
            self.run.loss.normalize,
            self.dp,
            groups=engine.groups,
            scale=None if loss_scale is None else loss_scale.value,
            rates_2=update_rates(lr, weight_decay, engine.device),
            stop=self._wanted() if captures and self.run.cuda_graph.optimizer else None,
        )
        # noted for the watchdog here, since a replayed graph notes no actions
        engine.watchdog.step("forwards and backwards of a step")
        if captures and self.graphs is not None:
            self.graphs.before_step(step.batches[0])
        # 2. Passes and update. On a GPU this only launches work.
        if self.shortage is not None:
            self.shortage.begin()
        totals = (self.captured if captures else self.eager)(step)
        self.taken += 1
        timer.launched()
        # 3. Load the next batches while the device works.
        if following is not None:
            engine.watchdog.rest("reading the next batches")
            # Suppress read errors here. `next_step` raises them after report and save.
            with suppress(Exception):
                self.loader.start(following())
            engine.watchdog.note("the end of the step")
        # 4. The one wait of the host.
        timer.has_read()
        numbers = totals.read()
        timer.finished()
        # 5. Rerun the step if experts lacked memory; its update was skipped on the device.
        lacked = numbers["missing"] > 0
        if self.shortage is not None:
            if lacked:
                with self.shortage.again():
                    totals = self.with_all_rows(step)
                numbers = totals.read()
            if self.shortage.grows(lacked):
                self._capture_anew()
        engine.watchdog.rest("between steps")
        # 6. The report.
        self.stops = bool(numbers["stop"])
        skipped = bool(numbers["skipped"])
        norm_sq, used = numbers["norm_sq"], None
        if loss_scale is not None:
            used = loss_scale.scale  # the gradients of this step were computed with it
            norm_sq /= used**2
            loss_scale.update(skipped)
        report = StepReport(
            loss=numbers["loss"],
            aux_loss=numbers["aux_loss"],
            z_loss=numbers["z_loss"],
            lr=lr,
            weight_decay=weight_decay,
            grad_norm=norm_sq**0.5,
            skipped=int(skipped),
            reruns=None if self.shortage is None else int(lacked),
            loss_scale=used,
            data_wait_ms=timer.data_wait_ms,
            launch_ms=timer.launch_ms,
            device_wait_ms=timer.device_wait_ms,
        )
        for state in engine.states:
            state.stepped(skipped)
            report.take(state.metrics(numbers))
        return report, totals

    def _take(self, run_all: ForwardBackward, step: StepInput) -> StepTotals:
        """Run all passes and the update; return this step's numbers, also those of all ranks.

        All values that differ between steps are read on the device, so that a graph can hold this.
        The update is skipped on the device if the norm is not finite.
        """
        totals = run_all(step)
        states = self.engine.states
        totals.sum_over(
            self.engine.groups.world,
            {
                "norm_sq": totals.norm_sq,
                "loss": totals.loss,
                "aux_loss": totals.aux_loss,
                "z_loss": totals.z_loss,
                "missing": 0.0 if self.shortage is None else self.shortage.lacks(),
                "stop": self._wanted() if step.stop is None else step.stop,
                **{name: each for state in states for name, each in state.sums().items()},
            },
            like=step.loss_weights_M,
        )
        norm = totals.over_ranks("norm_sq").sqrt()  # the optimizer clips by it
        if self.shortage is not None:  # an infinite norm skips the update: some rows were missing
            norm = norm.masked_fill(totals.over_ranks("missing") > 0, math.inf)
        assert step.rates_2 is not None, "a training step has them"
        skipped = self.engine.optimizer.step(step.rates_2, norm, step.scale)
        self._balance(totals, skipped)
        for state in states:
            state.finish_step(skipped)
        totals.append("skipped", skipped)
        return totals

    def _wanted(self) -> Tensor:
        """Return 1.0 on the device if this process has been asked to stop, else 0.0."""
        return torch.full((), float(self.request.wanted), device=self.engine.device)

    def _balance(self, totals: StepTotals, skipped: Tensor) -> None:
        """Update router biases against the step's expert load, unless the step was skipped."""
        moe = self.run.model.moe
        # an adapter's files have no biases: it is trained beside those of its base
        if moe is None or not moe.bias_update_rate or self.run.adapters:
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
        numbers = {"loss": totals.loss, "missing": missing}
        totals.sum_over(self.engine.groups.world, numbers, like=step.loss_weights_M)
        loss, lacking = totals.read().values()
        return loss, lacking
