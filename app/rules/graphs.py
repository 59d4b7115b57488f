"""Rules on CUDA graphs and on recomputation."""

from __future__ import annotations

from itertools import pairwise

from app.choices import Balance, BlockKind, GraphImpl, GraphScope, Recompute
from app.config import Run
from app.errors import ConfigError, Instead
from app.plan.parts.dispatcher import run_dispatcher
from app.plan.phases import PhaseName
from app.plan.select import captured_layers, captured_phases
from app.rules.pipeline import one_stage

# blocks whose feed-forward reads an output of attention's phase beside the hidden states
PARALLEL = (BlockKind.parallel, BlockKind.parallel_norms)


def _whole() -> Instead:
    return Instead("cuda_graph=full_iteration")


def check_graphs_update(run: Run) -> None:
    """Refuse the optimizer update in any but a full-iteration graph.

    No other graph precedes the update.
    """
    graph = run.cuda_graph
    if graph.optimizer and graph.impl is not GraphImpl.full_iteration:
        what = "nothing" if graph.impl is GraphImpl.none else "parts of layers"
        rule = f"adds the update to a full-iteration graph, and impl={graph.impl.value} captures"
        near = (False, _whole())
        raise ConfigError("cuda_graph.optimizer", True, f"{rule} {what}", nearest=near)


def check_graphs_choice(run: Run) -> None:
    """Refuse scopes that are not one contiguous part of a layer, and captures with host syncs."""
    graph = run.cuda_graph
    scope = set(graph.scope)
    partial = graph.of_parts
    named = "[" + ", ".join(part.value for part in graph.scope) + "]"
    key = "cuda_graph.scope"
    if scope and graph.impl in (GraphImpl.none, GraphImpl.full_iteration):
        raise ConfigError(
            key,
            named,
            f"impl={graph.impl.value} captures no parts of layers",
            nearest=("[]", Instead("cuda_graph.impl=local")),
        )
    if GraphScope.moe in scope and scope & {GraphScope.moe_router, GraphScope.moe_preprocess}:
        raise ConfigError(
            key, named, "moe includes moe_router and moe_preprocess", nearest="[attn, moe]"
        )
    order = (GraphScope.attn, GraphScope.moe_router, GraphScope.moe_preprocess)
    for end, (earlier, later) in enumerate(pairwise(order), start=2):
        if later in scope and earlier not in scope:
            rule = f"{later.value} follows {earlier.value}, so it needs {earlier.value}"
            nearest_scope = "[" + ", ".join(each.value for each in order[:end]) + "]"
            raise ConfigError(key, named, rule, nearest=nearest_scope)
    if run.model.block in PARALLEL and scope == {GraphScope.mlp}:
        rule = "feed-forwards of this model read more of attn, which needs to be captured too"
        raise ConfigError(key, named, rule, nearest="[attn, mlp]")
    if run.model.block is BlockKind.parallel_norms and scope == {GraphScope.attn}:
        rule = "this model sums gradients of attn and mlp, otherwise if attn alone is captured"
        raise ConfigError(key, named, rule, nearest="[attn, mlp]")
    if partial and not captured_layers(run, range(run.model.num_layers)):
        raise ConfigError(
            key, named, f"model={run.model.name} has no such layers", nearest="[attn]"
        )
    whole = (
        graph.impl is GraphImpl.full_iteration or (partial and not scope) or GraphScope.moe in scope
    )
    dispatcher = run_dispatcher(run)
    captures = whole and graph.impl is not GraphImpl.none
    if captures and dispatcher and dispatcher.waits_for_host:
        ep, etp = dispatcher.ep, dispatcher.etp
        degrees = f"ep={ep}" + (f" and etp={etp}" if etp > 1 else "")
        rule = f"captures the token exchange, for whose sizes the host waits with {degrees}"
        what, value = key, named
        if graph.impl is GraphImpl.full_iteration:
            what, value = "cuda_graph.impl", graph.impl.value
        keys = ["cuda_graph.impl=local", "cuda_graph.scope=[attn,moe_router,moe_preprocess]"]
        part = Instead(*keys, *(["cuda_graph.optimizer=false"] if graph.optimizer else []))
        near = (Instead("model.moe.dispatcher=static"), part)
        raise ConfigError(what, value, rule, nearest=near)


INSIDE = {
    Recompute.attn_core: PhaseName.attn,
    Recompute.mlp_act: PhaseName.mlp,
    Recompute.experts_act: PhaseName.experts,
    Recompute.shared: PhaseName.shared,
    Recompute.moe: PhaseName.finish,
}  # recomputed part -> its last phase: jitter inside a captured one could not be drawn again


def check_graphs_beside(run: Run) -> None:
    """Refuse graphs beside schedules, recomputation and overlap that they cannot work with.

    A captured part runs once per microbatch, forward and backward, and ends before the rest of its
    layer.
    """
    graph = run.cuda_graph
    moe = run.model.moe
    recompute = run.recompute
    if graph.impl is GraphImpl.none:
        return
    scope = set(graph.scope)
    partial = graph.impl is not GraphImpl.full_iteration
    cuts_experts = partial and GraphScope.moe_router in scope
    if partial and run.schedule.name.value.startswith("zero_bubble"):
        rule = f"captures whole backwards, which schedule {run.schedule.name.value} splits"
        raise ConfigError(
            "cuda_graph.impl",
            graph.impl,
            rule,
            nearest=(_whole(), Instead("schedule=1f1b", *one_stage(run)), GraphImpl.none),
        )
    if partial and recompute.full:
        rule = (
            f"runs every layer twice, and cuda_graph.impl={graph.impl.value} captures parts of "
            "them that run once"
        )
        raise ConfigError("recompute.full", True, rule, nearest=(False, _whole()))
    if cuts_experts and Recompute.moe in recompute.phases:
        rule = "runs the router twice, and cuda_graph.scope=moe_router captures it to run once"
        raise ConfigError(
            "recompute.phases",
            Recompute.moe,
            rule,
            nearest=("[experts_act]", Instead("cuda_graph.scope=[attn]")),
        )
    if cuts_experts and moe and moe.shared_overlap:
        rule = "runs beside the experts, after the graph of cuda_graph.scope=moe_router has ended"
        raise ConfigError(
            "model.moe.shared_overlap",
            True,
            rule,
            nearest=(False, Instead("cuda_graph.scope=[attn]")),
        )
    held = captured_phases(graph) if partial else INSIDE.values()
    if (
        moe
        and moe.jitter_eps
        and (recompute.full or any(INSIDE.get(part) in held for part in recompute.phases))
    ):
        rule = "draws noise that recomputation must repeat, which captured graphs cannot"
        raise ConfigError(
            "model.moe.jitter_eps", moe.jitter_eps, rule, nearest=(0, Instead("recompute=none"))
        )


def check_recompute(run: Run) -> None:
    """Refuse to recompute a router that counts the load of every forward (balance=global_batch)."""
    moe = run.model.moe
    if (
        moe
        and moe.balance is Balance.global_batch
        and (run.recompute.full or Recompute.moe in run.recompute.phases)
    ):
        rule = (
            "counts the load of every forward, and recompute.full or phases=[moe] would count some "
            "twice"
        )
        raise ConfigError(
            "model.moe.balance", moe.balance, rule, nearest=("microbatch", "sequence")
        )
