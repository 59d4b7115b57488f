"""timeline.svg and timeline.png: a row per pipeline rank, a bar per action, grey while it idles.

Of a step with too many bars only the beginning and the end are shown, where the pipeline fills and
drains.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from app.cli.plan_views.pictures import Colour, ink, save_picture, whitened
from app.plan.actions import Backward, BackwardInput, BackwardWeight, Compute, Forward
from app.plan.formatting import count_of, figures
from app.plan.pipeline.timeline import Event
from app.planner.plan import Plan

# Okabe and Ito's palette, legible with every kind of colour vision and mostly in black and white
KINDS: tuple[tuple[type[Compute], str, str], ...] = (
    (Forward, "forward", "#0072B2"),
    (Backward, "backward", "#E69F00"),
    (BackwardInput, "backward, inputs", "#D55E00"),
    (BackwardWeight, "backward, weights", "#009E73"),
)
IDLE = "#E4E4E4"
# share of white in the last chunk's colour; additional white for every other microbatch
CHUNK_WHITE, ODD_WHITE = 0.5, 0.14
HEIGHT = 0.84  # of a bar, in rows
MOST_BARS = 160  # per row; of more, two windows with half as many each
RASTER_BARS = 4000  # in one pair of axes; more are stored as pixels in the SVG
WIDTH, FONT, TITLE_FONT = 13.0, 7.0, 11.0  # inches, points, points


@dataclass(frozen=True, slots=True)
class Window:
    """A shown part of the step, ms."""

    start: float
    end: float
    title: str  # empty if the window shows the full step


def save_timeline(plan: Plan, folder: Path) -> list[Path]:
    """Write both pictures of a plan's timeline into an existing folder. Raises OSError."""
    return save_picture(timeline_figure(plan), folder, "timeline")


def timeline_figure(plan: Plan) -> Figure:
    """Draw the picture, with one pair of axes per window."""
    pp = plan.stages.pp
    views = windows(plan)
    figure = Figure(figsize=(WIDTH, 1.5 + pp * max(0.2, min(0.45, 12 / pp))), layout="constrained")
    all_axes = figure.subplots(1, len(views), sharey=True, squeeze=False)[0]
    for axes, view in zip(all_axes, views, strict=True):
        _draw(axes, plan, view)
    all_axes[0].set_ylabel("pipeline rank")
    figure.suptitle(title(plan), fontsize=TITLE_FONT)
    figure.legend(
        handles=_legend(plan), loc="outside lower center", ncols=8, frameon=False, fontsize=8
    )
    return figure


def title(plan: Plan) -> str:
    """Return the title: schedule, sizes, bubble and estimated time of a step."""
    stages = f", {plan.stages.vpp} stages each" if plan.stages.vpp > 1 else ""
    what = f"{plan.schedule_name.value}: {count_of(plan.stages.pp, 'pipeline rank')}{stages}"
    line = plan.timeline
    counts = count_of(plan.run.num_microbatches, "microbatch", "microbatches")
    drawn, whole = figures(line.makespan * 1e3), figures(plan.step_seconds * 1e3)
    ms = whole if drawn == whole else f"{drawn} of {whole}"  # reduction and update are not drawn
    return f"{what}, {counts}, bubble {line.bubble_fraction:.1%}, {ms} ms per step (estimated)"


def windows(plan: Plan) -> list[Window]:
    """Return one window over the full step, or two over its beginning and its end."""
    whole = plan.timeline.makespan * 1e3
    bars = max(map(len, plan.schedule))
    if bars <= MOST_BARS:
        return [Window(0.0, whole, "")]
    part = whole * MOST_BARS / 2 / bars
    shown = figures(part)
    return [
        Window(0.0, part, f"first {shown} ms of {figures(whole)}"),
        Window(whole - part, whole, f"last {shown} ms"),
    ]


def _draw(axes: Any, plan: Plan, view: Window) -> None:
    rows = [list(_visible(events, view)) for events in plan.timeline.events]
    raster = sum(map(len, rows)) > RASTER_BARS
    total = plan.timeline.makespan * 1e3
    points = WIDTH * 72 * 0.9 / (view.end - view.start) * (0.5 if view.title else 1)  # per ms
    for rank, events in enumerate(rows):
        axes.add_patch(Rectangle((0, rank - HEIGHT / 2), total, HEIGHT, color=IDLE, linewidth=0))
        fills = [colour(action, plan.stages.vpp) for action, _ in events]
        corners = [_corners(event, rank) for _, event in events]
        axes.add_collection(
            PolyCollection(corners, facecolors=fills, linewidths=0, rasterized=raster),
            autolim=False,
        )
        for (action, event), fill in zip(events, fills, strict=True):
            _number(axes, action, event, rank=rank, fill=fill, points=points)
    axes.set(
        xlim=(view.start, view.end), ylim=(len(rows) - 0.5, -0.5), xlabel="ms", title=view.title
    )
    axes.title.set_fontsize(9)
    axes.set_yticks(range(0, len(rows), 1 if len(rows) <= 32 else 8))
    axes.tick_params(labelsize=8, length=0)
    axes.spines[:].set_visible(False)


def _visible(events: tuple[Event, ...], view: Window) -> Iterator[tuple[Compute, Event]]:
    """Yield the compute actions within the window."""
    for event in events:
        if (
            isinstance(event.action, Compute)
            and event.end * 1e3 > view.start
            and event.start * 1e3 < view.end
        ):
            yield event.action, event


def _corners(event: Event, rank: int) -> list[tuple[float, float]]:
    start = event.start * 1e3
    end = event.end * 1e3
    low = rank - HEIGHT / 2
    high = rank + HEIGHT / 2
    return [(start, low), (start, high), (end, high), (end, low)]


def colour(action: Compute, num_chunks: int) -> Colour:
    """Return hue by kind, lighter for later chunks and slightly lighter for odd microbatches."""
    base = next(value for kind, _, value in KINDS if type(action) is kind)
    white = CHUNK_WHITE * action.chunk / max(1, num_chunks - 1) + ODD_WHITE * (action.mb % 2)
    return whitened(base, white)


def _number(
    axes: Any, action: Compute, event: Event, rank: int, fill: Colour, points: float
) -> None:
    """Draw the microbatch's number if its digits have room."""
    text = str(action.mb)
    middle = (event.start + event.end) / 2 * 1e3
    if (event.end - event.start) * 1e3 * points > FONT * 0.62 * len(text) + 3:
        axes.text(
            middle,
            rank,
            text,
            ha="center",
            va="center",
            fontsize=FONT,
            color=ink(fill),
            clip_on=True,
        )


def _legend(plan: Plan) -> list[Patch]:
    """Return a patch per kind and chunk that the step has, and one for idle time."""
    vpp = plan.stages.vpp
    used = {type(action) for actions in plan.schedule for action in actions}
    chunks = sorted({0, vpp // 2, vpp - 1} if vpp > 4 else range(vpp))
    found = [
        Patch(
            color=colour(kind(0, chunk), vpp), label=f"{name}, chunk {chunk}" if vpp > 1 else name
        )
        for kind, name, _ in KINDS
        if kind in used
        for chunk in chunks
    ]
    return [*found, Patch(color=IDLE, label="idle")]
