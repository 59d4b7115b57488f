"""Table of what=rehearse: memory and compute time of a rank, planned and measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console

from app.choices import GraphImpl
from app.cli.plan_views.rows import heading, new_table
from app.engine.rehearsal.clock import BACKWARD, FORWARD, UPDATE
from app.engine.rehearsal.rehearse import CAPTURED, Rehearsed
from app.plan.cost.part_times import EXCHANGE
from app.plan.formatting import figures, gib, signed_percent
from app.plan.memory.rank_memory import OUTSIDE
from app.plan.parts.dispatcher import busiest_load
from app.planner.plan import Plan

BYTES, SECONDS = "bytes", "seconds"
NAMED = ("parameters", "gradients", "optimizer")
HELD = ("library workspaces", "weights in FP8", "paged_buffer", "clones")
SAVED = ("inputs", "activations", "pipeline buffers", "static inputs")
ONLY_PLANNED = ("update", "rerun steps")


@dataclass(frozen=True, slots=True)
class PlannedNumber:
    """A number of the plan beside the measured one."""

    name: str
    unit: str  # bytes or seconds
    planned: float | None  # None: not planned by itself
    measured: float | None  # None: not measured


def comparison(plan: Plan, found: Rehearsed) -> list[PlannedNumber]:
    """Return all rows: memory, then times of a step."""
    return [*_memory(plan, found), *_times(plan, found)]


def _memory(plan: Plan, found: Rehearsed) -> Iterator[PlannedNumber]:
    gpu = found.reserved is not None
    parts = {part.name: part.bytes for part in plan.memory[found.pp_rank].parts}
    if not gpu:
        parts.pop("library workspaces", None)
    for name, size in zip(NAMED, (found.parameters, found.gradients, found.optimizer), strict=True):
        yield PlannedNumber(name, BYTES, parts[name], size)
    if plan.run.cuda_graph.impl is GraphImpl.none:  # memory of a graph's pool is of one piece
        held, saved = (sum(parts.get(name, 0) for name in names) for names in (HELD, SAVED))
        yield PlannedNumber("other tensors between steps", BYTES, held, found.held)
        yield PlannedNumber("inputs and activations", BYTES, saved, found.saved)
        yield PlannedNumber("working memory", BYTES, parts["working memory"], found.working)
    planned = sum(
        size for name, size in parts.items() if name not in OUTSIDE and name not in ONLY_PLANNED
    )
    yield PlannedNumber("tensors at the peak", BYTES, planned, found.peak)
    if "update" in parts or found.peak_of_step > found.peak:
        most = planned + parts.get("update", 0)
        yield PlannedNumber("at the peak of the update", BYTES, most, found.peak_of_step)
    if found.reserved is not None:
        beyond = found.reserved - found.peak_of_step
        yield PlannedNumber("fragmentation", BYTES, parts["fragmentation"], beyond)
    for name in ("CUDA context", "NCCL", "rerun steps"):
        if name in parts:
            yield PlannedNumber(name, BYTES, parts[name], None)


def _times(plan: Plan, found: Rehearsed) -> Iterator[PlannedNumber]:
    run, pipeline = plan.run, plan.stages.pipeline
    stages = [pipeline.stage(found.pp_rank, chunk) for chunk in range(plan.stages.vpp)]
    count, load = run.num_microbatches, busiest_load(run)
    sends: float | None = None
    if plan.profile is None:
        all_seconds = [plan.stage_seconds[stage] for stage in stages]
        forward = sum(each.forward for each in all_seconds)
        backward = sum(each.backward_input + each.backward_weight for each in all_seconds)
    else:
        times = [plan.times_at(load=load)[stage] for stage in stages]
        forward = sum(sum(t.forward.values()) - t.forward.get(EXCHANGE, 0.0) for t in times)
        both = [each for t in times for each in (t.backward_input, t.backward_weight)]
        backward = sum(sum(each.values()) - each.get(EXCHANGE, 0.0) for each in both)
        sends = count * sum(t.by_kind().get(EXCHANGE, 0.0) for t in times)
    seconds, update = found.seconds, plan.tail.optimizer or None
    if CAPTURED in seconds:
        whole = count * (forward + backward) + plan.tail.optimizer + plan.tail.between
        yield PlannedNumber("compute of a step", SECONDS, whole, seconds[CAPTURED])
    else:
        yield PlannedNumber("forwards", SECONDS, count * forward, seconds.get(FORWARD, 0.0))
        yield PlannedNumber("backwards", SECONDS, count * backward, seconds.get(BACKWARD, 0.0))
        yield PlannedNumber("update and clearing", SECONDS, update, seconds.get(UPDATE, 0.0))
    if sends is not None:
        yield PlannedNumber("messages within layers", SECONDS, sends, None)
        tail = plan.tail.reduction + plan.tail.gathering
        yield PlannedNumber("reduction and gathering", SECONDS, tail, None)


def print_rehearsed(
    plan: Plan, found: Rehearsed, rows: list[PlannedNumber], console: Console
) -> None:
    """Print one rank."""
    run = plan.run
    rank = f"rank {found.rank:,} of {run.world_size:,}, pipeline rank {found.pp_rank}"
    heading(console, "Rehearsal", f"{rank}, on {found.device}; all its messages are made up")
    gpu = found.reserved is not None
    table = new_table("part", ">planned", ">measured", ">difference")
    for row in rows:
        compared = gpu or row.unit == BYTES
        table.add_row(
            f"{row.name}, {'GiB' if row.unit == BYTES else 'ms'}",
            *(_number(each, row.unit) for each in (row.planned, row.measured)),
            _difference(row) if compared else "—",
        )
    console.print(table)
    if found.rows is not None:
        console.print(
            f"Experts had up to {found.rows:,} dispatched tokens per microbatch and layer."
        )
    console.print(
        "Losses and gradients mean nothing. Sends, waits and NCCL are the plan's alone.",
        style="dim",
    )
    if not gpu:
        console.print(
            "Planned times are a GPU's, and so is the memory within layers: a CPU lacks the fused"
            " kernels.",
            style="dim",
        )


def _number(value: float | None, unit: str) -> str:
    if value is None:
        return "—"
    if unit == SECONDS:
        return figures(value * 1e3)
    return gib(int(value)) if value >= 2**30 / 10 else f"{value / 2**30:.5f}"


def _difference(row: PlannedNumber) -> str:
    if not row.planned or row.measured is None:
        return "—"
    return signed_percent(row.measured / row.planned - 1)
