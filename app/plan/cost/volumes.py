"""What one rank sends in a step along each parallel axis, wherever the ranks of its groups are.

Bytes of the pipeline rank that has most to send. With n ranks, a ring's all-gather or
reduce-scatter of B bytes makes each of them send B·(n − 1)/n, an all-reduce twice that; of an
all-to-all's B bytes per rank, B·(n − 1)/n leave it. Recomputation repeats what the recomputed
forward sends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from app.choices import CpComm, Dtype, Recompute
from app.config import ModelConfig, Run
from app.plan.dispatchers.choose import busiest_load, run_dispatcher
from app.plan.dispatchers.record import Tokens, Wire
from app.plan.groups import CP, DP_CP, EDP, EMBEDDING, ETP_EP, PP, TP, Group, Way
from app.plan.layout import ParallelLayout
from app.plan.pipeline.replay import Pipeline
from app.plan.sharding.parameters import ChunkBuffers, chunk_buffers, chunk_parameters
from app.plan.shards import BufferLayout
from app.plan.stages import Stage, StagePlan

# Passes of a ring over the hidden states, for matrices cut by columns and then by rows. Forward
# gathers the input and scatters the sum of the outputs; backward does the reverse of both, and
# gathers the input once more for the gradients of weights, since each rank has kept only its share
# of it.
BLOCK_FORWARD, BLOCK_BACKWARD = 2, 3
# scatters the sum of the rows that each rank has; backward gathers its gradient
EMBEDDING_PASSES = 2
HEAD_PASSES = 3  # gathers the input; backward scatters its gradient and gathers the input once more
# what attention exchanges over cp, and the gradients of it
ATTENTION_FORWARD, ATTENTION_BACKWARD = 1, 1


@dataclass(frozen=True, slots=True)
class Volume:
    """What one rank sends in a step within its groups of one purpose."""

    group: Group
    collectives: str  # what runs, in words
    way: Way
    bytes: int
    exposed: bool = True  # compute waits for it


def step_volumes(run: Run, layout: ParallelLayout, stages: StagePlan) -> Iterator[Volume]:
    """The volume of every kind of group that has more than one rank and something to send."""
    step = _Step(run, layout, stages)
    gradients = "reduce-scatter of gradients, all-gather of parameters"
    volumes = (
        Volume(
            TP,
            "all-gather and reduce-scatter of hidden states",
            Way.ring,
            bytes=step.busiest(step.tensor),
        ),
        Volume(CP, *step.attention_way, bytes=step.busiest(step.context)),
        *step.expert_exchange(),
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
    )
    return (volume for volume in volumes if volume.bytes)


@dataclass(frozen=True, slots=True)
class _Step:
    run: Run
    layout: ParallelLayout
    stages: StagePlan

    def busiest(self, of: Callable[[Stage], int]) -> int:
        """The most that any pipeline rank has over its stages."""
        return max(sum(map(of, chunks)) for chunks in self.stages.stages)

    @property
    def tokens(self) -> int:
        """Tokens of a step whose hidden states one rank holds, being cut by cp and by tp."""
        train = self.run.train
        return (
            self.run.num_microbatches
            * train.micro_batch
            * train.seq_len
            // (self.layout.tp * self.layout.cp)
        )

    @property
    def hidden(self) -> int:
        """Bytes of the hidden states of `tokens`."""
        return self.tokens * self.run.model.hidden_size * item_bytes(self.run.precision.params)

    @property
    def attention_way(self) -> tuple[str, Way]:
        """Collectives of context parallelism in words, and how their bytes travel."""
        if self.run.parallel.cp_comm_type is CpComm.all_gather:
            return "all-gather of keys and values, reduce-scatter of their gradients", Way.ring
        return "all-to-all of queries, keys, values and results", Way.all_to_all

    def expert_exchange(self) -> Iterator[Volume]:
        """What travels to experts on other ranks and back."""
        dispatcher = run_dispatcher(self.run)
        item = item_bytes(self.run.precision.params)
        tokens = Tokens(self.tokens, self.run.model.hidden_size, item)
        wire = dispatcher and dispatcher.wire(tokens, busiest_load(self.run))
        if wire:
            most = self.busiest(lambda stage: self.experts(stage, wire))
            yield Volume(ETP_EP, wire.collectives, wire.way, bytes=most)

    def tensor(self, stage: Stage) -> int:
        """Blocks cut over tensor-parallel ranks, and gradients of what each holds whole."""
        model = self.run.model
        others = self.layout.tp - 1
        experts = self._moe_layers(stage)
        shared = experts if model.moe and model.moe.shared_ffn_hidden_size else 0
        blocks = 2 * len(stage.layers) - experts
        passes = (BLOCK_FORWARD + BLOCK_BACKWARD) * (blocks + shared)
        passes += BLOCK_FORWARD * (
            blocks * self._again() + shared * self._again(Recompute.shared, Recompute.moe)
        )
        passes += EMBEDDING_PASSES * stage.embedding + HEAD_PASSES * stage.head
        whole = whole_elements(model, stage) * item_bytes(self.run.precision.grads)
        return passes * self.hidden * others + 2 * whole * others // self.layout.tp

    def context(self, stage: Stage) -> int:
        """Keys and values of all ranks, kept for backward, or whole sequences of a part of the
        heads and their results.
        """
        model = self.run.model
        cp = self.layout.cp
        head = self.tokens * model.head_width * item_bytes(self.run.precision.params)
        passes = (
            ATTENTION_FORWARD
            + ATTENTION_BACKWARD
            + ATTENTION_FORWARD * self._again(Recompute.attn_core)
        )
        if self.run.parallel.cp_comm_type is CpComm.all_gather:
            return len(stage.layers) * passes * 2 * model.num_kv_heads * head * (cp - 1)
        return (
            len(stage.layers)
            * passes
            * 2
            * (model.num_heads + model.num_kv_heads)
            * head
            * (cp - 1)
            // cp
        )

    def experts(self, stage: Stage, wire: Wire) -> int:
        """What the layers with experts exchange among the ranks that have these."""
        ranks = self.layout.ep * self.layout.expert_tp
        layer = (1 + self._again(Recompute.moe)) * wire.forward + wire.backward
        return self._moe_layers(stage) * layer * (ranks - 1) // ranks

    def pipeline(self) -> int:
        """Hidden states to the next stage, gradients to the one before, if on other ranks."""
        return most_sends(self.stages.pipeline) * self.hidden

    def embedding(self) -> int:
        """A shard of tied embeddings' gradient where both ends are on different ranks."""
        model = self.run.model
        first = self.stages.stages[0]
        if not model.tie_embeddings or any(stage.head for stage in first):
            return 0
        shards = self.layout.tp * self.layout.dp * self.layout.cp
        return model.vocab_size * model.hidden_size // shards * item_bytes(self.run.precision.grads)

    def dense_parameters(self, stage: Stage) -> int:
        """Bytes of gradients reduced and parameters gathered over dp_cp, without experts'."""
        return self._reduced_and_gathered(self._buffers(stage).dense)

    def expert_parameters(self, stage: Stage) -> int:
        """Bytes of experts' gradients reduced and parameters gathered over edp."""
        return self._reduced_and_gathered(self._buffers(stage).expert)

    def _buffers(self, stage: Stage) -> ChunkBuffers:
        return chunk_buffers(
            chunk_parameters(self.run.model, stage, self.layout), self.layout, self.run.optim
        )

    def _reduced_and_gathered(self, buffer: BufferLayout | None) -> int:
        if buffer is None:
            return 0
        element = item_bytes(self.run.precision.grads) + item_bytes(self.run.precision.params)
        return buffer.numel // buffer.world * (buffer.world - 1) * element

    def _moe_layers(self, stage: Stage) -> int:
        return sum(map(self.run.model.is_moe_layer, stage.layers))

    def _again(self, *phases: Recompute) -> bool:
        """Whether backward runs a forward again that any of these, or full recomputation, holds."""
        return self.run.recompute.full or not set(phases).isdisjoint(self.run.recompute.phases)


def most_sends(pipeline: Pipeline) -> int:
    """Hidden states and gradients of them that the busiest pipeline rank sends per microbatch."""
    sent = [0] * pipeline.pp
    for stage in range(pipeline.last):
        ranks = pipeline.rank(stage), pipeline.rank(stage + 1)
        for rank in ranks if ranks[0] != ranks[1] else ():
            sent[rank] += 1
    return max(sent)


def whole_elements(model: ModelConfig, stage: Stage) -> int:
    """Elements of a stage that all tp ranks hold whole but use on own tokens or heads only."""
    norms = 2 * model.hidden_size + (2 * model.head_width if model.qk_norm else 0)
    router = model.hidden_size * (model.moe.num_experts + model.moe.shared_gate) if model.moe else 0
    last_norm = model.hidden_size * stage.head
    return last_norm + sum(norms + router * model.is_moe_layer(layer) for layer in stage.layers)


def item_bytes(dtype: Dtype) -> int:
    """Bytes of an element: 4 for float32, otherwise 2."""
    return 4 if dtype is Dtype.float32 else 2
