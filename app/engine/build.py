"""From a frozen `Run` to the objects that train: the one place that knows every kind of part."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from app.choices import DispatcherKind, Dtype
from app.config import ModelConfig, Run
from app.engine.executor import ForwardBackward, execute
from app.engine.groups import Groups
from app.model.block import DenseBody, Layer
from app.model.chunk import Chunk
from app.model.init import init_weights
from app.moe.dispatch import AllToAllDispatcher, LocalDispatcher
from app.moe.phases import Dispatcher, Experts, MoEBody, Router
from app.optim.buffers import ParamSpec
from app.optim.distributed import DistributedOptimizer
from app.plan.check import check
from app.plan.layout import ParallelLayout
from app.plan.lowering import lower_all
from app.plan.schedule import build_schedule
from app.plan.stages import StagePlan, plan_stages

DTYPES = {Dtype.float32: torch.float32, Dtype.bfloat16: torch.bfloat16}


def plan_layout(run: Run) -> ParallelLayout:
    """The parallel layout of a run; an expert is not cut further."""
    return ParallelLayout(run.world_size, ep=run.parallel.ep, etp=1)


@dataclass(frozen=True, slots=True)
class Engine:
    """What one rank trains with."""

    chunks: tuple[Chunk, ...]
    optimizer: DistributedOptimizer
    groups: Groups
    device: torch.device

    def routers(self) -> Iterator[tuple[str, tuple[int, int], Router]]:
        """(global name, (chunk, n-th MoE layer), router) of every MoE layer of this rank."""
        for index, chunk in enumerate(self.chunks):
            found = [(name, module) for name, module in chunk.named_modules() if isinstance(module, Router)]
            for layer, (name, router) in enumerate(found):
                yield name, (index, layer), router


def build_engine(run: Run, groups: Groups, device: torch.device) -> Engine:
    """Chunks of this rank with their initial weights, and the optimizer over them."""
    stages = plan_stages(run.model.num_layers, groups.layout.pp)
    chunks = build_chunks(run, stages, groups, device)
    specs = [list(parameter_specs(chunk)) for chunk in chunks]
    for chunk in specs:
        init_weights(((spec.name, spec.param, spec.first_expert) for spec in chunk), run.model, run.train.seed)
    return Engine(chunks, DistributedOptimizer(specs, run.optim, groups.dp, groups.edp), groups, device)


def build_chunks(run: Run, stages: StagePlan, groups: Groups, device: torch.device) -> tuple[Chunk, ...]:
    """Chunks of this rank, built without memory and then materialised; weights are not yet set."""
    chunks = []
    for stage in stages.stages[groups.layout.coords(groups.rank)["pp"]]:
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


def parameter_specs(chunk: nn.Module) -> Iterator[ParamSpec]:
    """Every parameter of a chunk in registration order, with its place in the whole model."""
    for prefix, module in chunk.named_modules():
        for leaf, param in module.named_parameters(recurse=False):
            name = f"{prefix}.{leaf}" if prefix else leaf
            first = module.first if isinstance(module, Experts) else None
            offset = 0 if first is None else first * param[0].numel()
            yield ParamSpec(name, param, first is not None, param.dim() >= 2, offset, first)


def select_forward_backward(run: Run, engine: Engine, num_microbatches: int, forward_only: bool = False) -> ForwardBackward:
    """This rank's lowered and checked action list for `num_microbatches`, bound to the executor."""
    layout = engine.groups.layout
    schedule = build_schedule(run.schedule.name.value, layout.pp, num_microbatches, len(engine.chunks), forward_only=forward_only)
    lists = lower_all(schedule)
    check(lists, schedule)
    return partial(execute, lists[layout.coords(engine.groups.rank)["pp"]], engine.chunks, engine.optimizer)
