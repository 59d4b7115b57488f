"""A plan as plain values, for tables, plan.json and scripts: bytes, seconds, ranks in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from app.config import Run
from app.plan.cost.flops import PLANNED_PEAK, parameter_count, run_flops_per_token
from app.plan.groups import GROUPS
from app.planner.decoding import decoding_memory, padded, texts_that_fit
from app.planner.plan import Plan
from app.planner.suggestion import Suggestion

SECTIONS = ("groups", "stages", "schedule", "graphs", "memory")
DECODING = "decoding"  # not part of training: only on request
WHAT = (*SECTIONS, DECODING, "all")


def plan_json(
    plan: Plan,
    what: str = "all",
    suggestions: Sequence[Suggestion] = (),
    faster: Sequence[Suggestion] = (),
) -> dict[str, Any]:
    """Return the layout and the requested sections: one of SECTIONS, all of them, or DECODING.

    The verdict comes with the memory, and holds suggestions from `app.advice.suggest` and
    `app.advice.faster` that the caller passes. Raises ValueError for an unknown `what`.
    """
    if what not in WHAT:
        raise ValueError(f"what={what!r} is none of {', '.join(WHAT)}")
    wanted = SECTIONS if what == "all" else (what,)
    found = {"layout": layout_json(plan)} | {name: WRITERS[name](plan) for name in wanted}
    verdict = {"verdict": _verdict(plan, suggestions, faster)} if "memory" in wanted else {}
    return found | verdict


def parameters_per_rank(plan: Plan) -> list[int]:
    """Return the elements that a rank holds; one entry per pipeline rank."""
    return [sum(param.numel for chunk in chunks for param in chunk) for chunks in plan.parameters]


def assumed_peak(run: Run) -> float:
    """Return the peak of one GPU, TFLOP/s."""
    return run.hardware.peak_tflops or PLANNED_PEAK


@dataclass(frozen=True, slots=True)
class Estimate:
    """Speed of a step, from measured speeds or from the assumed hardware.efficiency."""

    seconds: float  # of one step
    tokens_per_second_per_gpu: float
    mfu: float  # model FLOPs over the peak, 0 to 1
    bubble_fraction: float  # share of time in which ranks do not compute, 0 to 1
    peak_tflops: float  # assumed, of one GPU
    efficiency: float  # assumed share of the peak, without a profile
    gpu_hours: float  # of all train.steps, without validations and checkpoints
    profile: str | None  # GPU with measured speeds; None: speeds are assumed

    @classmethod
    def of(cls, plan: Plan) -> Estimate:
        """Build the estimate from the timeline of a plan."""
        run = plan.run
        seconds = plan.step_seconds
        peak = assumed_peak(run)
        rate = run.train.global_batch * run.train.seq_len / seconds / run.world_size
        mfu = rate * run_flops_per_token(run) / (peak * 1e12)
        return cls(
            seconds,
            rate,
            mfu,
            bubble_fraction=plan.timeline.bubble_fraction,
            peak_tflops=peak,
            efficiency=run.hardware.efficiency,
            gpu_hours=seconds * run.steps * run.world_size / 3600,
            profile=None if plan.profile is None else plan.profile.gpu,
        )


@dataclass(frozen=True, slots=True)
class StageRow:
    """Row of the table of stages: contents of a stage and its estimated times."""

    pp_rank: int
    chunk: int  # of this pipeline rank
    stage: int  # in the order in which a microbatch passes them
    layers: tuple[int, ...]  # decoder layers
    moe_layers: tuple[int, ...]  # those with experts
    embedding: bool
    head: bool
    parameters: int  # elements on one rank
    forward_seconds: float  # estimated, of one microbatch
    backward_seconds: float  # estimated, of one microbatch, recomputation included


def stage_rows(plan: Plan) -> Iterator[StageRow]:
    """Yield a row for every stage, by pipeline rank."""
    stages = plan.stages
    model = plan.run.model
    pipeline = stages.pipeline
    for pp_rank, chunks in enumerate(stages.stages):
        for chunk, stage in enumerate(chunks):
            number = pipeline.stage(pp_rank, chunk)
            seconds = plan.stage_seconds[number]
            yield StageRow(
                pp_rank,
                chunk,
                number,
                layers=stage.layers,
                moe_layers=tuple(filter(model.is_moe_layer, stage.layers)),
                embedding=stage.embedding,
                head=stage.head,
                parameters=sum(param.numel for param in plan.parameters[pp_rank][chunk]),
                forward_seconds=seconds.forward,
                backward_seconds=seconds.backward_input + seconds.backward_weight,
            )


def layout_json(plan: Plan) -> dict[str, Any]:
    """Return the model, degrees of parallelism and parameters."""
    layout = plan.layout
    total = parameter_count(plan.run.model)
    degrees = {
        name: getattr(layout, name)
        for name in ("world_size", "tp", "cp", "pp", "dp", "ep", "edp", "order")
    }
    parameters = {
        "total": total.total,
        "active": total.active,
        "per_rank": parameters_per_rank(plan),
    }
    per_node = plan.run.parallel.gpus_per_node
    return {
        "model": plan.run.model.name,
        **degrees,
        "etp": layout.expert_tp,
        "gpus_per_node": per_node,
        "parameters": parameters,
    }


def _groups(plan: Plan) -> dict[str, Any]:
    kinds = [
        asdict(kind) | {"members": GROUPS[kind.name].members(plan.layout)} for kind in plan.traffic
    ]
    return {"kinds": kinds, "advice": [asdict(advice) for advice in plan.advice]}


def _stages(plan: Plan) -> list[dict[str, Any]]:
    return [asdict(row) for row in stage_rows(plan)]


def _schedule(plan: Plan) -> dict[str, Any]:
    return {
        "name": plan.schedule_name.value,
        "microbatches": plan.run.num_microbatches,
        "stages_per_rank": plan.stages.vpp,
        "peak_in_flight": list(plan.timeline.peak_in_flight),
        "estimate": asdict(Estimate.of(plan)),
        "time": plan.time_by_kind,
        "actions": [" ".join(map(str, actions)) for actions in plan.actions],
    }


def _graphs(plan: Plan) -> dict[str, Any]:
    graph = plan.run.cuda_graph
    ranks = [
        {
            "graphs": found.num_graphs,
            "slots": found.num_slots,
            "static_inputs": found.num_static_inputs,
        }
        for found in plan.graphs
        if found
    ]
    return {
        "impl": graph.impl.value,
        "scope": [part.value for part in graph.scope],
        "key": graph.key.value,
        "ranks": ranks,
    }


def _memory(plan: Plan) -> list[dict[str, Any]]:
    host = {copies.pp_rank: {"host_copies": copies.held} for copies in plan.host_copies}
    return [
        {name: value for name, value in asdict(rank).items() if name != "offloaded" or value}
        | {"total": rank.total, "allocated": rank.allocated}
        | host.get(rank.pp_rank, {})
        for rank in plan.memory
    ]


@dataclass(frozen=True, slots=True)
class DecodingRow:
    """Row of the table of decoding: bytes on each rank of a pipeline rank."""

    pp_rank: int
    layers: int  # decoder layers
    weights: int  # bytes
    token: int  # bytes of keys and values of one token in all of these layers
    text: int  # bytes of keys and values of a text as long as the context


@dataclass(frozen=True, slots=True)
class Decoding:
    """Memory of a model that generates text at this layout."""

    context: int  # tokens of a text, prompt included
    rows: tuple[DecodingRow, ...]
    together: int  # texts of that length that a replica can generate at a time
    replicas: int

    @classmethod
    def of(cls, plan: Plan) -> Decoding:
        """Plan texts of train.seq_len tokens on GPUs."""
        context = plan.run.train.seq_len
        rows = []
        for rank in range(plan.layout.pp):
            found = decoding_memory(plan, rank, 1, tokens=context)
            token = found.keys_values // padded(context, plan.layout.tp)
            rows.append(
                DecodingRow(rank, len(found.caches), found.weights, token, found.keys_values)
            )
        together = texts_that_fit(plan, context, plan.gpu_memory, gpu=True)
        return cls(context, tuple(rows), together, replicas=plan.layout.dp)


def _decoding(plan: Plan) -> dict[str, Any]:
    return asdict(Decoding.of(plan))


def _verdict(
    plan: Plan, suggestions: Sequence[Suggestion], faster: Sequence[Suggestion]
) -> dict[str, Any]:
    needed = plan.busiest.total
    return {
        "fits": plan.fits,
        "pp_rank": plan.busiest.pp_rank,
        "needed": needed,
        "gpu_memory": plan.gpu_memory,
        "headroom": plan.gpu_memory - needed,
        "suggestions": [asdict(suggestion) for suggestion in suggestions],
        "faster": [asdict(suggestion) for suggestion in faster],
    }


WRITERS: dict[str, Callable[[Plan], Any]] = {
    "groups": _groups,
    "stages": _stages,
    "schedule": _schedule,
    "graphs": _graphs,
    "memory": _memory,
    DECODING: _decoding,
}
