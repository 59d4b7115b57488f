"""Seconds of parts and stages, operation by operation, from a measured profile."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log, sqrt
from statistics import NormalDist

from app.choices import GraphImpl
from app.config import HardwareProfile, Run
from app.plan.cost.part_times import (
    ARITHMETIC,
    ATTENTION,
    EXCHANGE,
    LAUNCHES,
    MATMULS,
    OFFLOADED,
    QUANTISED,
    RECOMPUTED,
    RECOMPUTED_MATMULS,
    PartTimes,
    Seconds,
    once_each,
)
from app.plan.cost.power import at_clocks
from app.plan.cost.rates import (
    CAPPED_LOGITS,
    GIGA,
    MICRO,
    PLAIN_LOGITS,
    SCALED_LOGITS,
    Kernels,
    Links,
)
from app.plan.dependencies import Pipeline
from app.plan.layout import ParallelLayout
from app.plan.memory.overheads import BACKWARD_KERNELS
from app.plan.parts.dispatcher import busiest_load, run_dispatcher
from app.plan.parts.known import KnownParts
from app.plan.parts.stage import fold_stages, sizes_of
from app.plan.parts.trace import ONCE, Operation, Work, offloaded
from app.plan.phases import PhaseName
from app.plan.recompute import NOTHING, RecomputeChoice, recompute_policy
from app.plan.select import captured_phases
from app.plan.stages import Stage

# Standard deviation of experts' loads over their mean, of routers at the start of training: with
# 128 experts on two ranks the busier one had 1.07 times the mean (docs/moe.md).
SPREAD = 1.0
CLONED_LOAD = 1.03  # load of the busiest rank with clones of hot experts (docs/moe.md)
# seconds of attention to documents as long as web pages: per token as many keys as their lengths'
# mean square over their mean, at the speed of short sequences, and a share of the sequence for the
# blocks that have none (bench/LOG.md)
SHORT_DOCUMENTS, EMPTY_BLOCKS = 2.27, 0.1
DOCUMENT_MEDIAN, DOCUMENT_SPREAD = 400, 1.18  # tokens; deviation of the logarithm
# forward phases whose launches the GPU waits for after a host sync
BEHIND_WAIT = (PhaseName.preprocess, PhaseName.dispatch)


def expected_load(run: Run) -> float:
    """Return the busiest expert-parallel rank's load over the mean, as assumed for times.

    It is the largest of the ranks' sums of experts' loads that spread by SPREAD, and at most what
    memory is planned for (`busiest_load`).
    """
    dispatcher = run_dispatcher(run)
    if dispatcher is None:
        return 1.0
    moe = dispatcher.moe
    most = busiest_load(run)
    if dispatcher.ep == 1 or moe.force_balance or moe.pad_to_capacity:
        return min(1.0, most) if not moe.pad_to_capacity else most
    spread = SPREAD * sqrt((1 - 1 / dispatcher.ep) * dispatcher.ep / moe.num_experts)
    # approximate maximum of that many normal values
    largest = sqrt(2 * log(dispatcher.ep)) * (0.48 if dispatcher.ep == 2 else 0.68)
    load = min(most, 1 + largest * spread)
    return min(load, CLONED_LOAD) if moe.echo.spares else load


def stage_times(
    run: Run,
    stages: Sequence[Stage],
    layout: ParallelLayout,
    profile: HardwareProfile,
    *,
    pipeline: Pipeline | None = None,
    load: float | None = None,
    clock: float | None = None,
    known: KnownParts | None = None,
) -> list[PartTimes]:
    """Return the times of one rank of each stage for one microbatch.

    `pipeline`: the placement of stages on ranks; None means that each GPU sustains its full clock.
    `load`: rows of this rank's experts over the mean; None means `expected_load`. `clock`: share
    of its highest clock at which every GPU runs; None means what the power limit allows. `known`:
    operations and times shared with plans of other runs.
    """
    timer = _Clock.of(run, layout, profile)
    s = sizes_of(run, layout, load=expected_load(run) if load is None else load, known=known)
    count = run.num_microbatches, run.writes_expert_grads
    name = "times", run.cuda_graph, run.hardware, profile, *count
    rows = fold_stages(s, stages, timer.part, name)
    # equal stages share one value from here on
    found = once_each(rows, PartTimes.together)
    if clock is not None:
        found = once_each(found, lambda stage: stage.at_clock(clock))
    elif pipeline is not None:
        found = at_clocks(found, pipeline, profile)
    return once_each(found, PartTimes.hosted)


def documents_share(length: int) -> float:
    """Return the time of attention to documents over that to one document of `length` tokens.

    Lengths of web pages are taken to be log-normal; longer ones are cut.
    """
    normal, spread = NormalDist(), DOCUMENT_SPREAD
    longer = log(length / DOCUMENT_MEDIAN) / spread
    square = DOCUMENT_MEDIAN**2 * exp(2 * spread**2) * normal.cdf(longer - 2 * spread)
    square += length**2 * (1 - normal.cdf(longer))
    keys = square / (DOCUMENT_MEDIAN * exp(spread**2 / 2))
    return min(1.0, SHORT_DOCUMENTS * keys / length + EMPTY_BLOCKS)


@dataclass(frozen=True, slots=True)
class _Clock:
    """Times of operations."""

    run: Run
    kernels: Kernels
    links: Links
    captured: frozenset[str]  # phases
    whole: bool  # the full iteration is captured
    waits: bool  # the host waits for sizes in every MoE layer
    recompute: RecomputeChoice = NOTHING

    @classmethod
    def of(cls, run: Run, layout: ParallelLayout, profile: HardwareProfile) -> _Clock:
        dispatcher = run_dispatcher(run, layout)
        return cls(
            run,
            Kernels(profile),
            Links.of(run, layout, profile),
            captured=captured_phases(run.cuda_graph),
            whole=run.cuda_graph.impl is GraphImpl.full_iteration,
            waits=dispatcher is not None and dispatcher.waits_for_host,
            recompute=recompute_policy(run).usual,
        )

    def part(self, ops: Sequence[Operation]) -> PartTimes:
        """Sum up the operations of a part."""
        forward: Seconds = defaultdict(float)
        inputs: Seconds = defaultdict(float)
        weights: Seconds = defaultdict(float)
        for op in ops:
            self._forward(op, forward)
            if op.rerun:
                again: Seconds = defaultdict(float)
                self._forward(op, again)
                for kind, seconds in again.items():
                    inputs[RECOMPUTED_MATMULS if kind in ARITHMETIC else RECOMPUTED] += seconds
            if op.reached:
                self._backward(op, inputs, weights)
        if away := sum(offloaded(ops, self.recompute).values()):
            copied = away / (self.kernels.profile.host_gb_s * GIGA)
            back = sum(inputs.values()) + sum(weights.values())
            forward[OFFLOADED] += max(0.0, copied - sum(forward.values()))
            inputs[OFFLOADED] += max(0.0, copied - back)
        launched = self._launched(ops)
        forward[LAUNCHES] += self._waited(ops)
        again_launched = self._launched([op for op in ops if op.rerun])
        back = BACKWARD_KERNELS * self._launched([op for op in ops if op.reached]) + again_launched
        return PartTimes(
            forward,
            inputs,
            weights,
            forward_host=launched,
            backward_host=back,
            operations=sum(map(self._operations, ops)),
        )

    def _operations(self, op: Operation) -> float:
        """Return FLOPs of all passes, weighed by the energy that they take."""
        again = op.flops if op.rerun else op.flops_recomputed
        passes = (1 + op.reached) * op.flops + again
        # attention has as many FLOPs again in backward
        second = op.reached and (op.trained or not op.weight)
        gradient = op.flops / self.kernels.speedup(op, gradient=True) if second else 0.0
        return passes / self.kernels.speedup(op) + gradient

    def _launched(self, ops: Sequence[Operation]) -> float:
        """Return host seconds of a forward's launches outside of graphs, quantization included."""
        if self.whole:
            return 0.0
        outside = [op for op in ops if op.phase not in self.captured]
        quantising = sum(op.fp8.host_launches for op in outside if op.fp8)
        launches = quantising + sum(op.kernels for op in outside)
        return launches * self.kernels.profile.launch_us * MICRO

    def _waited(self, ops: Sequence[Operation]) -> float:
        """Return seconds in which the GPU idles after a host sync."""
        if not self.waits:
            return 0.0
        return self._launched([op for op in ops if op.phase in BEHIND_WAIT])

    def _forward(self, op: Operation, into: Seconds) -> None:
        kernels = self.kernels
        kind = op.work.value
        own = kernels.started(op.kernels)
        if op.work in MATMULS:
            own += kernels.gemm(op)
            if op.fp8 is not None:
                into[QUANTISED] += kernels.quantised(op.fp8.inputs, op.fp8.recipe)
        elif op.work in ATTENTION:
            own += self._attention(op)[0]
        else:
            own += kernels.moved(self._touched(op), op.work)
        into[kind] += own
        if op.sends:
            sent = self._sent(op, op.sends.forward)
            by_peers = self.links.by_peers(op.sends.group)
            into[EXCHANGE] += max(0.0, sent - own) if by_peers else sent

    def _backward(self, op: Operation, inputs: Seconds, weights: Seconds) -> None:
        kernels = self.kernels
        kind = op.work.value
        own = 0.0
        if op.work in MATMULS:
            own = kernels.gemm(op) + kernels.started(op.kernels)
            if op.trained:
                weights[kind] += kernels.gemm(op, gradient=True)
                weights[kind] += kernels.sums(op) * self._summed(op)
                weights[kind] += kernels.started(1)
            eight = op.fp8
            if eight is not None:
                inputs[QUANTISED] += kernels.quantised(eight.grads, eight.recipe)
            if op.flops_recomputed:
                inputs[RECOMPUTED_MATMULS] += kernels.gemm(op)
                if eight is not None:
                    inputs[RECOMPUTED] += kernels.quantised(eight.inputs, eight.recipe)
        elif op.work in ATTENTION:
            own = self._attention(op)[1] + kernels.started(2)
        elif op.reads and (op.work is Work.loss or not op.passes or op.moves != ONCE):
            own = kernels.moved(self._touched_back(op), op.work, backward=True)
            own += kernels.started(op.kernels)
        elif op.weight and op.trained:
            weights[kind] += kernels.moved(3 * op.weight, op.work) + kernels.sums(op)
        inputs[kind] += own
        if op.sends:
            sent = self._sent(op, op.sends.backward)
            # a collective overlaps with the other GEMM of backward
            beside = own if op.work in MATMULS or self.links.by_peers(op.sends.group) else 0.0
            inputs[EXCHANGE] += max(0.0, sent - beside)

    def _attention(self, op: Operation) -> tuple[float, float]:
        run = self.run
        length = run.train.seq_len
        if op.window is not None:
            # queries see as many keys as those of a sequence so long without a window, on the mean
            length = min(length, 2 * op.window)
        forward, backward = self.kernels.attention(op, run.model.head_width, length)
        share = documents_share(length) if run.data.document_mask else 1.0
        return share * forward, share * backward

    def _summed(self, op: Operation) -> float:
        """Return reads and writes of the main gradient per microbatch, relative to one
        accumulation.

        The first gradient of experts in a step is only written.
        """
        if op.work is not Work.grouped:
            return 1.0
        count = self.run.num_microbatches
        return (count - 0.5) / count if self.run.writes_expert_grads else 1.0

    def _sent(self, op: Operation, size: int) -> float:
        assert op.sends is not None
        return self.links.seconds(op.sends.group, op.sends.way, size)

    @property
    def _logit_passes(self) -> tuple[int, int]:
        """Return how often forward and backward of the loss pass over the logits."""
        if self.run.model.logit_softcap is not None:
            return CAPPED_LOGITS
        return PLAIN_LOGITS if self.run.model.logit_scale is None else SCALED_LOGITS

    def _touched(self, op: Operation) -> float:
        """Return bytes that a forward reads and writes; sends are timed apart."""
        if op.work is Work.loss:
            return self._logit_passes[0] * op.reads
        if op.moves == ONCE and (op.kernels == 0 or (op.sends and op.work is not Work.rows)):
            return 0.0
        return op.moves[0] * op.used * (op.reads + op.makes)

    def _touched_back(self, op: Operation) -> float:
        """Return bytes that a backward reads and writes."""
        if op.work is Work.loss:
            return self._logit_passes[1] * op.reads
        if op.sends and op.work is not Work.rows and op.moves == ONCE:
            return 0.0
        return op.moves[1] * op.used * (op.reads + op.makes + max(op.saves, op.restores))
