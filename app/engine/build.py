"""Build the objects that train from a frozen `Run`; the only module that knows every part.

Shapes: B sequences, s tokens per sequence of this rank, D hidden.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from app.choices import AttentionBackendKind, Balance, Fp8Part, GraphImpl
from app.config import ModelConfig, Run
from app.engine.capture.recorder import CudaRecorder, Recorder
from app.engine.capture.stand_in import HostRecorder
from app.engine.capture.transformer_engine import graphed_callables
from app.engine.dispatchers import BuiltDispatcher, build_dispatcher
from app.engine.fast_paths import check_capturable
from app.engine.fp8 import build_fp8
from app.engine.ranks.agreement import all_succeed
from app.engine.ranks.dtypes import DTYPES
from app.engine.ranks.groups import Groups, create_etp
from app.engine.step.engine import Engine
from app.engine.step.executor import Transport
from app.engine.step.marked import mark_graphs
from app.engine.step.source_losses import SourceLosses
from app.engine.watchdog.watchdog import Watchdog
from app.fp8.linear import Fp8Layers
from app.fp8.ready import ReadyRows
from app.hf.adapter import SavedAdapter
from app.hf.chunks import fill_chunks, fill_main_params
from app.hf.pretrained import Pretrained
from app.model.adapter_dropout import AdapterDropout
from app.model.ahead import Ahead, AheadLosses, PredictingChunk
from app.model.attention.chosen import library_attention, torch_attention
from app.model.attention.delta_library import use_kernels
from app.model.attention.softcap import SoftcapAttention
from app.model.block import BLOCKS, Body, Layer, StepState
from app.model.chunk import Chunk
from app.model.init import init_weights
from app.model.layers.attend import Attend, TorchAttention
from app.model.layers.frozen import freeze, start_backward_at
from app.model.layers.layer_groups import LayerGroups, own_tokens
from app.model.lora import add_adapters, hold_base
from app.model.offload import HostBuffers
from app.moe.dispatch.paged_buffer import build_paged_buffer
from app.moe.phases import MoEBody, Router
from app.moe.protocol import Dispatcher
from app.optim.buffers import ParamSpec
from app.optim.distributed import DistributedOptimizer
from app.optim.frozen import FrozenWeight
from app.optim.scale import LossScale
from app.optim.shard import OptimizerGroups
from app.plan.model.held import is_held
from app.plan.recompute import recompute_policy
from app.plan.sharding.blocks import ShardCoords
from app.plan.sharding.frozen import frozen_in
from app.plan.stages import StagePlan
from app.planner.plan import Plan


def build_engine(
    plan: Plan,
    groups: Groups,
    device: torch.device,
    watchdog: Watchdog | None = None,
    pretrained: Pretrained | None = None,
    adapter: SavedAdapter | None = None,
) -> Engine:
    """Build this rank's chunks, set their initial weights, and build the optimizer over them.

    Weights come from `pretrained` and `adapter`, or are random. Without a `watchdog` a local one is
    made, which records actions but asks no other rank. Raises ConfigError, the same on every rank,
    if weights cannot be read.
    """
    run = plan.run
    # 1. Chunks, on the meta device first, then with memory; 2. their weights.
    recipe, include = run.precision.fp8.recipe, run.precision.fp8.include
    ready = ReadyRows() if recipe is not None and Fp8Part.experts in include else None
    built = _build_dispatcher(plan, groups, device, ready=ready)
    attend = _attention(run, groups, device)
    chunks = build_chunks(
        run,
        plan.stages,
        groups,
        dispatcher=built.dispatcher,
        device=device,
        attend=attend,
        rope_length=run.train.seq_len,
    )
    frozen, dropout = _freeze(run, chunks, groups, device)
    _set_weights(run, chunks, groups, device, pretrained=pretrained, adapter=adapter)
    # 3. FP8 layers, and 4. the optimizer with its fp32 main parameters; both need the weights set.
    fp8 = build_fp8(run, chunks, groups, device=device, ready=ready)
    optimizer = _build_optimizer(plan, chunks, groups, device)
    optimizer.leave_out(each.spec.param for each in frozen)
    if pretrained is not None and run.adapters is None:
        # main parameters from the files again, which may be more precise than the weights
        all_succeed(groups, lambda: fill_main_params(optimizer.param_shards(), pretrained))
    if run.optim.overlap_params:
        for chunk in chunks:
            chunk.wait_with(optimizer.gate)
    if fp8 is not None:
        optimizer.changed = fp8.expire  # an update invalidates quantised copies of weights
        fp8.watch()
    # 5. Transport between stages, and the watchdog over all of it.
    pp_ranks = dist.get_process_group_ranks(groups.pp)
    transport = Transport(groups.pp, pp_ranks, run.schedule.batch_p2p)
    recorder = build_recorder(run, device)
    if watchdog is not None and recorder is not None and run.cuda_graph.marks:
        recorder, transport = mark_graphs(watchdog, recorder, transport, chunks, device=device)
    watchdog = watchdog or Watchdog(groups.rank, run.schedule.timeout_s)
    _watch(watchdog, run, built, transport, device=device)
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
        static=built.static,
        recorder=recorder,
        paging=built.paging,
        states=tuple(_states(run, chunks, built, fp8=fp8, dropout=dropout, device=device)),
        frozen=frozen,
    )


def _watch(
    watchdog: Watchdog,
    run: Run,
    built: BuiltDispatcher,
    transport: Transport,
    *,
    device: torch.device,
) -> None:
    """Tell the watchdog what it can see of this rank's waits."""
    watchdog.pending_p2p = transport.unfinished
    watchdog.spins = device.type == "cuda"
    watchdog.replays = _waits_unseen(run, built, device)
    watchdog.reads = not _records_captured_events(run)


def adapter_dropout(run: Run, groups: Groups, device: torch.device) -> AdapterDropout | None:
    """Build what drops inputs of adapters; None without."""
    if not run.lora.dropout:
        return None
    layout, train = groups.layout, run.train
    return AdapterDropout(
        run.lora.dropout,
        train.seed,
        own_tokens(train.seq_len, layout.cp, groups.cp_rank, device),
        sequences=train.micro_batch,
        replica=(groups.dp_rank, run.dp),
    )


def _freeze(
    run: Run, chunks: Sequence[Chunk], groups: Groups, device: torch.device
) -> tuple[tuple[FrozenWeight, ...], AdapterDropout | None]:
    """Freeze this rank's parameters that are not trained; add adapters. Returns the parameters, and
    what drops inputs of adapters.
    """
    names = frozen_in(run)
    if not names:
        return (), None
    found, dropout = [], adapter_dropout(run, groups, device)
    for chunk in chunks:
        freeze(chunk, {named.name: param for named, param in chunk.weights()}, names)
        if run.cuda_graph.of_parts and chunk.first and "embedding" in names:
            assert chunk.embedding is not None, "the first stage has the table"
            start_backward_at(chunk.embedding)
        for spec in parameter_specs(chunk, groups.coords):
            if not spec.param.requires_grad:
                group = groups.edp if spec.expert else groups.dp_cp
                found.append(FrozenWeight(spec, group.rank(), group.size()))
        if run.adapters is not None:
            add_adapters(chunk, run.adapters, dropout, device)
    return tuple(found), dropout


def _states(
    run: Run,
    chunks: Sequence[Chunk],
    built: BuiltDispatcher,
    *,
    fp8: Fp8Layers | None,
    dropout: AdapterDropout | None,
    device: torch.device,
) -> Iterator[StepState]:
    """Yield the state that the run's features keep per step."""
    if run.model.moe is not None and run.model.moe.balance is Balance.global_batch:
        for chunk in chunks:
            yield from (module for module in chunk.modules() if isinstance(module, Router))
    if built.cloning is not None:
        yield built.cloning
    if fp8 is not None:
        yield fp8
    if dropout is not None:
        yield dropout
    if run.model.mtp.layers:
        yield AheadLosses(run.model.mtp.layers, chunks, device)
    if run.data.parts:
        yield SourceLosses([source.label for source, _ in run.data.parts], device)
    if offload := recompute_policy(run).usual.offload:
        yield HostBuffers(chunks, offload, device)


def _build_dispatcher(
    plan: Plan, groups: Groups, device: torch.device, *, ready: ReadyRows | None
) -> BuiltDispatcher:
    """Build the dispatcher of this rank's MoE layers, with a paged buffer if the run has one."""
    run, rank = plan.run, groups.pp_rank
    stages, actions = plan.stages.stages[rank], plan.actions[rank]
    return build_dispatcher(
        run,
        groups.layer_groups(run.parallel.cp_comm_type),
        device,
        paged_buffer=build_paged_buffer(run, stages, actions, device=device),
        ready=ready,
    )


def _build_optimizer(
    plan: Plan, chunks: Sequence[Chunk], groups: Groups, device: torch.device
) -> DistributedOptimizer:
    """Build the ZeRO-1 optimizer over the parameters of this rank's chunks."""
    run = plan.run
    optimizer_groups = OptimizerGroups(
        dp_cp=groups.dp_cp,
        edp=groups.edp,
        tp=groups.tp,
        embedding=groups.embedding,
        etp_ep=groups.etp_ep,
        etp=groups.etp,
        etp_shared=create_etp(groups) if run.adapters and run.model.moe else None,
    )
    return DistributedOptimizer(
        [
            [spec for spec in parameter_specs(chunk, groups.coords) if spec.param.requires_grad]
            for chunk in chunks
        ],
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
    dtype = DTYPES[run.precision.params]
    if run.model.attention_softcap is not None:
        return _attention_alone(run)
    if run.train.attention_backend is AttentionBackendKind.transformer_engine:
        return all_succeed(groups, lambda: library_attention(run, dtype, device))
    return all_succeed(groups, lambda: torch_attention(run, dtype, device))


def _attention_alone(run: Run) -> Attend:
    """Return attention that needs nothing of a host."""
    if run.model.attention_softcap is not None:
        return SoftcapAttention(run.model.attention_softcap)
    return TorchAttention(run.train.deterministic)


def _waits_unseen(run: Run, built: BuiltDispatcher, device: torch.device) -> bool:
    """Return whether ranks wait for each other in ways that torch's flight recorder cannot see.

    Those are collectives inside CUDA graphs, and kernels that wait on peer memory.
    """
    by_peer = built.static is not None and built.static.peer is not None
    captures = run.cuda_graph.impl is not GraphImpl.none and device.type == "cuda"
    return captures or by_peer


def _records_captured_events(run: Run) -> bool:
    """Return whether NCCL's flight recorder keeps events of a capture, which invalidate it when
    queried and are freed after it.

    torch records single sends and receives under capture too, unlike batches and collectives.
    """
    full = run.cuda_graph.impl is GraphImpl.full_iteration
    return full and run.parallel.pp > 1 and not run.schedule.batch_p2p


def _set_weights(
    run: Run,
    chunks: Sequence[Chunk],
    groups: Groups,
    device: torch.device,
    *,
    pretrained: Pretrained | None,
    adapter: SavedAdapter | None,
) -> None:
    """Load saved weights, or draw random ones; quantise those that are held in fewer bits. Raises
    ConfigError as `build_engine`.
    """
    if pretrained is not None:
        all_succeed(groups, lambda: fill_chunks(chunks, pretrained, groups.coords))
    for chunk in chunks:
        weights = chunk.weights()
        if pretrained is not None:
            weights = ((named, param) for named, param in weights if named.adapter)
        init_weights(weights, groups.coords, run.model, seed=run.train.seed)
        if adapter is not None:
            adapter.fill(chunk.weights(), groups.coords)
        if run.lora.base is not None:
            hold_base(chunk, run.lora.base, device)


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


def build_chunks(
    run: Run,
    stages: StagePlan,
    groups: Groups,
    *,
    dispatcher: Dispatcher[Any, Any] | None,
    device: torch.device,
    attend: Attend | None = None,
    rope_length: int = 0,
) -> tuple[Chunk, ...]:
    """Build this rank's chunks on the meta device, then give them memory; weights are not yet set.

    `attend` computes attention; None uses torch's. `rope_length`: tokens of all sequences; 0:
    each call says (`app.model.chunk.Chunk.context`).
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
            predicts = stage.head and run.model.mtp.layers
            kind = PredictingChunk if predicts else Chunk
            chunk = kind(
                run.model,
                layers,
                stage.embedding,
                head=stage.head,
                attend=attend or _attention_alone(run),
                layer_groups=layer_groups,
                chunk_tokens=run.loss.chunk_tokens,
                rope_length=rope_length,
            )
        held = frozenset(
            id(param)
            for named, param in (() if run.lora.base is None else chunk.weights())
            if is_held(named.weight)
        )
        _materialise(chunk, device, DTYPES[run.precision.params], on_host=held)
        if run.model.linear_attention is not None:
            use_kernels(chunk.modules(), DTYPES[run.precision.params], device)
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
    spec = model.layer_specs[index]
    block = BLOCKS[model.block]
    body: Body
    if spec.routed:
        assert model.moe is not None and dispatcher is not None
        body = MoEBody(model, model.moe, dispatcher, layer_groups=layer_groups, side=side)
    else:
        body = block.dense(model, layer_groups)
    layer = block.layer(model, spec.attention, body, layer_groups)
    layer.follows = spec.follows
    if spec.predicts:
        layer.ahead = Ahead(model, layer_groups)
    return layer


def _materialise(
    chunk: nn.Module, device: torch.device, dtype: torch.dtype, *, on_host: Collection[int] = ()
) -> None:
    """Allocate parameters (uninitialised, in `dtype`), and buffers as zeros of their own dtype.

    `on_host`: ids of parameters that stay in host memory until they are quantised.
    """
    for module in chunk.modules():
        for name, param in module.named_parameters(recurse=False):
            place = torch.device("cpu") if id(param) in on_host else device
            memory = torch.empty(param.shape, dtype=dtype, device=place)
            setattr(module, name, nn.Parameter(memory))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.zeros(buffer.shape, dtype=buffer.dtype, device=device))


def parameter_specs(chunk: Chunk, coords: ShardCoords) -> Iterator[ParamSpec]:
    """Yield a spec of every parameter of a chunk, in order of use, with its block of the weight.

    A norm over parameters counts each weight once: a tied embedding table on the first stage, a
    weight replicated over the ranks of tp, or of etp for experts, on the first of them.
    """
    for named, param in chunk.weights():
        weight = named.weight
        index, ranks = coords.etp if weight.expert else coords.tp
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
            weight=weight,
        )
