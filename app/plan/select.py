"""Stages, schedule and graphs that a run's configuration selects."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from app.choices import GraphImpl, GraphKey, GraphScope, ScheduleName
from app.config import CudaGraphConfig, Run
from app.plan.actions import Action
from app.plan.graphs import GraphPlan, Key, for_transformer_engine, plan_graphs
from app.plan.phases import CAPTURED, DENSE, MOE
from app.plan.schedule import v_shaped
from app.plan.stages import Stage, StagePlan, plan_stages


def select_stages(run: Run) -> StagePlan:
    """Return the layers of every stage. Raises ConfigError for splits that do not come out even."""
    if "stages" not in run.derived:
        run.derived["stages"] = _stages(run)
    found: StagePlan = run.derived["stages"]
    return found


def _stages(run: Run) -> StagePlan:
    p = run.parallel
    v_shape = v_shaped(run.schedule.name.value)
    return plan_stages(
        run.model.num_layers,
        p.pp,
        p.vpp,
        first=p.first,
        last=p.last,
        layout=p.layout,
        count_embedding=p.count_embedding,
        count_head=p.count_head,
        v_shape=v_shape,
        behind=run.model.layers_behind,
    )


def select_schedule(run: Run, stages: StagePlan) -> ScheduleName:
    """Return the schedule.

    `auto` is none without pipeline ranks, 1f1b with one stage per rank, interleaved with several.
    """
    if run.schedule.name is not ScheduleName.auto:
        return run.schedule.name
    if stages.pp == 1:
        return ScheduleName.none
    return ScheduleName.interleaved if stages.vpp > 1 else ScheduleName("1f1b")


def select_graphs(
    run: Run, stages: StagePlan, actions: Sequence[Sequence[Action]]
) -> tuple[GraphPlan | None, ...]:
    """Return the partial CUDA graphs of each pipeline rank for its actions.

    None for a rank without.
    """
    return tuple(graphs_by_rank(run, stages, actions))


def graphs_by_rank(
    run: Run, stages: StagePlan, actions: Sequence[Sequence[Action]]
) -> Iterator[GraphPlan | None]:
    """Yield the partial CUDA graphs of one pipeline rank after the other (`select_graphs`)."""
    for chunks, listed in zip(stages.stages, actions, strict=True):
        yield _rank_graphs(run, chunks, listed) if run.cuda_graph.of_parts else None


def _rank_graphs(run: Run, chunks: Sequence[Stage], actions: Sequence[Action]) -> GraphPlan:
    layers = [captured_layers(run, stage.layers) for stage in chunks]
    inputs = [own_inputs(run, stage.layers) for stage in chunks]
    key: Key = "slot" if run.cuda_graph.key is GraphKey.slot else "microbatch"
    plan = plan_graphs(actions, layers, key, own_inputs=inputs)
    if run.cuda_graph.impl is GraphImpl.local:
        return plan
    return for_transformer_engine(plan, actions)


def captured_layers(run: Run, layers: Sequence[int]) -> int:
    """Count those of `layers` that have a part in a partial graph."""
    scope = set(run.cuda_graph.scope)
    model = run.model
    parts = {True: {GraphScope.attn, GraphScope.moe}, False: {GraphScope.attn, GraphScope.mlp}}
    return sum(not scope or bool(scope & parts[model.is_moe_layer(layer)]) for layer in layers)


def captured_phases(choice: CudaGraphConfig) -> frozenset[str]:
    """Return the phases of layers that partial graphs hold."""
    if not choice.of_parts:
        return frozenset()
    if not choice.scope:
        return frozenset((*DENSE, *MOE))
    return frozenset(phase for part in choice.scope for phase in CAPTURED[part])


def own_inputs(run: Run, layers: Sequence[int]) -> tuple[int, ...]:
    """Return the layers, by index, whose captured part does not follow on the previous layer's.

    Those need a static input of their own; the others read the output of the graph before.
    """
    captured = captured_phases(run.cuda_graph)
    own = list[int]()
    ended = False
    for place, layer in enumerate(layers):
        phases = MOE if run.model.is_moe_layer(layer) else DENSE
        # one that does not follow reads what is made of the output before, outside of graphs
        follows = ended and phases[0] in captured and run.model.layer_specs[layer].follows
        if not (captured.isdisjoint(phases) or follows):
            own.append(place)
        ended = phases[-1] in captured
    return tuple(own)
