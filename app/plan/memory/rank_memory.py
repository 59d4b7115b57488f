"""Peak memory of each pipeline rank's GPU, by part, in bytes (docs/planning.md).

Ranks that differ along other axes are alike, except for routed experts: the planned rank is
`model.moe.planned_imbalance` times busier than the mean. Only training is planned: a validation
saves nothing for a backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from app.choices import Fp8Recipe, GraphImpl
from app.config import CudaGraphConfig, ModelConfig, PrecisionConfig, Run
from app.plan.actions import Action, Forward
from app.plan.formatting import GIB, amount
from app.plan.graphs import GraphPlan
from app.plan.groups import GROUPS, Group, GroupKind
from app.plan.layout import ParallelLayout
from app.plan.memory.activations import ChunkActivations, chunk_activations
from app.plan.memory.graph_memory import MemoryPart, graph_objects, partial_graph_parts
from app.plan.memory.overheads import (
    BACKWARD_KERNELS,
    BUCKET_KERNELS,
    COMMUNICATOR,
    CUDA_CONTEXT,
    FRAGMENTATION,
    MIB,
    NCCL_ITSELF,
    UPDATE_KERNELS,
    library_workspaces,
    needs_cublas,
)
from app.plan.memory.peak import Peak, borders_of, find_peak
from app.plan.model.experts import ExpertWeights
from app.plan.model.fp8 import fp8_weights
from app.plan.parts.dispatch_record import Tokens
from app.plan.parts.dispatcher import run_dispatcher, tokens_per_rank, with_rows
from app.plan.parts.fp8 import SCALE, Copies
from app.plan.parts.paged_buffer import planned_paged_buffer, with_paged_buffer
from app.plan.parts.parts import BYTES
from app.plan.parts.stage import stage_parts
from app.plan.parts.static import HEADROOM, PlannedStatic
from app.plan.pipeline.moments import Walks
from app.plan.recompute import recompute_policy, with_full_recompute
from app.plan.sharding.blocks import ShardCoords
from app.plan.sharding.parameters import chunk_buffers, chunk_parameters
from app.plan.stages import Stage, StagePlan

# parts outside torch's allocator
OUTSIDE = frozenset({"exchange buffers", "graph objects", "fragmentation", "CUDA context", "NCCL"})
STATE = ("parameters", "gradients", "optimizer")  # parts that stay from step to step


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Peak memory of a pipeline rank's GPU, by part."""

    pp_rank: int
    parts: tuple[MemoryPart, ...]

    @property
    def total(self) -> int:
        """Bytes that the GPU must have."""
        return sum(part.bytes for part in self.parts)

    @property
    def kept(self) -> int:
        """Bytes that stay from step to step: parameters, gradients, optimizer state."""
        return sum(part.bytes for part in self.parts if part.name in STATE)

    @property
    def allocated(self) -> int:
        """Bytes of tensors at the peak, as `torch.cuda.max_memory_allocated` counts them."""
        return sum(part.bytes for part in self.parts if part.name not in OUTSIDE)


def plan_memory(
    run: Run,
    layout: ParallelLayout,
    stages: StagePlan,
    walks: Walks,
    graphs: Sequence[GraphPlan | None],
) -> tuple[RankMemory, ...]:
    """Return the peak memory of each pipeline rank.

    Rank r runs walks.actions[r] in a training step, with the partial graphs graphs[r].
    """
    planned = _Stages(run, layout)
    memory = []
    for rank, held in enumerate(stages.stages):
        parts = _parts(
            run,
            layout,
            planned,
            stages=held,
            walks=walks,
            graphs=graphs[rank],
            rank=rank,
        )
        memory.append(RankMemory(rank, tuple(parts)))
    return tuple(memory)


@dataclass(frozen=True, slots=True)
class StageState:
    """Elements of a stage on a rank, padding included."""

    dense: int  # sharded over dp and cp
    expert: int  # sharded over edp
    biases: int  # of routers, fp32, on every rank
    buckets: int  # buckets in which parameters are updated


def stage_state(run: Run, stage: Stage, layout: ParallelLayout) -> StageState:
    """Return the elements of a stage's buffers and of its routers' biases."""
    model = run.model
    buffers = chunk_buffers(chunk_parameters(model, stage, layout), layout, run.optim)
    both = (buffers.dense, buffers.expert)
    dense, expert = (buffer.numel if buffer else 0 for buffer in both)
    buckets = sum(len(buffer.buckets) for buffer in both if buffer)
    routers = sum(model.is_moe_layer(layer) for layer in stage.layers)
    biases = routers * model.moe.num_experts if model.moe else 0
    return StageState(dense, expert, biases, buckets=buckets)


def bytes_per_parameter(precision: PrecisionConfig) -> tuple[int, int, int]:
    """Return P, G, O: bytes of a parameter, its gradient, and its sharded optimizer state.

    With d ranks a parameter takes P + G + O/d bytes. O is two fp32 moments, and an fp32 main
    parameter if P < 4: 8+8/d for fp32 throughout, 6+12/d for bf16 with fp32 gradients, 4+12/d for
    bf16 throughout. Gradients below fp32 are widened only during the update.
    """
    params = BYTES[precision.params]
    grads = BYTES[precision.grads]
    return params, grads, 8 + (4 if params < 4 else 0)


@dataclass(frozen=True, slots=True)
class _Stages:
    """Cache of stages' plans; stages with equal layers share one."""

    run: Run
    layout: ParallelLayout
    known: dict[object, tuple[StageState, ChunkActivations]] = field(default_factory=dict)
    others: dict[Run, _Stages] = field(default_factory=dict)

    def of(self, run: Run) -> _Stages:
        """Return the cache for the same stages under another run."""
        if run not in self.others:
            self.others[run] = _Stages(run, self.layout)
        return self.others[run]

    def plan(self, stage: Stage) -> tuple[StageState, ChunkActivations]:
        key = tuple(stage_parts(self.run.model, stage, self.run.precision.fp8))
        if key not in self.known:
            state = stage_state(self.run, stage, self.layout)
            self.known[key] = state, chunk_activations(self.run, stage, self.layout)
        return self.known[key]


def _parts(
    run: Run,
    layout: ParallelLayout,
    planned: _Stages,
    stages: Sequence[Stage],
    walks: Walks,
    graphs: GraphPlan | None,
    rank: int,
) -> Iterator[MemoryPart]:
    found = [planned.plan(stage) for stage in stages]
    chunks = [activations for _, activations in found]
    actions = walks.actions[rank]
    peak = _peak(run, chunks, walks, rank=rank)
    states = [state for state, _ in found]
    update = UPDATE_KERNELS + BUCKET_KERNELS * sum(state.buckets for state in states)
    step = list(_step_parts(run, layout, chunks, actions=actions, peak=peak, update=update))
    tensors = [
        *_state_parts(run, layout, states),
        *_fp8_parts(run, layout, stages),
        *step,
        *_update_parts(run, layout, states, step=step),
    ]
    if graphs is not None:
        tensors += partial_graph_parts(graphs, chunks, peak)
    tensors += _dispatch_parts(
        run, layout, planned, stages=stages, walks=walks, rank=rank, alive=peak.total
    )
    of = ["cuBLAS, of the threads of forward and backward"] if needs_cublas(chunks) else []
    of += ["of FP8 GEMMs"] if run.precision.fp8.by_library else []
    size = library_workspaces(run, graphs, chunks)
    tensors.append(MemoryPart("library workspaces", size, ", and ".join(of)))
    yield from tensors
    allocated = sum(part.bytes for part in tensors if part.name not in OUTSIDE)
    yield MemoryPart(
        "fragmentation", int(FRAGMENTATION * allocated), f"{FRAGMENTATION:.0%} of what is allocated"
    )
    yield MemoryPart("CUDA context", CUDA_CONTEXT, "of the process")
    if layout.world_size > 1:
        groups = communicators(run.model, layout, rank)
        size = NCCL_ITSELF + sum(COMMUNICATOR[group.kind] for group in groups)
        yield MemoryPart("NCCL", size, _communicators_note(groups))


def _communicators_note(groups: Sequence[Group]) -> str:
    """Return the size of communicators and the names of their groups, in words."""
    found = []
    for kind in (GroupKind.data, GroupKind.stages):
        names = [group.name for group in groups if group.kind is kind]
        if names:
            each = " each" if len(names) > 1 else ""
            found.append(f"{COMMUNICATOR[kind] // MIB} MiB{each} for {', '.join(names)}")
    return "; ".join((*found, "small ones for control"))


def _peak(run: Run, chunks: Sequence[ChunkActivations], walks: Walks, rank: int) -> Peak:
    partial = recompute_policy(run).partial
    return find_peak(walks.moments(rank, partial, borders_of(chunks)), chunks)


def _state_parts(
    run: Run, layout: ParallelLayout, states: Sequence[StageState]
) -> Iterator[MemoryPart]:
    """Yield parameters, gradients and optimizer state."""
    params, grads, shard = bytes_per_parameter(run.precision)
    dense, expert, biases = (
        sum(getattr(state, name) for state in states) for name in ("dense", "expert", "biases")
    )
    shared_by = layout.dp * layout.cp
    experts = f", {amount(expert)} of them experts" if expert else ""
    count = amount(dense + expert) + experts
    yield MemoryPart(
        "parameters", params * (dense + expert) + 4 * biases, f"{params} bytes × {count}"
    )
    yield MemoryPart("gradients", grads * (dense + expert), f"{grads} bytes × as many")
    how = f"{params + grads + shard} → {params + grads}+{shard}/d, d = {shared_by}"
    owned = dense // shared_by + expert // layout.edp
    yield MemoryPart(
        "optimizer", shard * owned, how + (f", experts {layout.edp}" if expert else "")
    )


def fp8_shapes(run: Run, layout: ParallelLayout, stages: Sequence[Stage]) -> list[tuple[int, ...]]:
    """Return shapes of a rank's parts of the weights of these stages with FP8 GEMMs."""
    coords = ShardCoords.of(layout, 0)
    fp8 = run.precision.fp8
    return [
        coords.shape(named.weight)
        for stage in stages
        for named in fp8_weights(run.model, fp8, stage)
    ]


def _fp8_parts(run: Run, layout: ParallelLayout, stages: Sequence[Stage]) -> Iterator[MemoryPart]:
    """Yield FP8 copies of weights, beside the weights themselves."""
    fp8 = run.precision.fp8
    if fp8.recipe is None:
        return
    shapes = fp8_shapes(run, layout, stages)
    matrices = [shape for shape in shapes if len(shape) == 2]
    size = sum(Copies.of_weight(fp8.recipe, *shape).both for shape in matrices)
    size += sum(Copies.of_experts(*shape).both for shape in shapes if len(shape) == 3)
    count = amount(sum(map(prod, shapes)))
    yield MemoryPart("weights in FP8", size, f"two copies of {count}, one per direction")
    if fp8.recipe is Fp8Recipe.delayed:
        entries = 3 * len(matrices)
        how = f"of {entries:,} matrices, {fp8.amax_history:,} steps each"
        yield MemoryPart("largest entries", SCALE * entries * (fp8.amax_history + 5), how)


def _update_parts(
    run: Run, layout: ParallelLayout, states: Sequence[StageState], step: Sequence[MemoryPart]
) -> Iterator[MemoryPart]:
    """Yield what the update needs beyond forward and backward: its gradients in fp32."""
    if BYTES[run.precision.grads] == 4:
        return
    dense, expert = (sum(getattr(state, name) for state in states) for name in ("dense", "expert"))
    wide = 4 * (dense // (layout.dp * layout.cp) + expert // layout.edp)
    more = wide - sum(part.bytes for part in step)
    if more > 0:
        yield MemoryPart("update", more, "gradients in fp32, beyond what the activations have left")


def _step_parts(
    run: Run,
    layout: ParallelLayout,
    chunks: Sequence[ChunkActivations],
    actions: Sequence[Action],
    peak: Peak,
    update: int,
) -> Iterator[MemoryPart]:
    """Yield memory that lives within a step; partial graphs are counted elsewhere.

    `update`: kernels of an optimizer update.
    """
    count = run.num_microbatches
    each = batch_bytes(run, layout)
    inputs = f"{count} microbatches × {each / MIB:.2f} MiB"
    if run.cuda_graph.impl is GraphImpl.full_iteration:
        forwards = sum(
            chunks[action.chunk].kernels for action in actions if isinstance(action, Forward)
        )
        kernels = forwards * (1 + BACKWARD_KERNELS)
        yield graph_objects(1, kernels + (update if run.cuda_graph.optimizer else 0))
        yield MemoryPart("static inputs", count * each, inputs)
        yield MemoryPart("graph pool", peak.total, f"all of {peak.action}: {_by_phase(peak)}")
        return
    yield MemoryPart("inputs", count * each, inputs)
    kept = sum(peak.kept.values()) + peak.waiting
    yield MemoryPart("activations", kept, f"{peak.in_flight} in flight: {_by_phase(peak)}")
    yield MemoryPart("working memory", peak.working, f"while {peak.action} runs")
    if layout.pp > 1:
        yield MemoryPart(
            "pipeline buffers",
            peak.buffers,
            f"of {chunks[0].border / MIB:.1f} MiB each, hidden states or gradients",
        )


def _dispatch_parts(
    run: Run,
    layout: ParallelLayout,
    planned: _Stages,
    *,
    stages: Sequence[Stage],
    walks: Walks,
    rank: int,
    alive: int,
) -> Iterator[MemoryPart]:
    """Yield memory of a static dispatcher, and of rerunning a step that exceeded its capacity.

    A rerun has more capacity (docs/moe.md). `alive`: bytes at the peak of other steps.
    """
    dispatcher = run_dispatcher(run, layout)
    if not isinstance(dispatcher, PlannedStatic):
        return
    tokens = Tokens(tokens_per_rank(run), run.model.hidden_size, BYTES[run.precision.params])
    if held := dispatcher.held(tokens):
        yield MemoryPart("exchange buffers", held, "which ranks read and write in each other's GPU")
    expert = ExpertWeights.of(tokens.width, dispatcher.moe.ffn_hidden_size, 1).numel()
    if slots := dispatcher.held_by_slots(expert, tokens.size):
        spares = dispatcher.moe.echo.spares
        what = "weights and fp32 gradients" if dispatcher.peer else "fp32 gradients"
        yield MemoryPart("clones", slots, f"{spares} of hot experts: {what}")
    if paged_buffer := planned_paged_buffer(run, stages, walks.actions[rank]):
        times = f"{dispatcher.moe.static.paged_buffer:g} × the mean of rows that backward needs"
        yield MemoryPart(
            "paged_buffer",
            paged_buffer.bytes,
            f"{paged_buffer.pages:,} pages × {paged_buffer.page:,} bytes: {times}",
        )
    if not dispatcher.may_lack_rows(tokens.count):
        return
    # more than the capacity, or the step would not be rerun
    held_rows = dispatcher.rows(tokens.count).computed / dispatcher.mean_rows(tokens.count)
    needed_rows = max(dispatcher.busiest_load(tokens.count), HEADROOM * held_rows)
    more = with_rows(with_paged_buffer(with_full_recompute(run), None), needed_rows)
    again = replace(more, cuda_graph=CudaGraphConfig())
    chunks = [activations for _, activations in map(planned.of(again).plan, stages)]
    needed = _peak(again, chunks, walks, rank=rank).total
    beside = 0 if run.cuda_graph.impl is GraphImpl.full_iteration else alive
    if needed > beside:
        yield MemoryPart(
            "rerun steps", needed - beside, "eagerly, with more capacity for dispatched tokens"
        )


def _by_phase(peak: Peak) -> str:
    waiting = {"waiting for weights": peak.waiting} if peak.waiting else {}
    largest = sorted((dict(peak.kept) | waiting).items(), key=lambda item: -item[1])
    shown = [f"{phase} {size / GIB:.2f}" for phase, size in largest if size >= GIB // 200]
    return f"{', '.join(shown)} GiB" if shown else "next to nothing"


def batch_bytes(run: Run, layout: ParallelLayout) -> int:
    """Return bytes of tokens, labels, positions and document ids: whole sequences, int64."""
    tokens = run.train.micro_batch * run.train.seq_len
    return 8 * (3 * tokens // layout.cp + (tokens if run.data.document_mask else 0))


def communicators(model: ModelConfig, layout: ParallelLayout, pp_rank: int) -> list[Group]:
    """Return the NCCL groups of several ranks that a rank of this pipeline rank is in."""
    return [
        group
        for group in GROUPS.values()
        if group.kind is not GroupKind.host
        and group.used_by(model)
        and group.joins(layout, pp_rank)
    ]
