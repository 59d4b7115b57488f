"""Build the objects that train from a frozen `Run`; the only module that knows every part.

Shapes: B sequences, s tokens per sequence of this rank, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from app.choices import AttentionBackendKind, GraphImpl
from app.config import ModelConfig, Run
from app.engine.capture.partial import PartialGraphs
from app.engine.capture.recorder import CudaRecorder, Recorder
from app.engine.capture.stand_in import HostRecorder
from app.engine.capture.transformer_engine import GraphsByTransformerEngine, graphed_callables
from app.engine.dispatchers import build_dispatcher, build_paged_buffer
from app.engine.fast_paths import check_capturable
from app.engine.fp8 import build_fp8
from app.engine.ranks.agreement import all_succeed
from app.engine.ranks.dtypes import DTYPES
from app.engine.ranks.groups import Groups
from app.engine.step.executor import ForwardBackward, execute
from app.engine.step.in_flight import RankStages
from app.engine.step.transport import Transport
from app.engine.watchdog.watchdog import Watchdog
from app.hf.chunks import fill_chunks, fill_main_params
from app.hf.pretrained import Pretrained
from app.model.attention.chosen import library_attention
from app.model.block import DenseBody, Layer
from app.model.chunk import Chunk
from app.model.fp8.linear import Fp8Layers
from app.model.init import init_weights
from app.model.layers.attend import Attend, TorchAttention
from app.model.layers.layer_groups import LayerGroups
from app.moe.clones.cloning import CLONE_SUMS, Cloning
from app.moe.dispatch.static import StaticDispatcher
from app.moe.phases import MoEBody, Router
from app.moe.protocol import Dispatcher
from app.optim.buffers import ParamSpec
from app.optim.distributed import DistributedOptimizer, OptimizerGroups
from app.optim.scale import LossScale
from app.plan.actions import Action
from app.plan.memory.activations import captured_phases
from app.plan.recompute import RecomputePolicy, recompute_policy
from app.plan.sharding.blocks import ShardCoords
from app.plan.stages import StagePlan
from app.planner.plan import Plan


@dataclass(frozen=True, slots=True)
class Engine:
    """Everything one rank trains with: chunks, optimizer, groups, transport, watchdog."""

    plan: Plan
    chunks: tuple[Chunk, ...]
    optimizer: DistributedOptimizer
    groups: Groups
    device: torch.device
    transport: Transport
    watchdog: Watchdog
    loss_scale: LossScale | None
    dispatcher: Dispatcher[Any, Any] | None  # shared by all MoE layers; None without experts
    recorder: Recorder | None  # of CUDA graphs; None without capture
    fp8: Fp8Layers  # layers whose GEMMs run in FP8; empty without a recipe

    def routers(self) -> Iterator[tuple[tuple[int, int], Router]]:
        """Yield ((chunk, n-th MoE layer of the chunk), router) for every MoE layer of this rank."""
        for index, chunk in enumerate(self.chunks):
            bodies = (layer.body for layer in chunk.in_order)
            routed = (body for body in bodies if isinstance(body, MoEBody))
            for nth, body in enumerate(routed):
                yield (index, nth), body.router

    def named_routers(self) -> Iterator[tuple[str, Router]]:
        """Yield (global name, router) for every MoE layer of this rank."""
        for chunk in self.chunks:
            for name, module in chunk.named_modules():
                if isinstance(module, Router):
                    yield name, module

    @property
    def cloning(self) -> Cloning | None:
        """Cloning of hot experts (ECHO); None without clones."""
        return self.dispatcher.cloning if isinstance(self.dispatcher, StaticDispatcher) else None

    def start_step(self) -> None:
        """Reset the per-step counters of routers, clones and FP8 layers."""
        for _, router in self.routers():
            router.start_step()
        if self.cloning is not None:
            self.cloning.start_step()
        self.fp8.begin_step()

    @property
    def capturable(self) -> bool:
        """True if every later step launches the same kernels as this one."""
        return self.fp8.capturable

    def finish_step(self, skipped: Tensor) -> None:
        """Run the device work that follows the update; `skipped` is 1 if it was skipped, else 0."""
        self.fp8.finish_step(skipped)

    def stepped(self, skipped: bool) -> None:
        """Tell FP8 layers, once the host knows, whether the update was skipped."""
        self.fp8.stepped(skipped)

    def clone_sums(self) -> dict[str, Tensor]:
        """Return the clone counters of this rank's group since `start_step`, as scalars by name."""
        if self.cloning is None:
            return {}
        return dict(zip(CLONE_SUMS, self.cloning.sums_4.unbind(), strict=True))

    def all_rows(self) -> AbstractContextManager[None]:
        """Give experts memory for all dispatched tokens within the block; rules out capture."""
        if isinstance(self.dispatcher, StaticDispatcher):
            return self.dispatcher.all_rows()
        return nullcontext()

    def gather_all_params(self) -> None:
        """Gather all parameters that other ranks updated, or wait for the gathers under way."""
        for chunk in range(len(self.chunks)):
            self.optimizer.gather_params(chunk)

    def release(self) -> None:
        """Release CUDA graphs, which must not outlive the process groups."""
        if self.recorder is not None:
            self.recorder.release()


def build_engine(
    plan: Plan,
    groups: Groups,
    device: torch.device,
    watchdog: Watchdog | None = None,
    pretrained: Pretrained | None = None,
) -> Engine:
    """Build this rank's chunks, set their initial weights, and build the optimizer over them.

    Weights come from `pretrained`, or are random without it. Without a `watchdog` a local one is
    made, which records actions but asks no other rank. Raises ConfigError, the same on every rank,
    if weights cannot be read.
    """
    run = plan.run
    # 1. Chunks, on the meta device first, then with memory; 2. their weights.
    paged_buffer = build_paged_buffer(plan, run, groups.pp_rank, device=device)
    dispatcher = build_dispatcher(
        run, groups.layer_groups(run.parallel.cp_comm_type), device, paged_buffer=paged_buffer
    )
    attend = _attention(run, groups, device)
    chunks = build_chunks(
        run, plan.stages, groups, dispatcher=dispatcher, device=device, attend=attend
    )
    _set_weights(run, chunks, groups, pretrained=pretrained)
    # 3. FP8 layers, and 4. the optimizer with its fp32 main parameters; both need the weights set.
    fp8 = build_fp8(run, chunks, groups, device)
    optimizer = _build_optimizer(plan, chunks, groups, device)
    if pretrained is not None:
        # main parameters from the files again, which may be more precise than the weights
        all_succeed(groups, lambda: fill_main_params(optimizer.param_shards(), pretrained))
    if run.optim.overlap_params:
        for chunk in chunks:
            _wait_for_parameters(chunk, optimizer)
    optimizer.changed = fp8.expire  # an update invalidates quantised copies of weights
    fp8.watch()
    # 5. Transport between stages, and the watchdog over all of it.
    pp_ranks = dist.get_process_group_ranks(groups.pp)
    transport = Transport(groups.pp, pp_ranks, run.schedule.batch_p2p)
    watchdog = watchdog or Watchdog(groups.rank, run.schedule.timeout_s)
    watchdog.pending_p2p = transport.unfinished
    watchdog.spins = device.type == "cuda"
    watchdog.replays = _waits_unseen(run, dispatcher, device)
    watchdog.reads = not _records_captured_events(run)
    loss_scale = LossScale.start(run.precision, device)
    return Engine(
        plan,
        chunks,
        optimizer,
        groups=groups,
        device=device,
        transport=transport,
        watchdog=watchdog,
        loss_scale=loss_scale,
        dispatcher=dispatcher,
        recorder=build_recorder(run, device),
        fp8=fp8,
    )


def _build_optimizer(
    plan: Plan, chunks: Sequence[Chunk], groups: Groups, device: torch.device
) -> DistributedOptimizer:
    """Build the ZeRO-1 optimizer over the parameters of this rank's chunks."""
    run = plan.run
    optimizer_groups = OptimizerGroups(
        dp_cp=groups.dp_cp, edp=groups.edp, tp=groups.tp, embedding=groups.embedding
    )
    return DistributedOptimizer(
        [list(parameter_specs(chunk, groups.coords)) for chunk in chunks],
        plan.buffers[groups.pp_rank],
        run.optim,
        groups=optimizer_groups,
        grads=DTYPES[run.precision.grads],
        device=device,
        full_iteration=run.cuda_graph.impl is GraphImpl.full_iteration,
        writes_first=run.writes_expert_grads,
    )


def _attention(run: Run, groups: Groups, device: torch.device) -> Attend:
    """Choose the attention backend. Raises ConfigError, the same on every rank, if missing."""
    if run.train.attention_backend is AttentionBackendKind.torch:
        return TorchAttention(run.train.deterministic)
    dtype = DTYPES[run.precision.params]
    return all_succeed(groups, lambda: library_attention(run, dtype, device))


def _waits_unseen(run: Run, dispatcher: Dispatcher[Any, Any] | None, device: torch.device) -> bool:
    """Return whether ranks wait for each other in ways that torch's flight recorder cannot see.

    Those are collectives inside CUDA graphs, and kernels that wait on peer memory.
    """
    layer_groups = isinstance(dispatcher, StaticDispatcher) and dispatcher.peer is not None
    captures = run.cuda_graph.impl is not GraphImpl.none and device.type == "cuda"
    return captures or layer_groups


def _records_captured_events(run: Run) -> bool:
    """Return whether NCCL's flight recorder keeps events of a capture, which invalidate it when
    queried and are freed after it.

    torch records single sends and receives under capture too, unlike batches and collectives.
    """
    full = run.cuda_graph.impl is GraphImpl.full_iteration
    return full and run.parallel.pp > 1 and not run.schedule.batch_p2p


def _set_weights(
    run: Run, chunks: Sequence[Chunk], groups: Groups, *, pretrained: Pretrained | None
) -> None:
    """Load pretrained weights, or draw random ones. Raises ConfigError as `build_engine`."""
    if pretrained is not None:
        all_succeed(groups, lambda: fill_chunks(chunks, pretrained, groups.coords))
        return
    for chunk in chunks:
        init_weights(chunk.weights(), groups.coords, run.model, seed=run.train.seed)


def build_recorder(run: Run, device: torch.device) -> Recorder | None:
    """Build the CUDA graph recorder, or its CPU stand-in; None without capture.

    Raises ConfigError for what cannot be captured.
    """
    check_capturable(run, device)
    if run.cuda_graph.impl is GraphImpl.none:
        return None
    if run.cuda_graph.impl is GraphImpl.transformer_engine:
        graphed_callables()
    return CudaRecorder() if device.type == "cuda" else HostRecorder()


def _wait_for_parameters(chunk: Chunk, optimizer: DistributedOptimizer) -> None:
    """Make each module's forward wait for its own parameters only (optim.overlap_params)."""
    inner = [*chunk.layers.values(), *([] if chunk.norm is None else [chunk.norm])]
    own = [chunk.embedding.weight] if chunk.first and chunk.embedding is not None else []
    for module, params in ((chunk, own), *((module, module.parameters()) for module in inner)):
        wait = optimizer.gate(params)
        module.register_forward_pre_hook(lambda *_, wait=wait: wait())
    if chunk.last:
        chunk.wait_for_head = optimizer.gate([chunk.table.weight])


def build_chunks(
    run: Run,
    stages: StagePlan,
    groups: Groups,
    *,
    dispatcher: Dispatcher[Any, Any] | None,
    device: torch.device,
    attend: Attend | None = None,
) -> tuple[Chunk, ...]:
    """Build this rank's chunks on the meta device, then give them memory; weights are not yet set.

    `attend` computes attention; None uses torch's.
    """
    chunks = []
    layer_groups = groups.layer_groups(run.parallel.cp_comm_type)
    # One stream for all layers: libraries keep a workspace per stream that they have run on.
    overlaps = run.model.moe is not None and run.model.moe.shared_overlap
    side = torch.cuda.Stream(device) if overlaps and device.type == "cuda" else None
    for stage in stages.stages[groups.pp_rank]:
        with torch.device("meta"):
            layers = {
                index: build_layer(run.model, index, layer_groups, dispatcher=dispatcher, side=side)
                for index in stage.layers
            }
            chunk = Chunk(
                run.model,
                layers,
                stage.embedding,
                head=stage.head,
                attend=attend or TorchAttention(run.train.deterministic),
                layer_groups=layer_groups,
                chunk_tokens=run.loss.chunk_tokens,
            )
        _materialise(chunk, device, DTYPES[run.precision.params])
        chunks.append(chunk)
    return tuple(chunks)


def build_layer(
    model: ModelConfig,
    index: int,
    layer_groups: LayerGroups,
    *,
    dispatcher: Dispatcher[Any, Any] | None,
    side: torch.cuda.Stream | None = None,
) -> Layer:
    """Build decoder layer `index`, dense or with routed experts behind `dispatcher`.

    `side` is the CUDA stream of its shared expert.
    """
    if not model.is_moe_layer(index):
        return Layer(model, DenseBody(model, layer_groups), layer_groups)
    assert model.moe is not None and dispatcher is not None
    return Layer(
        model,
        MoEBody(model, model.moe, dispatcher, layer_groups=layer_groups, side=side),
        layer_groups,
    )


def _materialise(chunk: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Allocate parameters (uninitialised, in `dtype`), and buffers as zeros of their own dtype."""
    for module in chunk.modules():
        for name, param in module.named_parameters(recurse=False):
            memory = torch.empty(param.shape, dtype=dtype, device=device)
            setattr(module, name, nn.Parameter(memory))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.zeros(buffer.shape, dtype=buffer.dtype, device=device))


def parameter_specs(chunk: Chunk, coords: ShardCoords) -> Iterator[ParamSpec]:
    """Yield a spec of every parameter of a chunk, in order of use, with its block of the weight.

    A norm over parameters counts each weight once: a tied embedding table on the first stage, a
    weight replicated over tensor-parallel ranks on the first of them.
    """
    index, ranks = coords.tp
    for named, param in chunk.weights():
        weight = named.weight
        replicated = weight.replicated and ranks > 1
        yield ParamSpec(
            named.name,
            param,
            weight.expert,
            decay=weight.decay,
            block=coords.block(weight),
            tied=named.tied,
            replicated=replicated,
            counted=(chunk.first or not named.tied) and not (replicated and index),
        )


def build_partial_graphs(engine: Engine) -> PartialGraphs | None:
    """Build the graphs of the captured parts of this rank's layers, not yet recorded, or None."""
    run = engine.plan.run
    graphs = engine.plan.graphs[engine.groups.pp_rank]
    if graphs is None or engine.recorder is None:
        return None
    kind: Callable[..., PartialGraphs] = PartialGraphs
    if run.cuda_graph.impl is GraphImpl.transformer_engine:
        like_D = torch.zeros((), dtype=DTYPES[run.precision.params], device=engine.device)
        kind = partial(
            GraphsByTransformerEngine,
            make=graphed_callables(),
            hidden_BsD=like_D.expand(_hidden(engine)),
            recompute=recompute_policy(run).usual,
            on_trial=engine.fp8.on_trial,
        )
    return kind(
        engine.chunks,
        graphs,
        captured_phases(run.cuda_graph),
        recorder=engine.recorder,
        optimizer=engine.optimizer,
    )


def _hidden(engine: Engine) -> torch.Size:
    """Return the shape of hidden states between layers: B, S / (cp · tp), D."""
    run, layout = engine.plan.run, engine.groups.layout
    tokens = run.train.seq_len // (layout.cp * layout.tp)
    return torch.Size((run.train.micro_batch, tokens, run.model.hidden_size))


def select_forward_backward(
    engine: Engine,
    lists: Sequence[Sequence[Action]],
    graphs: PartialGraphs | None = None,
    policy: RecomputePolicy | None = None,
) -> ForwardBackward:
    """Bind the executor to this rank's list of actions and to the chunks these work on.

    `lists` has one list per pipeline rank. Without `graphs` everything runs eagerly. `policy` says
    what backward recomputes; None takes it from the run.
    """
    run = engine.plan.run
    rank = engine.groups.pp_rank
    stages = RankStages(
        engine.chunks,
        engine.plan.next_here(rank),
        (policy or recompute_policy(run)).on_rank(lists[rank]),
        hidden=_hidden(engine),
        dtype=DTYPES[run.precision.params],
        device=engine.device,
        sink=engine.optimizer.main_grad_sink(),
        graphs=graphs,
    )
    return partial(
        execute, lists[rank], stages, engine.optimizer, engine.transport, engine.watchdog
    )
