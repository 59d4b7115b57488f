"""From a frozen `Run` to the objects that train: the one place that knows every kind of part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from app.choices import DispatcherKind, Dtype
from app.config import ModelConfig, Run
from app.engine.executor import ForwardBackward, execute
from app.engine.flight import Stages
from app.engine.groups import Groups
from app.engine.transport import Transport
from app.engine.watch import Watch
from app.model.block import DenseBody, Layer
from app.model.chunk import Chunk
from app.model.init import init_weights
from app.moe.dispatch import AllToAllDispatcher, LocalDispatcher
from app.moe.phases import Dispatcher, Experts, MoEBody, Router
from app.optim.buffers import ParamSpec
from app.optim.distributed import DistributedOptimizer
from app.plan.plan import Plan
from app.plan.schedule import Action, full_recompute
from app.plan.stages import StagePlan

DTYPES = {Dtype.float32: torch.float32, Dtype.bfloat16: torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Engine:
    """What one rank trains with."""

    plan: Plan
    chunks: tuple[Chunk, ...]
    optimizer: DistributedOptimizer
    groups: Groups
    device: torch.device
    transport: Transport
    watch: Watch

    def routers(self) -> Iterator[tuple[str, tuple[int, int], Router]]:
        """(global name, (chunk, n-th MoE layer), router) of every MoE layer of this rank."""
        for index, chunk in enumerate(self.chunks):
            found = [(name, module) for name, module in chunk.named_modules() if isinstance(module, Router)]
            for layer, (name, router) in enumerate(found):
                yield name, (index, layer), router


def build_engine(plan: Plan, groups: Groups, device: torch.device) -> Engine:
    """Chunks of this rank with their initial weights, and the optimizer over them."""
    run = plan.run
    chunks = build_chunks(run, plan.stages, groups, device)
    specs = [list(parameter_specs(chunk, tied=run.model.tie_embeddings and plan.stages.pp > 1)) for chunk in chunks]
    for chunk in specs:
        init_weights(((spec.name, spec.param, spec.first_expert) for spec in chunk), run.model, run.train.seed)
    copies = None if plan.stages.pipeline.v_shape else groups.embedding  # in a V the first rank has the last stage too
    optimizer = DistributedOptimizer(specs, plan.buffers[groups.pp_rank], run.optim, groups.dp, groups.edp, copies)
    transport = Transport(groups.pp, dist.get_process_group_ranks(groups.pp), run.schedule.batch_p2p)
    watch = Watch(groups.rank, run.schedule.timeout_s, transport.unfinished)
    return Engine(plan, chunks, optimizer, groups, device, transport, watch)


def build_chunks(run: Run, stages: StagePlan, groups: Groups, device: torch.device) -> tuple[Chunk, ...]:
    """Chunks of this rank, built without memory and then materialised; weights are not yet set."""
    chunks = []
    for stage in stages.stages[groups.pp_rank]:
        with torch.device("meta"):
            layers = {index: build_layer(run.model, index, groups) for index in stage.layers}
            chunk = Chunk(run.model, layers, stage.embedding, stage.head, run.train.deterministic)
        _materialise(chunk, device, DTYPES[run.precision.params])
        chunks.append(chunk)
    return tuple(chunks)


def build_layer(model: ModelConfig, index: int, groups: Groups) -> Layer:
    """Decoder layer `index`, dense or with routed experts."""
    if not model.is_moe_layer(index):
        return Layer(model, DenseBody(model))
    assert model.moe is not None
    return Layer(model, MoEBody(model, model.moe, _dispatcher(model, groups), groups.ep_rank, groups.layout.ep))


def _dispatcher(model: ModelConfig, groups: Groups) -> Dispatcher:
    assert model.moe is not None
    if groups.layout.ep == 1 and model.moe.dispatcher is not DispatcherKind.all_to_all:
        return LocalDispatcher(model.moe.num_experts)
    return AllToAllDispatcher(model.moe.num_experts, groups.ep)


def _materialise(chunk: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Give every parameter memory (uninitialised, in `dtype`) and every buffer zeros in its own dtype."""
    for module in chunk.modules():
        for name, param in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(torch.empty(param.shape, dtype=dtype, device=device)))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.zeros(buffer.shape, dtype=buffer.dtype, device=device))


def parameter_specs(chunk: Chunk, tied: bool = False) -> Iterator[ParamSpec]:
    """Every parameter of a chunk in registration order, with its place in the whole model.

    tied: the embedding has a copy on another stage; the first stage's counts.
    """
    for prefix, module in chunk.named_modules():
        for leaf, param in module.named_parameters(recurse=False):
            name = f"{prefix}.{leaf}" if prefix else leaf
            first = module.first if isinstance(module, Experts) else None
            offset = 0 if first is None else first * param[0].numel()
            copied = tied and param is chunk.embedding
            counted = chunk.first or not copied
            yield ParamSpec(name, param, first is not None, param.dim() >= 2, offset, first, copied, counted)


def select_forward_backward(engine: Engine, lists: Sequence[Sequence[Action]]) -> ForwardBackward:
    """This rank's list of actions, bound to the executor; `lists` has one per pipeline rank."""
    run, groups = engine.plan.run, engine.groups
    hidden = torch.Size((run.train.micro_batch, run.train.seq_len, run.model.hidden_size))
    rank, dtype = groups.pp_rank, DTYPES[run.precision.params]
    recompute = full_recompute(lists[rank], run.recompute.partial_microbatches) if run.recompute.full else {}
    stages = Stages(engine.chunks, engine.plan.next_here(rank), recompute, hidden, dtype, engine.device)
    return partial(execute, lists[rank], stages, engine.optimizer, engine.transport, engine.watch)
