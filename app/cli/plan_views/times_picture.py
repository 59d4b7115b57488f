"""times.svg and times.png: a step's time by kind of kernel, a bar per pipeline rank."""

from __future__ import annotations

from pathlib import Path

from matplotlib import colormaps
from matplotlib.figure import Figure

from app.cli.plan_views.pictures import save_picture
from app.plan.cost.step_time import IDLE
from app.plan.formatting import figures
from app.planner.plan import Plan

WIDTH = 11.0  # inches
GREY = "#E4E4E4"  # idle
MOST_RANKS = 32  # bars; of more ranks, only the first and the last half as many


def save_times(plan: Plan, folder: Path) -> list[Path]:
    """Write both pictures into an existing folder, or none if times by kind are not known. Raises
    OSError.
    """
    return save_picture(times_figure(plan), folder, "times") if plan.times_of_ranks else []


def times_figure(plan: Plan) -> Figure:
    """Draw the picture."""
    ranks = list(enumerate(plan.times_of_ranks))
    if len(ranks) > MOST_RANKS:
        ranks = ranks[: MOST_RANKS // 2] + ranks[-(MOST_RANKS // 2) :]
    kinds = list(plan.time_by_kind)
    kinds = [*(kind for kind in kinds if kind != IDLE), IDLE]
    figure = Figure(figsize=(WIDTH, 1.9 + 0.32 * len(ranks)), layout="constrained")
    axes = figure.subplots()
    names = [str(pp_rank) for pp_rank, _ in ranks]
    left = [0.0] * len(ranks)
    colours = colormaps["tab20"].colors  # type: ignore[attr-defined]
    for place, kind in enumerate(kinds):
        widths = [found.get(kind, 0.0) * 1e3 for _, found in ranks]
        colour = GREY if kind == IDLE else colours[place % len(colours)]
        axes.barh(names, widths, left=left, color=colour, label=kind, height=0.8)
        left = [begun + width for begun, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set(xlabel="ms", ylabel="pipeline rank")
    axes.set_title(f"Where a step of {figures(plan.step_seconds * 1e3)} ms goes, as planned")
    figure.legend(loc="outside lower center", ncols=6, frameon=False, fontsize=8)
    return figure
