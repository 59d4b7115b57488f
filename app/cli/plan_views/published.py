"""Table of compare_to=: a planned run beside a published speed, part by part."""

from __future__ import annotations

from rich.console import Console

from app.advice.published import PublishedGap
from app.cli.plan_views.rows import fill, heading, new_table
from app.plan.formatting import figures

SHOWN = 0.005  # smallest share of a step that has a row


def print_published(found: PublishedGap, assumed: str, console: Console) -> None:
    """Print the gap, whether the plan can tell it from its error, and the parts."""
    heading(console, "Published and planned", "model TFLOP/s per GPU")
    for line in gap_lines(found):
        console.print(line)
    console.print()
    table = new_table("part", ">ms", ">share", ">as published at")
    shown = [each for each in found.parts if each.seconds > SHOWN * found.planned_seconds]
    fill(
        table,
        [
            (
                each.name,
                figures(each.seconds * 1e3),
                f"{each.seconds / found.planned_seconds:.1%}",
                "—" if each.closes is None else f"× {each.closes:.2f}",
            )
            for each in shown
        ],
    )
    console.print(table)
    note = "as published at: what this part alone would take, as a multiple, to close the gap"
    console.print(f"{note}; —: it cannot.", style="dim")
    console.print(f"Times {assumed}", style="dim")


def gap_lines(found: PublishedGap) -> list[str]:
    """Return the numbers and the verdict, in words."""
    gap = found.gap
    share = abs(gap) / found.published_seconds
    word = "longer" if gap > 0 else "shorter"
    median, most = found.errors
    why = f" ({'; '.join(found.reasons)})" if found.reasons else ""
    low, high = found.low_tflops, found.high_tflops
    return [
        f"published {figures(found.published_tflops)}, planned {figures(found.planned_tflops)}:"
        f" the planned step is {figures(abs(gap) * 1e3)} ms ({share:.1%}) {word}",
        f"planned range {figures(low)} to {figures(high)}: error {median:.0%} in the median,"
        f" {most:.0%} in nine of ten cases{why}",
        _verdict(found),
        f"planned FLOPs per token: {figures(found.flops_per_token / 1e9)} G; a number that counts"
        " others is to be scaled first",
    ]


def _verdict(found: PublishedGap) -> str:
    if found.explained:
        return "The published number is within that range: the plan cannot tell the two apart."
    if found.published_tflops > found.high_tflops:
        return (
            "The published number is above that range: that run hides or saves work that these"
            " overrides do not, or its kernels are faster than the profile's."
        )
    return (
        "The published number is below that range: that run loses time that the plan does not"
        " see, as in hosts, networks, stragglers or uneven experts."
    )
