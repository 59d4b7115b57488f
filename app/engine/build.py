"""From a frozen `Run` to the objects that train: the one place that knows every kind of part."""

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
from app.engine.dtypes import DTYPES
from app.engine.fast_paths import check_capturable
from app.engine.fp8 import build_fp8
from app.engine.groups import Groups
from app.engine.pipeline.executor import ForwardBackward, execute
from app.engine.pipeline.in_flight import RankStages
from app.engine.pipeline.transport import Transport
from app.engine.run.agreement import all_succeed
from app.engine.watchdog.watchdog import Watchdog
from app.hf.chunks import fill_chunks, fill_main_params
from app.hf.pretrained import Pretrained
from app.model.attention.chosen import library_attention
from app.model.attention.kernels import Attend, TorchAttention
from app.model.block import DenseBody, Layer
from app.model.chunk import Chunk
from app.model.fp8.linear import Fp8Layers
from app.model.init import init_weights
from app.model.layer_groups import LayerGroups
from app.moe.clones.cloning import CLONE_SUMS, Cloning
from app.moe.dispatch.static import StaticDispatcher
from app.moe.phases import MoEBody, Router
from app.moe.protocol import Dispatcher
from app.optim.buffers import ParamSpec
from app.optim.distributed import DistributedOptimizer, OptimizerGroups
from app.optim.scale import LossScale
from app.plan.actions import Action
from app.plan.memory.activations import captured_phases
from app.plan.plan import Plan
from app.plan.recompute import RecomputePolicy, recompute_policy
from app.plan.sharding.blocks import ShardCoords
from app.plan.stages import StagePlan


@dataclass(frozen=True, slots=True)
class Engine:
    """All that one rank trains with: chunks, optimizer, groups, transport, watchdog."""

    plan: Plan
    chunks: tuple[Chunk, ...]
    optimizer: DistributedOptimizer
    groups: Groups
    device: torch.device
    transport: Transport
    watchdog: Watchdog
    loss_scale: LossScale | None
    dispatcher: Dispatcher[Any, Any] | None  # of all MoE layers; None: there are no experts
    recorder: Recorder | None  # of CUDA graphs; None: nothing is captured
    fp8: Fp8Layers  # whose products are in FP8, if any

    def routers(self) -> Iterator[tuple[tuple[int, int], Router]]:
        """(chunk, n-th MoE layer) and router of every MoE layer of this rank."""
        for index, chunk in enumerate(self.chunks):
            bodies = (layer.body for layer in chunk.in_order)
            routed = (body for body in bodies if isinstance(body, MoEBody))
            for nth, body in enumerate(routed):
                yield (index, nth), body.router

    def named_routers(self) -> Iterator[tuple[str, Router]]:
        """Global name and router of every MoE layer of this rank."""
        for chunk in self.chunks:
            for name, module in chunk.named_modules():
                if isinstance(module, Router):
                    yield name, module

    @property
    def cloning(self) -> Cloning | None:
        """What has hot experts cloned; None: nothing does."""
        return self.dispatcher.cloning if isinstance(self.dispatcher, StaticDispatcher) else None

    def start_step(self) -> None:
        """Forget what routers, clones and products have counted of the step before."""
        for _, router in self.routers():
            router.start_step()
        if self.cloning is not None:
            self.cloning.start_step()
        self.fp8.begin_step()

    @property
    def capturable(self) -> bool:
        """Whether a step's kernels are those of all further ones."""
        return self.fp8.capturable

    def finish_step(self, skipped: Tensor) -> None:
        """On the device, behind the update; `skipped`: 1 where there was none, otherwise 0."""
        self.fp8.finish_step(skipped)

    def stepped(self, skipped: bool) -> None:
        """The host has learnt whether the update was skipped."""
        self.fp8.stepped(skipped)

    def clone_sums(self) -> dict[str, Tensor]:
        """What clones of this rank's group have counted since `start_step`, scalars."""
        if self.cloning is None:
            return {}
        return dict(zip(CLONE_SUMS, self.cloning.sums_4.unbind(), strict=True))

    def all_rows(self) -> AbstractContextManager[None]:
        """Within the block experts have memory for all their rows; nothing can be captured."""
        if isinstance(self.dispatcher, StaticDispatcher):
            return self.dispatcher.all_rows()
        return nullcontext()

    def make_parameters_whole(self) -> None:
        """Gather all parameters that other ranks have updated, or wait where that is under way."""
        for chunk in range(len(self.chunks)):
            self.optimizer.gather_params(chunk)

    def release(self) -> None:
        """Give up what must not outlive the process groups."""
        if self.recorder is not None:
            self.recorder.release()


def build_engine(
    plan: Plan,
    groups: Groups,
    device: torch.device,
    watchdog: Watchdog | None = None,
    pretrained: Pretrained | None = None,
) -> Engine:
    """Chunks of this rank with their initial weights, and the optimizer over them.

    `watchdog` looks at the rank; None: at most at its actions, and without asking other ranks.
    Weights are those of `pretrained`, or random without it. Raises ConfigError, the same on every
    rank, where they cannot be read.
    """
    run = plan.run
    paged_buffer = build_paged_buffer(plan, run, groups.pp_rank, device=device)
    dispatcher = build_dispatcher(
        run, groups.layer_groups(run.parallel.cp_comm_type), device, paged_buffer=paged_buffer
    )
    attend = _attention(run, groups, device)
    chunks = build_chunks(
        run, plan.stages, groups, dispatcher=dispatcher, device=device, attend=attend
    )
    _set_weights(run, chunks, groups, pretrained=pretrained)
    fp8 = build_fp8(run, chunks, groups, device)
    optimizer = _build_optimizer(plan, chunks, groups, device)
    if pretrained is not None:
        all_succeed(groups, lambda: fill_main_params(optimizer.param_shards(), pretrained))
    if run.optim.overlap_params:
        for chunk in chunks:
            _wait_for_parameters(chunk, optimizer)
    optimizer.changed = fp8.expire
    fp8.watch()
    pp_ranks = dist.get_process_group_ranks(groups.pp)
    transport = Transport(groups.pp, pp_ranks, run.schedule.batch_p2p)
    watchdog = watchdog or Watchdog(groups.rank, run.schedule.timeout_s)
    watchdog.exchanges = transport.unfinished
    watchdog.spins = device.type == "cuda"
    watchdog.replays = _waits_unseen(run, dispatcher, device)
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
    """Over the parameters of this rank's chunks."""
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
    """What computes attention. Raises ConfigError, the same on every rank, where it cannot."""
    if run.train.attention_backend is AttentionBackendKind.torch:
        return TorchAttention(run.train.deterministic)
    dtype = DTYPES[run.precision.params]
    return all_succeed(groups, lambda: library_attention(run, dtype, device))


def _waits_unseen(run: Run, dispatcher: Dispatcher[Any, Any] | None, device: torch.device) -> bool:
    """Whether ranks wait for each other in what is no collective that could be asked about: in
    graphs, and for each other's memory.
    """
    layer_groups = isinstance(dispatcher, StaticDispatcher) and dispatcher.peer is not None
    captures = run.cuda_graph.impl is not GraphImpl.none and device.type == "cuda"
    return captures or layer_groups


def _set_weights(
    run: Run, chunks: Sequence[Chunk], groups: Groups, *, pretrained: Pretrained | None
) -> None:
    """Those of a pretrained model, or random ones; ConfigError as `build_engine`."""
    if pretrained is not None:
        all_succeed(groups, lambda: fill_chunks(chunks, pretrained, groups.coords))
        return
    for chunk in chunks:
        init_weights(chunk.weights(), groups.coords, run.model, seed=run.train.seed)


def build_recorder(run: Run, device: torch.device) -> Recorder | None:
    """Recorder of CUDA graphs, or its CPU stand-in. ConfigError for what cannot be captured."""
    check_capturable(run, device)
    if run.cuda_graph.impl is GraphImpl.none:
        return None
    if run.cuda_graph.impl is GraphImpl.transformer_engine:
        graphed_callables()
    return CudaRecorder() if device.type == "cuda" else HostRecorder()


def _wait_for_parameters(chunk: Chunk, optimizer: DistributedOptimizer) -> None:
    """With optim.overlap_params, have each module's forward wait for its own parameters only."""
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
    """Chunks of this rank, built without memory and then materialised; weights are not yet set.

    `attend`: what computes attention; None: torch.
    """
    chunks = []
    layer_groups = groups.layer_groups(run.parallel.cp_comm_type)
    # one for all layers: libraries keep memory for each stream that they have computed on
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
    """Decoder layer `index`, dense or with routed experts, which `dispatcher` serves; `side`: the
    stream of its shared expert.
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
    """Give parameters memory (uninitialised, in `dtype`), and buffers zeros in their own dtype."""
    for module in chunk.modules():
        for name, param in module.named_parameters(recurse=False):
            memory = torch.empty(param.shape, dtype=dtype, device=device)
            setattr(module, name, nn.Parameter(memory))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.zeros(buffer.shape, dtype=buffer.dtype, device=device))


def parameter_specs(chunk: Chunk, coords: ShardCoords) -> Iterator[ParamSpec]:
    """Every parameter of a chunk in order of use (`chunk_parameters`), with its block of the whole.

    Of tied tables on two stages the first stage's counts, of what all tensor-parallel ranks hold
    the first one's.
    """
    index, ranks = coords.tp
    for named, param in chunk.weights():
        weight = named.weight
        replica = weight.replica and ranks > 1
        yield ParamSpec(
            named.name,
            param,
            weight.expert,
            decay=weight.decay,
            block=coords.block(weight),
            tied=named.tied,
            replica=replica,
            counted=(chunk.first or not named.tied) and not (replica and index),
        )


def build_partial_graphs(engine: Engine) -> PartialGraphs | None:
    """The captured parts of this rank's layers, not yet recorded; None where there are none."""
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
    """Of what moves between layers: B, S / tp, D."""
    run, layout = engine.plan.run, engine.groups.layout
    tokens = run.train.seq_len // (layout.cp * layout.tp)
    return torch.Size((run.train.micro_batch, tokens, run.model.hidden_size))


def select_forward_backward(
    engine: Engine,
    lists: Sequence[Sequence[Action]],
    graphs: PartialGraphs | None = None,
    policy: RecomputePolicy | None = None,
) -> ForwardBackward:
    """The executor, bound to this rank's list of actions and to what that works on; `lists` has one
    list per pipeline rank. Without `graphs` everything runs eagerly. `policy`: what backward
    computes again; None: as the run says.
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
