"""Printed tables of a plan, as wide as the terminal is or COLUMNS says, otherwise 100 columns."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TextIO

from rich.console import Console
from rich.text import Text

from app.advice.layout_rows import LayoutComparison
from app.advice.published import PublishedGap
from app.choices import Fp8Part, GraphImpl
from app.cli.plan_views.compared_layouts import print_layouts
from app.cli.plan_views.memory_tables import print_decoding, print_memory
from app.cli.plan_views.published import print_published
from app.cli.plan_views.rows import fill, heading, new_table, print_pairs
from app.cli.processes.output import table_width
from app.plan.actions import Compute
from app.plan.cost.rates import fp8_tflops
from app.plan.cost.traffic import GroupTraffic
from app.plan.formatting import (
    amount,
    compact,
    count_of,
    cut,
    figures,
    gib,
    ranges,
    short_list,
    signed_percent,
)
from app.plan.groups import GROUPS
from app.plan.parts.fp8 import EXPERTS_SPEEDUP, RECIPES
from app.planner.export import (
    DECODING,
    SECTIONS,
    Estimate,
    StageRow,
    assumed_peak,
    parameters_per_rank,
    stage_rows,
)
from app.planner.plan import Plan
from app.planner.suggestion import Suggestion
from app.planner.summary import summary_lines
from app.programs import page

WIDTH = 100  # columns unless the terminal or COLUMNS says otherwise
BESIDE = 32  # columns of the schedule's table before its actions
SHOWN = 0.001  # smallest share of a step that has a row
LARGEST = 3  # parts of memory named in the verdict


def print_plan(
    plan: Plan,
    what: str,
    suggestions: Sequence[Suggestion],
    faster: Sequence[Suggestion] = (),
    stream: TextIO | None = None,
) -> None:
    """Print the sections asked for (see `app.planner.export`), and after memory the verdict."""
    console = _console(stream or sys.stdout)
    _print_summary(plan, console)
    for name in SECTIONS if what == "all" else (what,):
        console.print()
        PRINTERS[name](plan, console)
    if what == "groups":
        _print_ranks(plan, console)
    if what in ("all", "memory"):
        _print_verdict(plan, suggestions, console)
        if faster:
            console.print()
            heading(console, "What makes it faster", "each planned again, fastest first")
            _print_changes(faster, console)


def print_comparison(plan: Plan, found: LayoutComparison) -> None:
    """Print the run and its layouts on the same number of GPUs."""
    console = _console(sys.stdout)
    _print_summary(plan, console)
    console.print()
    print_layouts(found, _assumption(plan, Estimate.of(plan)), console)


def print_gap(plan: Plan, found: PublishedGap) -> None:
    """Print the run beside a published speed."""
    console = _console(sys.stdout)
    _print_summary(plan, console)
    console.print()
    print_published(found, _assumption(plan, Estimate.of(plan)), console)


def _console(stream: TextIO) -> Console:
    width = table_width(stream, WIDTH)
    return Console(file=stream, width=width, highlight=False, markup=False, emoji=False)


def _print_summary(plan: Plan, console: Console) -> None:
    parallel = plan.run.parallel
    held = parameters_per_rank(plan)
    nodes = -(-plan.run.world_size // parallel.gpus_per_node)
    each = " to ".join(dict.fromkeys((amount(min(held)), amount(max(held)))))
    where = f"{nodes:,} of {parallel.gpus_per_node} GPUs, ranks in order {plan.layout.order}"
    print_pairs(console, [*summary_lines(plan), ("nodes", where), ("rank", f"{each} parameters")])


def _print_groups(plan: Plan, console: Console) -> None:
    heading(console, "Groups", "what one rank sends in a step, and about how long that takes")
    if not plan.traffic:
        console.print("none: no group has more than one rank")
        return
    table = new_table(
        "kind",
        ">groups",
        ">ranks",
        ">nodes",
        ">inside GB",
        ">across GB",
        ">ms",
        "overlap",
        "collectives",
    )
    for kind in plan.traffic:
        across = figures(kind.bytes_across / 1e9) if kind.nodes > 1 else "—"
        table.add_row(
            kind.name,
            f"{kind.groups:,}",
            f"{kind.ranks:,}",
            f"{kind.nodes:,}",
            figures(kind.bytes_inside / 1e9),
            across,
            figures(kind.seconds * 1e3),
            "no" if kind.exposed else "yes",
            kind.collectives,
        )
    console.print(table)
    for advice in plan.advice:
        now = f"{advice.axis} groups span {advice.nodes} nodes"
        nodes = advice.best_nodes if advice.best_nodes > 1 else "one"
        best = f"{nodes} with parallel.order={advice.order}"
        saved = f"{figures(advice.seconds * 1e3)} ms less per step"
        console.print(f"warning: {now}, but {best}: {saved}", style="yellow")


def _print_ranks(plan: Plan, console: Console) -> None:
    console.print()
    heading(console, "Ranks")
    width = console.width - 2 - max((len(kind.name) for kind in plan.traffic), default=0)
    print_pairs(console, [(kind.name, _ranks_line(plan, kind, width)) for kind in plan.traffic])


def _ranks_line(plan: Plan, kind: GroupTraffic, width: int) -> str:
    """Return as many groups as fit into the width: "[0, 4] [1, 5] … 8 groups"."""
    groups = GROUPS[kind.name].members(plan.layout)
    return cut(map(short_list, groups), width, f"… {len(groups):,} groups")


def _print_stages(plan: Plan, console: Console) -> None:
    alike = plan.layout.world_size // plan.layout.pp
    heading(
        console, "Stages", f"each pipeline rank stands for {alike:,} ranks" if alike > 1 else ""
    )
    table = new_table(
        ">pp rank",
        ">stage",
        ">layers",
        "which",
        "besides",
        ">parameters",
        ">forward ms",
        ">backward ms",
    )
    fill(table, [_stage_cells(row) for row in stage_rows(plan)])
    console.print(table)
    console.print("Times are estimates for one microbatch.", style="dim")


def _stage_cells(row: StageRow) -> tuple[str, ...]:
    besides = ", ".join(
        name for name, has in (("embedding", row.embedding), ("head", row.head)) if has
    )
    mixed = row.moe_layers and row.moe_layers != row.layers
    experts = f" (MoE {ranges(row.moe_layers)})" if mixed else ""
    numbers = str(row.pp_rank), str(row.stage), str(len(row.layers))
    seconds = row.forward_seconds, row.backward_seconds
    return (
        *numbers,
        ranges(row.layers) + experts,
        besides,
        amount(row.parameters),
        *(figures(s * 1e3) for s in seconds),
    )


def _print_schedule(plan: Plan, console: Console) -> None:
    estimate = Estimate.of(plan)
    vpp = plan.stages.vpp
    counts = count_of(plan.run.num_microbatches, "microbatch", "microbatches") + (
        f", {vpp} stages per rank" if vpp > 1 else ""
    )
    heading(
        console,
        "Schedule",
        f"{plan.schedule_name.value}, {counts}, bubble {estimate.bubble_fraction:.1%}",
    )
    table = new_table(">pp rank", ">in flight", ">idle", "compute, as microbatch.chunk")
    fill(
        table,
        [_schedule_cells(plan, rank, console.width - BESIDE) for rank in range(plan.stages.pp)],
    )
    console.print(table)
    rate = f"{figures(estimate.tokens_per_second_per_gpu)} tokens/s per GPU, MFU {estimate.mfu:.1%}"
    console.print(f"Estimate: {figures(estimate.seconds * 1e3)} ms per step, {rate},")
    steps = count_of(plan.run.steps, "step")
    console.print(f"{figures(estimate.gpu_hours)} GPU hours for {steps},")
    console.print(_assumption(plan, estimate), style="dim")
    _print_times(plan, console)


def _print_times(plan: Plan, console: Console) -> None:
    """Print a step's time by kind of kernel, if planned from a hardware profile."""
    whole = plan.step_seconds
    rows = [(kind, time) for kind, time in plan.time_by_kind.items() if time > SHOWN * whole]
    if not rows:
        return
    console.print()
    which = "on the pipeline rank that idles least" if plan.stages.pp > 1 else "of a step"
    heading(console, "Where the time goes", which)
    table = new_table("what", ">ms", ">share")
    fill(table, [(kind, figures(time * 1e3), f"{time / whole:.1%}") for kind, time in rows])
    console.print(table)


def _assumption(plan: Plan, estimate: Estimate) -> str:
    """Return what the estimated times are based on."""
    if estimate.profile is not None:
        told = page("planning.md")
        said = f"by the speeds of {estimate.profile} (hardware.profile, {told})"
        if plan.profile is not None and plan.profile.scaled:
            said += f", {plan.profile.origin}: not measured"
        return f"{said}{_fp8_assumption(plan)}."
    peak = f"{estimate.efficiency:.0%} of the data sheet's {estimate.peak_tflops:,.0f} TFLOP/s"
    unused = ""
    if plan.run.hardware.profile is not None:
        unused = f": the profile has none for {plan.run.precision.params.value}"
    return f"if GEMMs reach {peak} (hardware.efficiency){unused}."


def _fp8_assumption(plan: Plan) -> str:
    """Return the speedups assumed for FP8 GEMMs that the profile has no speed of; empty if none."""
    fp8 = plan.run.precision.fp8
    if fp8.recipe is None or plan.profile is None:
        return ""
    assumed = []
    if fp8.by_library and fp8_tflops(plan.profile, fp8.recipe) is None:
        assumed.append(f"FP8 GEMMs {RECIPES[fp8.recipe].speedup:g} times")
    if Fp8Part.experts in fp8.include and plan.profile.fp8_grouped_tflops is None:
        assumed.append(f"FP8 GEMMs of experts {EXPERTS_SPEEDUP:g} times")
    if not assumed:
        return ""
    told = f"{' and '.join(assumed)} as fast as others ({page('fp8.md')})"
    return f"; assumed, not in the profile: {told}"


def _schedule_cells(plan: Plan, pp_rank: int, width: int) -> tuple[str, ...]:
    timeline = plan.timeline
    busy = sum(
        event.end - event.start
        for event in timeline.events[pp_rank]
        if isinstance(event.action, Compute)
    )
    actions = cut(compact(plan.schedule[pp_rank]), width, "…")
    return (
        str(pp_rank),
        str(timeline.peak_in_flight[pp_rank]),
        f"{1 - busy / timeline.makespan:.1%}",
        actions,
    )


def _print_graphs(plan: Plan, console: Console) -> None:
    graph = plan.run.cuda_graph
    match graph.impl:
        case GraphImpl.none:
            heading(console, "CUDA graphs", "none captured")
        case GraphImpl.full_iteration:
            update = " and the update" if graph.optimizer else ""
            what = f"one per rank: forward and backward of all microbatches{update}"
            heading(console, "CUDA graphs", what)
        case _:
            parts = ", ".join(part.value for part in graph.scope) or "whole layers"
            heading(
                console,
                "CUDA graphs",
                f"{parts}, by {graph.impl.value}, a set per {graph.key.value}",
            )
            table = new_table(">pp rank", ">graphs", ">slots", ">static inputs")
            found = [(r, g) for r, g in enumerate(plan.graphs) if g]
            fill(
                table,
                [
                    (str(r), f"{g.num_graphs:,}", str(g.num_slots), f"{g.num_static_inputs:,}")
                    for r, g in found
                ],
            )
            console.print(table)


def _print_verdict(plan: Plan, suggestions: Sequence[Suggestion], console: Console) -> None:
    busiest = plan.busiest
    spare = plan.gpu_memory - plan.busiest.total
    word, style = ("Fits", "bold green") if plan.fits else ("Does not fit", "bold red")
    rest = f"{gib(abs(spare))} GiB {'to spare' if plan.fits else 'too much'}"
    where = f" on pipeline rank {busiest.pp_rank}" if len(plan.memory) > 1 else ""
    console.print(
        Text.assemble(
            (word, style), f": {gib(busiest.total)} of {gib(plan.gpu_memory)} GiB{where}, {rest}."
        )
    )
    largest = sorted(busiest.parts, key=lambda part: -part.bytes)[:LARGEST]
    console.print(f"Largest: {', '.join(f'{part.name} {gib(part.bytes)}' for part in largest)}.")
    hardware = plan.run.hardware
    stated = None not in (hardware.gpu_memory_gib, hardware.peak_tflops)
    speed = f"{assumed_peak(plan.run):,.0f} TFLOP/s at {hardware.efficiency:.0%} efficiency"
    if plan.profile is not None:
        speed = f"speeds of {plan.profile.gpu} (hardware.profile)"
    source = "" if stated else " (an H100's, where hardware says nothing)"
    console.print(f"GPU: {gib(plan.gpu_memory)} GiB, {speed}{source}.", style="dim")
    if not plan.fits:
        _print_suggestions(suggestions, console)


def _print_suggestions(suggestions: Sequence[Suggestion], console: Console) -> None:
    console.print()
    if not suggestions:
        console.print("Nothing was found that makes it fit, not even more GPUs.")
        return
    heading(console, "What makes it fit", "each planned again, fastest first")
    _print_changes(suggestions, console)


def _print_changes(suggestions: Sequence[Suggestion], console: Console) -> None:
    table = new_table(">GiB", ">step", "overrides, and their cost")
    for suggestion in suggestions:
        text = Text.assemble(
            (" ".join(suggestion.overrides), "bold"), f"\n{suggestion.cost}", overflow="fold"
        )
        table.add_row(gib(suggestion.memory), signed_percent(suggestion.slowdown - 1), text)
    console.print(table)


PRINTERS: dict[str, Callable[[Plan, Console], None]] = {
    "groups": _print_groups,
    "stages": _print_stages,
    "schedule": _print_schedule,
    "graphs": _print_graphs,
    "memory": print_memory,
    DECODING: print_decoding,
}
