"""Choice of a run's dispatcher: only this module looks at `model.moe.dispatcher`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from app.choices import Device, DispatcherKind, StaticCapacity
from app.config import MoEConfig, Run
from app.plan.groups import ETP_EP
from app.plan.layout import ParallelLayout, select_layout
from app.plan.nodes import node_span
from app.plan.parts.all_gather import PlannedAllGather
from app.plan.parts.all_to_all import PlannedAllToAll
from app.plan.parts.dispatch_record import PlannedDispatcher
from app.plan.parts.local import PlannedLocal
from app.plan.parts.static import PlannedStatic

DISPATCHERS: Mapping[DispatcherKind, type[PlannedDispatcher]] = MappingProxyType(
    {each.kind: each for each in (PlannedLocal, PlannedAllToAll, PlannedAllGather, PlannedStatic)}
)


def planned_dispatcher(
    moe: MoEConfig, ep: int, etp: int, one_node: bool = True
) -> PlannedDispatcher:
    """Return the dispatcher for these experts on ep · etp ranks, in one node or several.

    One rank is always local, whatever the configuration says. The result need not be `legal`.
    """
    kind = moe.dispatcher
    if ep * etp == 1:
        kind = DispatcherKind.local
    elif kind is DispatcherKind.auto:
        kind = DispatcherKind.all_to_all
    return DISPATCHERS[kind](moe, ep, etp, one_node=one_node)


def kinds_between_ranks() -> tuple[str, ...]:
    """Return the values of `model.moe.dispatcher` that allow experts on several ranks."""
    return "auto", *(kind.value for kind, each in DISPATCHERS.items() if each.exchange)


def run_dispatcher(run: Run, layout: ParallelLayout | None = None) -> PlannedDispatcher | None:
    """Return the dispatcher of a run, in its own layout or another; None for a dense model."""
    if run.model.moe is None:
        return None
    if layout is None or layout is select_layout(run):
        if "dispatcher" not in run.derived:
            run.derived["dispatcher"] = _laid_out(run, run.model.moe, select_layout(run))
        found: PlannedDispatcher = run.derived["dispatcher"]
        return found
    return _laid_out(run, run.model.moe, layout)


def _laid_out(run: Run, moe: MoEConfig, grid: ParallelLayout) -> PlannedDispatcher:
    span = node_span(grid.sizes(expert=True), ETP_EP.axes, run.parallel.gpus_per_node)
    reach = span.nodes == 1 and run.train.device is not Device.cpu
    return planned_dispatcher(moe, grid.ep, grid.expert_tp, one_node=reach)


def without_waits() -> dict[str, DispatcherKind]:
    """Return key and value of the dispatcher that never waits for the host."""
    return {"model.moe.dispatcher": DispatcherKind.static}


def busiest_load(run: Run) -> float:
    """Return the load of the run's busiest expert-parallel rank over the mean without drops.

    1 if dense. See `PlannedDispatcher.busiest_load`.
    """
    dispatcher = run_dispatcher(run)
    return 1.0 if dispatcher is None else dispatcher.busiest_load(tokens_per_rank(run))


def tokens_per_rank(run: Run) -> int:
    """Return the tokens of a microbatch on a rank, divided over tp and cp."""
    parallel = run.parallel
    return run.train.micro_batch * run.train.seq_len // (parallel.tp * parallel.cp)


def with_rows(run: Run, factor: float) -> Run:
    """Return the run with dispatcher=static's capacity set to `factor` times the mean."""
    moe = run.model.moe
    assert moe is not None
    static = replace(moe.static, capacity=StaticCapacity.factor, factor=factor)
    return replace(run, model=replace(run.model, moe=replace(moe, static=static)))


def with_clones(run: Run, spares: int) -> Run:
    """Return the run with `spares` slots per rank for clones of hot experts."""
    moe = run.model.moe
    assert moe is not None
    echo = replace(moe.echo, spares=spares)
    cloning = replace(moe, dispatcher=DispatcherKind.static, echo=echo)
    return replace(run, model=replace(run.model, moe=cloning))


def clones_overrides(run: Run, spares: int) -> tuple[str, ...]:
    """Return the overrides that `with_clones` stands for."""
    slots = f"model.moe.echo.spares={spares}"
    dispatcher = run_dispatcher(run)
    static = isinstance(dispatcher, PlannedStatic)
    return (slots,) if static else ("model.moe.dispatcher=static", slots)
