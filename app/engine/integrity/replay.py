"""Replay microbatches of a step, without an update or reductions over data-parallel ranks, and
trace their values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from app.choices import GraphImpl
from app.data.feed import Batch
from app.engine.capture.full_iteration import FullIteration
from app.engine.capture.partial import PartialGraphs
from app.engine.integrity.trace import TracedTransport, TracedValue, ValueKind, ValueTrace
from app.engine.step.engine import Engine, select_forward_backward
from app.engine.step.executor import ForwardBackward
from app.engine.step.records import StepInput
from app.engine.step.step import Loader, TrainingStep, step_input
from app.model.layers.weight_grads import WeightGrad
from app.optim.distributed import DistributedOptimizer
from app.plan.groups import DP_CP, EDP
from app.plan.partners import repeaters

T = TypeVar("T")
PARAMETERS = (DP_CP.name, EDP.name)  # groups that gather parameters: each rank sends its own


@dataclass(frozen=True, slots=True)
class OwnGrads:
    """Parameters whose gradients stay on the rank that computed them."""

    optimizer: DistributedOptimizer

    def start_gather(self, chunk: int) -> None:
        """See `Parameters`."""
        self.optimizer.start_gather(chunk)

    def add_grad(self, param: nn.Parameter, gradient: WeightGrad) -> None:
        """See `Parameters`."""
        self.optimizer.add_grad(param, gradient)

    def expect_grads(self, chunk: int, last: bool) -> None:
        """Expect none: complete gradients would be reduced."""

    def reduce_grads(self, chunk: int) -> None:
        """Reduce nothing."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """Values of a replay in order, and the sum over the bits of each."""

    values: tuple[TracedValue, ...]
    sums: tuple[int, ...]


@dataclass(slots=True)
class Replay:
    """Replays of a rank's microbatches, eager or captured as its training step is.

    With partial graphs, which belong to one list of actions, all microbatches of a step are
    replayed; otherwise the least number that the schedule takes.
    """

    step: TrainingStep
    trace: ValueTrace = field(default_factory=ValueTrace)
    bound: tuple[PartialGraphs | None, ForwardBackward] | None = None
    whole: FullIteration[StepInput, tuple[Tensor, ...]] | None = None

    @property
    def engine(self) -> Engine:
        """Engine that trains."""
        return self.step.engine

    def count(self) -> int:
        """Return how many microbatches are replayed."""
        if self.step.graphs is not None or self.engine.paging is not None:
            return self.engine.plan.run.num_microbatches
        return self.engine.plan.replay_actions()[0]

    def __call__(self, batches: Sequence[Batch], seed: int) -> Replayed:
        """Compute loss and gradients of microbatches; random numbers follow from `seed`."""
        engine, run = self.engine, self.engine.plan.run
        loaded = Loader(engine.groups, engine.device, engine.states).take(batches)
        scale = engine.loss_scale
        step = step_input(
            loaded,
            run.loss.normalize,
            run.dp,
            groups=engine.groups,
            scale=None if scale is None else scale.value,
        )
        captured = self._captured()
        graphs = self.step.graphs if captured else None
        if graphs is not None:
            graphs.before_step(step.batches[0])
        with _random(seed, engine.device):
            full = captured and run.cuda_graph.impl is GraphImpl.full_iteration
            sums = self._full(step) if full else self._run(step, graphs)
        sums_N = torch.stack(list(sums)).tolist()
        return Replayed(tuple(self.trace.values), tuple(sums_N))

    def _captured(self) -> bool:
        """True if the training step has been captured."""
        recorder = self.engine.recorder
        recorded = recorder is not None and bool(recorder.recordings)
        return recorded and self.step.taken > self.engine.plan.run.cuda_graph.warmup_steps

    def _full(self, step: StepInput) -> tuple[Tensor, ...]:
        recorder = self.engine.recorder
        assert recorder is not None, "captured"
        if self.whole is None:
            in_graph = self.engine.optimizer.in_graph
            self.whole = FullIteration(lambda step: self._run(step, None), in_graph, recorder)
        return self.whole(step)

    def _run(self, step: StepInput, graphs: PartialGraphs | None) -> tuple[Tensor, ...]:
        engine, trace = self.engine, self.trace
        groups = engine.groups.named().items()
        names = {str(each.group_name): name for name, each in groups if name not in PARAMETERS}
        engine.optimizer.begin()
        engine.optimizer.zero_grad()
        for state in engine.states:
            state.start_step()
        with trace.watching(names):
            totals = self._passes(graphs)(step)
            for state in engine.states:
                state.end_passes()
            if isinstance(totals.loss, Tensor):
                trace.add(ValueKind.computed, "the loss", [totals.loss])
        for buckets in engine.optimizer.all_grad_buckets():
            for name, grad in buckets.written():
                trace.add(ValueKind.computed, f"the gradient of {name}", [grad])
        return tuple(trace.sums)

    def _passes(self, graphs: PartialGraphs | None) -> ForwardBackward:
        if self.bound is None or self.bound[0] is not graphs:
            engine, plain = self.engine, self.engine.transport
            count, least = engine.plan.replay_actions()
            traced = TracedTransport(
                plain.group,
                plain.ranks,
                plain.batched,
                trace=self.trace,
                rank=engine.groups.rank,
            )
            passes = select_forward_backward(
                engine,
                least if self.count() == count else engine.plan.actions,
                graphs,
                params=OwnGrads(engine.optimizer),
                transport=traced,
            )
            self.bound = graphs, passes
        return self.bound[1]


@contextmanager
def _random(seed: int, device: torch.device) -> Iterator[None]:
    """Draw random numbers from `seed` within the block; restore the generators after it."""
    cuda = device.type == "cuda"
    before = torch.get_rng_state(), torch.cuda.get_rng_state(device) if cuda else None
    torch.manual_seed(seed)
    yield
    torch.set_rng_state(before[0])
    if before[1] is not None:
        torch.cuda.set_rng_state(before[1], device)


@dataclass(frozen=True, slots=True)
class Partners:
    """The rank whose microbatches this rank computes too, and the one that computes this rank's."""

    source: int
    repeater: int
    group: dist.ProcessGroup  # on the host

    @classmethod
    def of(cls, engine: Engine) -> Partners | None:
        """Return the partners of this rank; None if no other rank could get the same bits."""
        groups = engine.groups
        other = repeaters(engine.plan.run, groups.layout)
        if other is None:
            return None
        return cls(other[groups.rank], other.index(groups.rank), groups.host)

    def swap(self, value: T) -> T:
        """Return the source's value; the repeater gets this rank's."""
        sent = [value]
        got: list[T] = [value]
        first = dist.get_rank() < self.repeater
        # gloo's sends and receives wait for each other: go round each circle from its lowest rank
        for sends in (first, not first):
            if sends:
                dist.send_object_list(sent, dst=self.repeater, group=self.group)
            else:
                dist.recv_object_list(got, src=self.source, group=self.group)
        return got[0]
