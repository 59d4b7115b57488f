"""Bytes that one rank sends in a step along each parallel axis, independent of placement.

They are those of the pipeline rank that sends most. With n ranks, a ring's all-gather or
reduce-scatter of B bytes makes each of them send B·(n − 1)/n, an all-reduce twice that; of an
all-to-all's B bytes per rank, B·(n − 1)/n leave it. Recomputation repeats the sends of the
recomputed forward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from app.config import Run
from app.plan.dependencies import Pipeline
from app.plan.groups import CP, DP_CP, EDP, EMBEDDING, ETP_EP, PP, TP, Group, Way
from app.plan.layout import ParallelLayout
from app.plan.model.vocabulary import table
from app.plan.parts.dispatcher import run_dispatcher
from app.plan.parts.stage import fold_stages, sizes_of
from app.plan.parts.trace import BYTES, Operation
from app.plan.sharding.frozen import frozen_in, run_weights, trained_matrices
from app.plan.sharding.optimizers import PLANNED
from app.plan.sharding.parameters import ChunkBuffers, chunk_buffers, chunk_parameters
from app.plan.shards import BufferLayout
from app.plan.stages import Stage, StagePlan

Kind = tuple[Group, Way]


@dataclass(frozen=True, slots=True)
class Volume:
    """Bytes that one rank sends in a step within its groups of one purpose."""

    group: Group
    collectives: str  # in words
    way: Way
    bytes: int
    exposed: bool = True  # compute waits for it


def step_volumes(run: Run, layout: ParallelLayout, stages: StagePlan) -> Iterator[Volume]:
    """Yield the volume of every kind of group with more than one rank and something to send."""
    step = _Step(
        run,
        layout,
        stages,
        sent=_sent(run, layout, stages),
        buffers=_buffers(run, layout, stages),
    )
    gradients = "reduce-scatter of gradients, all-gather of parameters"
    volumes = (
        Volume(
            TP,
            "all-gather and reduce-scatter of hidden states",
            Way.ring,
            bytes=step.busiest(step.tensor),
        ),
        Volume(
            CP,
            "all-gather of keys and values, reduce-scatter of their gradients",
            Way.ring,
            bytes=step.traced(CP, Way.ring),
        ),
        Volume(
            CP,
            "all-to-all of queries, keys, values and results",
            Way.all_to_all,
            bytes=step.traced(CP, Way.all_to_all),
        ),
        *_token_exchange(step),
        Volume(
            PP,
            "send of hidden states and their gradients",
            Way.neighbours,
            bytes=step.pipeline(),
            exposed=False,
        ),
        Volume(
            EMBEDDING,
            "all-reduce of the tied embedding's gradient",
            Way.ring,
            bytes=step.embedding(),
        ),
        Volume(
            DP_CP, gradients, Way.ring, bytes=step.busiest(step.dense_parameters), exposed=False
        ),
        Volume(EDP, gradients, Way.ring, bytes=step.busiest(step.expert_parameters), exposed=False),
        *_matrices(step),
    )
    return (volume for volume in volumes if volume.bytes)


def _token_exchange(step: _Step) -> Iterator[Volume]:
    """Yield the volume of the run's dispatcher, if that has an exchange."""
    dispatcher = run_dispatcher(step.run)
    if dispatcher is not None and dispatcher.exchange is not None:
        way = dispatcher.exchange.way
        yield Volume(ETP_EP, dispatcher.moves, way, bytes=step.traced(ETP_EP, way))


def _matrices(step: _Step) -> Iterator[Volume]:
    """Yield the volumes of an optimizer that updates whole matrices."""
    work = PLANNED[step.run.optim.name].work
    sent = Counter[Group]()
    for chunks in step.stages.stages:
        of_rank = work(step.run, step.layout, trained_matrices(step.run, chunks)).sent
        sent |= Counter(of_rank)
    for group, size in sent.items():
        yield Volume(group, "all-to-all of matrices and their updates", Way.all_to_all, bytes=size)


@dataclass(frozen=True, slots=True)
class _Step:
    run: Run
    layout: ParallelLayout
    stages: StagePlan
    sent: Mapping[Stage, Counter[Kind]]  # bytes that its operations send for a microbatch
    buffers: Mapping[Stage, ChunkBuffers]

    def busiest(self, of: Callable[[Stage], int]) -> int:
        """Return the most that any pipeline rank has over its stages."""
        return max(sum(map(of, chunks)) for chunks in self.stages.stages)

    @property
    def hidden(self) -> int:
        """Bytes of the hidden states of a step on one rank, divided over cp and tp."""
        return self.run.num_microbatches * sizes_of(self.run, self.layout).stream

    def tensor(self, stage: Stage) -> int:
        """Return bytes over tp: hidden states, and gradients of weights that are whole on each
        rank.
        """
        tp = self.layout.tp
        if tp == 1:
            return 0
        frozen = frozen_in(self.run)
        weights = (each.weight for each in run_weights(self.run, stage) if each.name not in frozen)
        shared = (each for each in weights if each.replicated and not each.expert)
        elements = sum(weight.numel for weight in shared)
        whole = elements * BYTES[self.run.precision.grads]
        return self._traced(stage, TP, Way.ring) + 2 * whole * (tp - 1) // tp

    def traced(self, group: Group, way: Way) -> int:
        """Return bytes that the model's operations send in a group, on the rank that sends most."""
        return self.busiest(lambda stage: self._traced(stage, group, way))

    def pipeline(self) -> int:
        """Return bytes of hidden states and their gradients to stages on other ranks."""
        return most_sends(self.stages.pipeline) * self.hidden

    def embedding(self) -> int:
        """Return bytes of a shard of tied embeddings' gradient; 0 if one rank holds both ends."""
        model = self.run.model
        first = self.stages.stages[0]
        tied = model.copies_embedding and "embedding" not in frozen_in(self.run)
        if not tied or any(stage.head for stage in first):
            return 0
        shards = self.layout.tp * self.layout.dp * self.layout.cp
        return table(model).numel // shards * BYTES[self.run.precision.grads]

    def dense_parameters(self, stage: Stage) -> int:
        """Return bytes of dense gradients reduced and parameters gathered over dp_cp."""
        return self._reduced_and_gathered(self.buffers[stage].dense)

    def expert_parameters(self, stage: Stage) -> int:
        """Return bytes of experts' gradients reduced and parameters gathered over edp."""
        return self._reduced_and_gathered(self.buffers[stage].expert)

    def _reduced_and_gathered(self, buffer: BufferLayout | None) -> int:
        if buffer is None:
            return 0
        element = BYTES[self.run.precision.grads] + BYTES[self.run.precision.params]
        return buffer.numel // buffer.world * (buffer.world - 1) * element

    def _traced(self, stage: Stage, group: Group, way: Way) -> int:
        return self.run.num_microbatches * self.sent[stage][group, way]


def _buffers(run: Run, layout: ParallelLayout, stages: StagePlan) -> dict[Stage, ChunkBuffers]:
    frozen = frozen_in(run)
    return {
        stage: chunk_buffers(
            chunk_parameters(run.model, stage, layout, frozen=frozen, lora=run.adapters),
            layout,
            run.optim,
        )
        for chunks in stages.stages
        for stage in chunks
    }


def _sent(run: Run, layout: ParallelLayout, stages: StagePlan) -> dict[Stage, Counter[Kind]]:
    """Return stage -> bytes that its operations send for a microbatch, forward and backward."""
    every = [stage for chunks in stages.stages for stage in chunks]
    rows = fold_stages(sizes_of(run, layout), every, _sent_by_operations)
    found: dict[Stage, Counter[Kind]] = {}
    for stage, row in zip(every, rows, strict=True):
        found[stage] = Counter()
        for sent, times in row:
            for kind, size in sent.items():
                found[stage][kind] += times * size
    return found


def _sent_by_operations(ops: Sequence[Operation]) -> Counter[Kind]:
    """Sum up the sends of a part; what backward reruns is sent again."""
    found: Counter[Kind] = Counter()
    for op in ops:
        if op.sends:
            size = (1 + op.rerun) * op.sends.forward + op.sends.backward
            found[op.sends.group, op.sends.way] += size
    return found


def most_sends(pipeline: Pipeline) -> int:
    """Return sends of the busiest pipeline rank per microbatch, forward and backward."""
    sent = [0] * pipeline.pp
    for stage in range(pipeline.last):
        ranks = pipeline.rank(stage), pipeline.rank(stage + 1)
        for rank in ranks if ranks[0] != ranks[1] else ():
            sent[rank] += 1
    return max(sent)
