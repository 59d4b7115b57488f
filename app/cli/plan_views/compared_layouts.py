"""Table of what=layouts: layouts of a run on the same number of GPUs, fastest first."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from app.advice.layout_rows import LayoutComparison, LayoutRow
from app.cli.plan_views.rows import heading, new_table
from app.plan.formatting import amount, count_of, figures, gib

OWN = "the run as typed"
ALIKE = 1.005  # ratio of times up to which two layouts show the same number, and count as equal


def print_layouts(found: LayoutComparison, assumed: str, console: Console) -> None:
    """Print all layouts and the overrides of the fastest; `assumed`: what times are based on."""
    remark = f"on {count_of(found.world_size, 'GPU')}, fastest first; GPU hours of "
    heading(console, "Layouts", f"{remark}{amount(found.tokens)} tokens")
    slower = f"{found.slower_gb_s:g} GB/s"
    experts = any(row.dispatcher for row in found.rows)
    table = new_table(
        *(f">{name}" for name in ("#", *_degrees(found.rows[0], experts))),
        *(">GiB", ">ms", ">tokens/s", ">TFLOP/s", ">GPU h", ">days"),
        *(f">ms at {found.slower_gb_s:g}", ">GPU h"),
    )
    words = ("microbatches", "schedule", "recompute", "graphs")
    beside = new_table(">#", *words, *(["tokens by"] if experts else []))
    for number, row in enumerate(found.rows, 1):
        style = "bold" if row.own else ""
        name = f"{'→ ' if row.own else ''}{number if row.fits else '–'}"
        table.add_row(name, *_degrees(row, experts).values(), *_numbers(row), style=style)
        beside.add_row(name, *_companions(row)[: len(beside.columns) - 1], style=style)
    console.print(table)
    console.print()
    console.print(beside)
    console.print(
        f"→ is {OWN}. pp 16×2: two stages per rank. Microbatches: sequences × number per rank.",
        style="dim",
    )
    console.print()
    console.print(_verdict(found))
    for name, row in _best(found):
        console.print()
        console.print(f"{name}:", style="bold")
        console.print(" ".join(row.overrides), soft_wrap=True)  # no line breaks: to be copied
    console.print()
    searched = f"{count_of(found.planned, 'layout')} planned"
    rest = "" if found.complete else "; the search stopped there, and others may be as fast"
    speeds = f"{found.network_gb_s:g} GB/s per GPU (hardware.network_gb_s), beside it {slower}"
    console.print(f"{searched}{rest}. Network: {speeds}. Times {assumed}", style="dim")


def _degrees(row: LayoutRow, experts: bool) -> dict[str, str]:
    stages = f"{row.pp}×{row.vpp}" if row.vpp > 1 else str(row.pp)
    found = {"dp": str(row.dp), "tp": str(row.tp), "cp": str(row.cp), "pp": stages}
    return found | ({"ep": str(row.ep), "etp": str(row.etp)} if experts else {})


def _numbers(row: LayoutRow) -> tuple[str, ...]:
    return (
        gib(row.memory) if row.fits else f"{gib(row.memory)}!",
        _short(row.cost.seconds * 1e3),
        amount(row.cost.tokens_per_second),
        figures(row.cost.tflops_per_gpu),
        _hours(row.cost.gpu_hours),
        _short(row.cost.days),
        _short(row.slower.seconds * 1e3),
        _hours(row.slower.gpu_hours),
    )


def _hours(number: float) -> str:
    """Format GPU hours: 4.36 M, 12.3."""
    if number < 1000:
        return _short(number)
    count, unit = amount(number).split()
    return f"{figures(float(count))} {unit}"


def _short(number: float) -> str:
    """Format like `figures`, but small numbers with two digits."""
    return figures(number) if number >= 1 else f"{number:.2g}"


def _companions(row: LayoutRow) -> tuple[str, str, str, str, str]:
    again = {"full": "whole layers"}
    return (
        f"{row.micro_batch} × {row.microbatches}",
        row.schedule,
        ", ".join(again.get(part, part) for part in row.recompute) or "nothing",
        row.graphs,
        row.dispatcher or "",
    )


def _verdict(found: LayoutComparison) -> Text:
    """Return how the run compares with the fastest, and which layout is fastest on the slower
    network.
    """
    best, robust = found.fastest, found.fastest_slower
    if best is None or robust is None:
        return Text("No layout of these GPUs fits: use more GPUs, or GPUs with more memory.")
    own = next(row for row in found.rows if row.own)
    if not own.fits:
        said = f"{OWN.capitalize()} does not fit (!)."
    elif own.cost.seconds < ALIKE * best.cost.seconds:
        said = f"No layout was found that is faster than {OWN}."
    else:
        times = own.cost.seconds / best.cost.seconds
        said = f"{OWN.capitalize()} takes {times:.2f} times as long as the fastest."
    place = found.rows.index(robust) + 1
    which = "the same layout is fastest" if robust is best else f"number {place} is fastest"
    return Text(f"{said} At {found.slower_gb_s:g} GB/s {which}.")


def _best(found: LayoutComparison) -> Iterator[tuple[str, LayoutRow]]:
    best, robust = found.fastest, found.fastest_slower
    if best is not None and best.overrides:
        yield "Overrides of the fastest", best
    if robust is not None and robust is not best and robust.overrides:
        yield f"Overrides of the fastest at {found.slower_gb_s:g} GB/s", robust
