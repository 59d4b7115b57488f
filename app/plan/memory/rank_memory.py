"""Peak memory of each pipeline rank's GPU, by part, in bytes (docs/planning.md).

Ranks that differ along other axes are alike, except for routed experts: the planned rank is
`model.moe.planned_imbalance` times busier than the mean. Only training is planned: a validation
saves nothing for a backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

from app.choices import GraphImpl, OptimizerKind
from app.config import ModelConfig, OptimConfig, PrecisionConfig, Run
from app.plan.actions import Action, Forward
from app.plan.formatting import GIB, amount
from app.plan.graphs import GraphPlan
from app.plan.groups import GROUPS, Group, GroupKind
from app.plan.layout import ParallelLayout
from app.plan.memory.activations import (
    ChunkActivations,
    Peak,
    host_peak,
    rank_moments,
)
from app.plan.memory.host_copies import state_bytes
from app.plan.memory.overheads import (
    BACKWARD_KERNELS,
    COMMUNICATOR,
    CUDA_CONTEXT,
    FP8_WORKSPACE,
    FRAGMENTATION,
    GRAPH,
    GRAPH_KERNEL,
    MIB,
    MOST,
    NCCL_ITSELF,
    WORKSPACES,
)
from app.plan.memory.shared import SharedMemory
from app.plan.model.experts import ExpertWeights
from app.plan.model.fp8 import fp8_weights
from app.plan.parts.dispatch_record import Tokens
from app.plan.parts.dispatcher import run_dispatcher, tokens_per_rank
from app.plan.parts.known import KnownParts
from app.plan.parts.paged_buffer import planned_paged_buffer
from app.plan.parts.static import PlannedStatic
from app.plan.parts.trace import BYTES
from app.plan.recompute import recompute_policy
from app.plan.sharding.blocks import ShardCoords
from app.plan.sharding.frozen import frozen_bytes, frozen_numel, trained_matrices
from app.plan.sharding.optimizers import PLANNED, moment_bytes
from app.plan.sharding.parameters import ChunkBuffers
from app.plan.stages import Stage, StagePlan

# parts outside torch's allocator
OUTSIDE = frozenset({"exchange buffers", "graph objects", "fragmentation", "CUDA context", "NCCL"})
STATE = ("parameters", "gradients", "optimizer")  # parts that stay from step to step
STAGED = "copy of optimizer"  # on a GPU, before the host has it (checkpoint.memory_every)
BORDERS = 4  # tensors at stage borders: one sent and one received in each direction


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """One line of a rank's memory."""

    name: str
    bytes: int
    note: str  # how it comes about, with its numbers


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Peak memory of a pipeline rank's GPU, by part."""

    pp_rank: int
    parts: tuple[MemoryPart, ...]
    offloaded: int = 0  # bytes of activations in host memory at most (`recompute.offload`)

    @property
    def total(self) -> int:
        """Bytes that the GPU must have."""
        return sum(part.bytes for part in self.parts)

    @property
    def kept(self) -> int:
        """Bytes that stay from step to step: parameters, gradients, optimizer state."""
        return sum(part.bytes for part in self.parts if part.name in STATE)

    @property
    def stages_copies(self) -> bool:
        """True if there is room for a copy of the optimizer's state on its way to the host."""
        return any(part.name == STAGED for part in self.parts)

    @property
    def allocated(self) -> int:
        """Bytes of tensors at the peak, as `torch.cuda.max_memory_allocated` counts them."""
        return sum(part.bytes for part in self.parts if part.name not in OUTSIDE)


def plan_memory(
    run: Run,
    layout: ParallelLayout,
    stages: StagePlan,
    *,
    buffers: Sequence[Sequence[ChunkBuffers]],
    actions: Sequence[Sequence[Action]],
    graphs: Iterable[GraphPlan | None],
    parts: KnownParts | None = None,
) -> Iterator[RankMemory]:
    """Yield the peak memory of one pipeline rank after the other.

    Rank r has parameters in buffers[r] and runs actions[r] in a training step, with the partial
    graphs graphs[r]. parts: operations shared with plans of other runs.
    """
    known = SharedMemory(layout, KnownParts() if parts is None else parts)
    for rank, (held, graph) in enumerate(zip(stages.stages, graphs, strict=True)):
        planned = _Rank(run, layout, held, buffers[rank], actions[rank], graph, rank, known)
        yield RankMemory(rank, tuple(planned.parts()), planned.offloaded())


@dataclass(frozen=True, slots=True)
class _Rank:
    """A pipeline rank whose memory is planned."""

    run: Run
    layout: ParallelLayout
    stages: Sequence[Stage]
    buffers: Sequence[ChunkBuffers]
    actions: Sequence[Action]
    graphs: GraphPlan | None
    rank: int
    known: SharedMemory

    def parts(self) -> Iterator[MemoryPart]:
        """Yield every part of the memory."""
        run, chunks = self.run, self.known.chunks(self.run, self.stages)
        peak = self.known.peak(run, self.actions, chunks)
        step = list(self._step(chunks, peak))
        tensors = [*self._state(), *step, *self._update(step)]
        tensors += self._dispatch(peak.total)
        size = WORKSPACES + (FP8_WORKSPACE if run.precision.fp8.by_library else 0)
        tensors.append(MemoryPart("library workspaces", size, "of GEMMs, forward and backward"))
        if run.checkpoint.memory_interval is not None:
            how = "parameters and moments, on their way to the host"
            copy = MemoryPart(STAGED, state_bytes(self.buffers, run.optim), how)
            needed = (*tensors, copy, *self._outside([*tensors, copy]))
            if sum(part.bytes for part in needed) <= MOST * run.hardware.memory:
                tensors.append(copy)
        yield from (*tensors, *self._outside(tensors))

    def _outside(self, tensors: Sequence[MemoryPart]) -> Iterator[MemoryPart]:
        """Yield memory outside torch's tensors."""
        allocated = sum(part.bytes for part in tensors if part.name not in OUTSIDE)
        how = f"{FRAGMENTATION:.0%} of what is allocated"
        yield MemoryPart("fragmentation", int(FRAGMENTATION * allocated), how)
        yield MemoryPart("CUDA context", CUDA_CONTEXT, "of the process")
        if self.layout.world_size > 1:
            groups = communicators(self.run.model, self.layout, self.rank)
            size = NCCL_ITSELF + sum(COMMUNICATOR[group.kind] for group in groups)
            yield MemoryPart("NCCL", size, _communicators_note(groups))

    def offloaded(self) -> int:
        """Return the most bytes of activations in host memory."""
        policy = recompute_policy(self.run)
        if not policy.usual.offload:
            return 0
        chunks = self.known.chunks(self.run, self.stages)
        spared = policy.on_rank(self.actions).spared
        return host_peak(rank_moments(self.actions, spared), chunks)

    def _numels(self) -> tuple[int, int, int]:
        """Return dense and expert elements, padding included, and those whose state it owns."""
        pairs = [
            [getattr(each, name) for each in self.buffers if getattr(each, name)]
            for name in ("dense", "expert")
        ]
        dense, expert = (sum(buffer.numel for buffer in kind) for kind in pairs)
        owned = sum(buffer.numel // buffer.world for kind in pairs for buffer in kind)
        return dense, expert, owned

    def _state(self) -> Iterator[MemoryPart]:
        """Yield parameters, gradients, optimizer state, and FP8 copies of weights."""
        params, grads, shard = bytes_per_parameter(self.run.precision, self.run.optim)
        layout, (dense, expert, owned) = self.layout, self._numels()
        experts = f", {amount(expert)} of them experts" if expert else ""
        count = amount(dense + expert) + experts
        frozen = frozen_numel(self.run, layout, self.stages)
        more = f", and {amount(frozen)} frozen ones" if frozen else ""
        held = frozen_bytes(self.run, layout, self.stages, params)
        if self.run.lora.base is not None:
            more += f", linear layers in {self.run.lora.base.value}"
        size = params * (dense + expert) + held
        yield MemoryPart("parameters", size, f"{params} bytes × {count}{more}")
        yield MemoryPart(
            "gradients",
            grads * (dense + expert),
            f"{grads} bytes × {count if frozen else 'as many'}",
        )
        how = f"{params + grads + shard} → {params + grads}+{shard}/d, d = {layout.dp * layout.cp}"
        how += f", experts {layout.edp}" if expert else ""
        own = state_bytes(self.buffers, self.run.optim, main_bytes(self.run.precision))
        if 0 < own < shard * owned:
            how += f"; {own / owned:.2f} with optim.name={self.run.optim.name.value}"
        yield MemoryPart("optimizer", own, how)
        recipe = self.run.precision.fp8.recipe
        if recipe is not None:
            elements = sum(map(prod, fp8_shapes(self.run, layout, self.stages)))
            how = f"two copies of {amount(elements)}, one per direction"
            yield MemoryPart("weights in FP8", 2 * elements, how)

    def _update(self, step: Sequence[MemoryPart]) -> Iterator[MemoryPart]:
        """Yield what the update needs beyond forward and backward: gradients in fp32, matrices."""
        working, optimizer = 0, PLANNED[self.run.optim.name]
        if optimizer.has_matrices:
            weights = trained_matrices(self.run, self.stages)
            working = optimizer.work(self.run, self.layout, weights).working
        what = "matrices while they are updated"
        widened = 4 * self._numels()[2]
        if BYTES[self.run.precision.grads] < 4 and widened > working:
            working, what = widened, "gradients in fp32"
        more = working - sum(part.bytes for part in step)
        if more > 0:
            yield MemoryPart("update", more, f"{what}, beyond what the activations have left")

    def _step(self, chunks: Sequence[ChunkActivations], peak: Peak) -> Iterator[MemoryPart]:
        """Yield memory that lives within a step.

        Partial graphs share the memory of the activations, and add static inputs.
        """
        run = self.run
        count, each = run.num_microbatches, batch_bytes(run, self.layout)
        inputs = f"{count} microbatches × {each / MIB:.2f} MiB"
        border = chunks[0].border
        buffers = BORDERS * border if self.layout.pp > 1 else 0
        if run.cuda_graph.impl is GraphImpl.full_iteration:
            forwards = self.known.parts.of_list(self.actions, _forwards)
            kernels = sum(chunks[chunk].kernels * times for chunk, times in forwards.items())
            yield _graph_objects(1, kernels)
            yield MemoryPart("static inputs", count * each, inputs)
            how = f"all of {peak.action}: {_by_phase(peak)}"
            yield MemoryPart("graph pool", peak.total + buffers, how)
            return
        yield MemoryPart("inputs", count * each, inputs)
        how = f"{peak.in_flight} in flight: {_by_phase(peak)}"
        yield MemoryPart("activations", sum(peak.kept.values()) + peak.waiting, how)
        yield MemoryPart("working memory", peak.working, f"while {peak.action} runs")
        if buffers:
            how = f"{BORDERS} of {border / MIB:.1f} MiB, hidden states and gradients"
            yield MemoryPart("pipeline buffers", buffers, how)
        if self.graphs is not None:
            sets = {(chunk, nth) for (_, chunk), nth in self.graphs.sets.items()}
            kernels = sum(chunks[chunk].captured for chunk, _ in sets)
            yield _graph_objects(self.graphs.num_graphs, kernels)
            statics = self.graphs.num_static_inputs
            how = f"{statics} × {border / MIB:.1f} MiB"
            yield MemoryPart("static inputs", statics * border, how)

    def _dispatch(self, alive: int) -> Iterator[MemoryPart]:
        """Yield memory of a static dispatcher, and of rerunning a step that exceeded its capacity.

        A rerun has more capacity (docs/moe.md). `alive`: bytes at the peak of other steps.
        """
        run, dispatcher = self.run, run_dispatcher(self.run, self.layout)
        if not isinstance(dispatcher, PlannedStatic):
            return
        tokens = Tokens(tokens_per_rank(run), run.model.hidden_size, BYTES[run.precision.params])
        if held := dispatcher.held(tokens):
            how = "which ranks read and write in each other's GPU"
            yield MemoryPart("exchange buffers", held, how)
        expert = ExpertWeights.of(tokens.width, dispatcher.moe.ffn_hidden_size, 1).numel()
        if slots := dispatcher.held_by_slots(expert, tokens.size):
            what = "weights and fp32 gradients" if dispatcher.peer else "fp32 gradients"
            how = f"{dispatcher.moe.echo.spares} of hot experts: {what}"
            yield MemoryPart("clones", slots, how)
        if paged_buffer := planned_paged_buffer(run, self.stages, self.actions):
            times = f"{dispatcher.moe.static.paged_buffer:g} × the mean of rows that backward needs"
            how = f"{paged_buffer.pages:,} pages × {paged_buffer.page:,} bytes: {times}"
            yield MemoryPart("paged_buffer", paged_buffer.bytes, how)
        if not dispatcher.may_lack_rows(tokens.count):
            return
        again = self.known.again(run, dispatcher, tokens.count)
        chunks = self.known.chunks(again, self.stages)
        needed = self.known.peak(again, self.actions, chunks).total
        needed -= 0 if run.cuda_graph.impl is GraphImpl.full_iteration else alive
        if needed > 0:
            how = "eagerly, with more capacity for dispatched tokens"
            yield MemoryPart("rerun steps", needed, how)


def _forwards(actions: Sequence[Action]) -> Counter[int]:
    """Count a rank's forwards by chunk."""
    return Counter(action.chunk for action in actions if isinstance(action, Forward))


def _graph_objects(graphs: int, forward_kernels: int) -> MemoryPart:
    """Return the driver's memory of instantiated graphs."""
    kernels = forward_kernels * (1 + BACKWARD_KERNELS)
    note = f"{graphs} × {GRAPH // 1024} KiB, {kernels:,} kernels × {GRAPH_KERNEL:,} bytes"
    return MemoryPart("graph objects", graphs * GRAPH + kernels * GRAPH_KERNEL, note)


def fp8_shapes(run: Run, layout: ParallelLayout, stages: Sequence[Stage]) -> list[tuple[int, ...]]:
    """Return shapes of a rank's parts of the weights of these stages with FP8 GEMMs."""
    coords = ShardCoords.of(layout, 0)
    fp8 = run.precision.fp8
    return [
        coords.shape(named.weight)
        for stage in stages
        for named in fp8_weights(run.model, fp8, stage)
    ]


def bytes_per_parameter(precision: PrecisionConfig, optim: OptimConfig) -> tuple[int, int, int]:
    """Return P, G, O: bytes of a parameter, its gradient, and AdamW's sharded state.

    With d ranks a parameter takes P + G + O/d bytes. O is two moments, and an fp32 main parameter
    if P < 4: with fp32 moments 8+8/d for fp32 throughout, 6+12/d for bf16 with fp32 gradients,
    4+12/d for bf16 throughout. Gradients below fp32 are widened only during the update.
    """
    params, grads = BYTES[precision.params], BYTES[precision.grads]
    return params, grads, main_bytes(precision) + moment_bytes(OptimizerKind.adamw, optim)


def main_bytes(precision: PrecisionConfig) -> int:
    """Return bytes of a main parameter beside the model's own."""
    return 4 if BYTES[precision.params] < 4 else 0


def _communicators_note(groups: Sequence[Group]) -> str:
    """Return the size of communicators and the names of their groups, in words."""
    found = []
    for kind in (GroupKind.data, GroupKind.stages):
        names = [group.name for group in groups if group.kind is kind]
        if names:
            each = " each" if len(names) > 1 else ""
            found.append(f"{COMMUNICATOR[kind] // MIB} MiB{each} for {', '.join(names)}")
    return "; ".join((*found, "small ones for control"))


def _by_phase(peak: Peak) -> str:
    waiting = {"waiting for weights": peak.waiting} if peak.waiting else {}
    largest = sorted((dict(peak.kept) | waiting).items(), key=lambda item: -item[1])
    shown = [f"{phase} {size / GIB:.2f}" for phase, size in largest if size >= GIB // 200]
    return f"{', '.join(shown)} GiB" if shown else "next to nothing"


def batch_bytes(run: Run, layout: ParallelLayout) -> int:
    """Return bytes of tokens, labels and positions, int64, and of ends of documents, int32."""
    tokens = run.train.micro_batch * run.train.seq_len
    documents = run.train.micro_batch * (run.data.most_documents(run.train.seq_len) or 0)
    return 8 * 3 * tokens // layout.cp + 4 * documents


def communicators(model: ModelConfig, layout: ParallelLayout, pp_rank: int) -> list[Group]:
    """Return the NCCL groups of several ranks that a rank of this pipeline rank is in."""
    return [
        group
        for group in GROUPS.values()
        if group.kind is not GroupKind.host
        and group.used_by(model)
        and group.joins(layout, pp_rank)
    ]
