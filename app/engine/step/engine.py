"""One rank's engine: everything it trains with, bound to a schedule's list of actions.

Shapes: B sequences, s tokens per sequence of this rank, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch

from app.choices import GraphImpl
from app.engine.capture.partial import PartialGraphs
from app.engine.capture.recorder import Recorder
from app.engine.capture.transformer_engine import GraphsByTransformerEngine, graphed_callables
from app.engine.ranks.dtypes import DTYPES
from app.engine.ranks.groups import Groups
from app.engine.step.dropping import DroppingExecutor
from app.engine.step.executor import (
    Executor,
    ForwardBackward,
    InFlight,
    Parameters,
    RankStages,
    Transport,
    chunk_losses,
)
from app.engine.step.frozen import PartlyTrained
from app.engine.step.source_losses import SourceLosses
from app.engine.watchdog.watchdog import Watchdog
from app.model.adapter_dropout import AdapterDropout
from app.model.block import StepState
from app.model.chunk import Chunk
from app.moe.dispatch.paged_buffer import PagingDispatcher
from app.moe.dispatch.static import StaticDispatcher
from app.moe.phases import MoEBody, Router
from app.optim.distributed import DistributedOptimizer
from app.optim.frozen import FrozenWeight
from app.optim.scale import LossScale
from app.plan.actions import Action
from app.plan.recompute import RecomputePolicy, recompute_policy
from app.plan.select import captured_phases
from app.plan.sharding.frozen import needs_input_grads
from app.planner.plan import Plan

State = TypeVar("State", bound=StepState)


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
    static: StaticDispatcher | None  # dispatcher of all MoE layers; None without, or with another
    recorder: Recorder | None  # of CUDA graphs; None without capture
    paging: PagingDispatcher[object, object] | None  # None without a paged buffer
    states: tuple[StepState, ...]  # per-step state of the features that the run uses
    frozen: tuple[FrozenWeight, ...] = ()  # parameters that are not trained

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

    def state(self, kind: type[State]) -> State | None:
        """Return the per-step state of this kind; None if the run has none."""
        return next((each for each in self.states if isinstance(each, kind)), None)

    @property
    def capturable(self) -> bool:
        """True if every later step launches the same kernels as this one."""
        return all(each.capturable for each in self.states)

    def all_rows(self) -> AbstractContextManager[None]:
        """Give experts memory for all dispatched tokens within the block; rules out capture."""
        return nullcontext() if self.static is None else self.static.all_rows()

    def gather_all_params(self) -> None:
        """Gather all parameters that other ranks updated, or wait for the gathers under way."""
        for chunk in range(len(self.chunks)):
            self.optimizer.gather_params(chunk)

    def release(self) -> None:
        """Release CUDA graphs, which must not outlive the process groups."""
        if self.recorder is not None:
            self.recorder.release()


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
            on_trial=partial(_on_trial, engine.states),
        )
    return kind(
        engine.chunks,
        graphs,
        captured_phases(run.cuda_graph),
        recorder=engine.recorder,
        optimizer=engine.optimizer,
    )


@contextmanager
def _on_trial(states: Sequence[StepState]) -> Iterator[None]:
    """Run layers outside of any step within the block, to capture them."""
    with ExitStack() as stack:
        for each in states:
            stack.enter_context(each.on_trial())
        yield


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
    *,
    params: Parameters | None = None,
    transport: Transport | None = None,
) -> ForwardBackward:
    """Bind the executor to this rank's list of actions and to the chunks these work on.

    `lists` has one list per pipeline rank. Without `graphs` everything runs eagerly. `policy` says
    what backward recomputes; None takes it from the run. `params` and `transport` replace those of
    the engine.
    """
    run = engine.plan.run
    rank = engine.groups.pp_rank
    by_source = engine.state(SourceLosses)
    stages = RankStages(
        engine.chunks,
        engine.plan.next_here(rank),
        (policy or recompute_policy(run)).on_rank(lists[rank]),
        hidden=_hidden(engine),
        dtype=DTYPES[run.precision.params],
        device=engine.device,
        sink=engine.optimizer.main_grad_sink(),
        graphs=graphs,
        losses=chunk_losses if by_source is None else by_source.losses,
    )
    kind: Callable[..., Executor] = Executor
    if (dropout := engine.state(AdapterDropout)) is not None:
        kind = partial(DroppingExecutor, dropout)
    return kind(
        lists[rank],
        stages,
        params or engine.optimizer,
        transport=transport or engine.transport,
        watchdog=engine.watchdog,
        in_flight=_in_flight(engine.plan, rank),
    )


def _in_flight(plan: Plan, rank: int) -> Callable[..., InFlight]:
    """Choose the passes through a rank's chunks: whether backward ends where nothing is trained."""
    if not plan.run.freezes:
        return InFlight
    needed = needs_input_grads(plan.run, plan.stages.in_order)
    stage = plan.stages.pipeline.stage
    ends = [chunk for chunk in range(plan.stages.vpp) if not needed[stage(rank, chunk)]]
    return partial(PartlyTrained, ends=frozenset(ends)) if ends else InFlight
