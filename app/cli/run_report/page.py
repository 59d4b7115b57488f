"""Report as one HTML file: table, loss curves, throughput and memory.

Pictures are embedded, so the page needs no network.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from html import escape
from io import BytesIO
from math import isfinite
from typing import Any

import matplotlib
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from app.cli.run_report.sweep_record import JobState
from app.cli.run_report.table import COLUMNS, Report, Row, cells
from app.plan.formatting import drawable, figures, literal_text

POINTS = 500  # most points drawn of a curve
FEW = 10  # up to so many runs have distinct colours; more are coloured by a scale, best first
BAR_IN, TOP_IN, WIDTH_IN = 0.28, 0.9, 10.0  # inches: a bar, a picture's margins, its width
LABEL = 60  # most characters of a run's label in a picture
SMALL, LINE_IN = 8, 0.19  # size of labels, points; height of one line of labels, inches
SKIPPED_COLOUR = "transparent"
Curve = Sequence[tuple[int, float]]  # (step, loss)
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; }
body { max-width: 1100px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: .2rem; }  h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p { margin: .2rem 0; }  .quiet { color: #666; }
code { background: #f4f4f4; padding: .1em .3em; overflow-wrap: anywhere; }
table { border-collapse: collapse; width: 100%; margin-top: 1rem; }
th { text-align: left; color: #666; font-weight: normal; border-bottom: 1px solid #999; }
th, td { padding: .3rem .6rem; vertical-align: top; }  tr + tr td { border-top: 1px solid #e5e5e5; }
.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.label { overflow-wrap: anywhere; min-width: 12rem; padding-left: 1.6rem; text-indent: -1.3em; }
.colour { display: inline-block; width: .8em; height: .8em; border-radius: 2px; }
.colour { margin-right: .5em; text-indent: 0; }
.failed, .interrupted { color: #a11; }  .skipped, .waiting, .unfinished { color: #666; }
img { width: 100%; height: auto; }  .wide { overflow-x: auto; }
"""


@literal_text()
def page(report: Report) -> str:
    """Return the HTML file."""
    rows = report.rows
    colours = _colours(report.rows)
    body = [f"<h1>{escape(report.title)}</h1>", _quiet(_summary(rows))]
    if report.command and report.began:
        began = report.began.replace("T", " ")
        body.append(f'<p class="quiet">Begun {began} by <code>{escape(report.command)}</code></p>')
    body.append(_table(rows, colours))
    drawn = [(row, colour) for row, colour in zip(rows, colours, strict=True) if row.facts.curve]
    if drawn:
        body += ["<h2>Loss</h2>", _quiet(LOSSES)]
        body.append(_picture(_losses(drawn), "Loss of every run by step"))
        body += [
            "<h2>Throughput</h2>",
            _picture(_throughput(drawn), "Tokens per second of every run"),
        ]
    measured = [(row, colour) for row, colour in drawn if row.facts.memory_peak_gib is not None]
    if measured:
        body += ["<h2>Memory</h2>", _quiet(PLANNED)]
        body.append(_picture(_memory(measured), "Peak memory of every run"))
    head = f'<meta charset="utf-8"><title>{escape(report.title)}</title><style>{STYLE}</style>'
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body>\n'
        + "\n".join(body)
        + "\n</body></html>\n"
    )


LEGEND = (
    "Best loss first. Loss in nats per token: of the last validation; with *, of the last step. "
    "Tokens/s of all ranks and model TFLOP/s "
    "per rank: median over the second half of the steps. Peak: memory of the rank that needed most."
)
LOSSES = "The first tenth of the steps may lie above the plot."
PLANNED = "Peak of the rank that needed most; planned: tensors according to plan.json."


def _quiet(text: str) -> str:
    return f'<p class="quiet">{escape(text)}</p>'


def _summary(rows: Sequence[Row]) -> str:
    counts = {state: sum(row.state is state for row in rows) for state in JobState}
    told = [f"{count} {state.value}" for state, count in counts.items() if count]
    return f"{len(rows)} run{'s' * (len(rows) != 1)}: {', '.join(told)}"


def _table(rows: Sequence[Row], colours: Sequence[str]) -> str:
    """Return the table of results and the explanation of its columns."""
    last = len(COLUMNS) - 1
    head = "".join(
        f"<th{_class('number') if 0 < n < last else ''}>{escape(name)}</th>"
        for n, name in enumerate(COLUMNS)
    )
    lines = "\n".join(map(_line, rows, map(cells, rows), colours))
    table = f"<table><thead><tr>{head}</tr></thead><tbody>\n{lines}\n</tbody></table>"
    return f'<div class="wide">{table}</div>\n{_quiet(LEGEND)}'


def _line(row: Row, texts: Sequence[str], colour: str) -> str:
    label, *numbers, state = map(escape, texts)
    square = f'<span class="colour" style="background:{colour}"></span>'
    measured = "".join(f"<td{_class('number')}>{number}</td>" for number in numbers)
    named = f"<td{_class('label')}>{square}{label}</td>"
    return f"<tr>{named}{measured}<td{_class(row.state.value)}>{state}</td></tr>"


def _class(name: str) -> str:
    return f' class="{name}"'


def _colours(rows: Sequence[Row]) -> list[str]:
    """Return a colour per row; empty for runs without a curve."""
    drawn = [row for row in rows if row.facts.curve]
    few = matplotlib.colormaps["tab10"]
    scale = matplotlib.colormaps["viridis"]
    found = [
        to_hex(few(n) if len(drawn) <= FEW else scale(0.95 * n / (len(drawn) - 1)))
        for n in range(len(drawn))
    ]
    of_row = dict(zip((row.name for row in drawn), found, strict=True))
    return [of_row.get(row.name, SKIPPED_COLOUR) for row in rows]


def _losses(drawn: Sequence[tuple[Row, str]]) -> Figure:
    """Plot losses: lines for training, marks for validation. Of many runs the legend names the best
    and the worst.
    """
    curves = [row.facts.curve for row, _ in drawn]
    low, high = shown([*curves, *(row.facts.validations for row, _ in drawn)])
    named = drawn if len(drawn) <= FEW else [drawn[0], drawn[-1]]
    lines = len(named) // 2 + 1  # lines of the legend
    figure = Figure(figsize=(WIDTH_IN, 4.5 + LINE_IN * lines), layout="constrained")
    axes = figure.subplots()
    for row, colour in reversed(drawn):  # the best is drawn last, on top
        steps, losses = _columns(thinned(row.facts.curve))
        axes.plot(steps, losses, color=colour, linewidth=1.3)
        axes.plot(*_columns(row.facts.validations), "o", color=colour, markersize=3)
    margin = (high - low) / 20 or 1.0
    axes.set(xlabel="step", ylabel="loss, nats per token", ylim=(low - margin, high + margin))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _plain(axes)
    handles = [Line2D([], [], color=colour, linewidth=2) for _, colour in named]
    line = Line2D([], [], color="gray")
    marks = Line2D([], [], color="gray", marker="o", linestyle="")
    texts = [*(_cut(row.label) for row, _ in named), "training", "validation"]
    figure.legend([*handles, line, marks], texts, loc="outside lower left", ncols=2, fontsize=SMALL)
    return figure


def shown(curves: Sequence[Curve]) -> tuple[float, float]:
    """Return the lowest and highest loss to plot, so that the ends of the curves can be told apart.

    The first tenth of each curve, where all fall steeply, may lie above the plot.
    """
    late = [loss for curve in curves for step, loss in curve if step > curve[-1][0] / 10]
    losses = [loss for loss in late if isfinite(loss)]
    return min(losses, default=0.0), max(losses, default=0.0)


def _throughput(drawn: Sequence[tuple[Row, str]]) -> Figure:
    pairs = [(row.facts.tokens_per_s, row.facts.tokens_per_s_planned) for row, _ in drawn]
    return _bars(drawn, "tokens/s", pairs)


def _memory(drawn: Sequence[tuple[Row, str]]) -> Figure:
    on_cpu = not all(row.facts.on_gpu for row, _ in drawn)
    beside = "; on the CPU: all memory of the process, but the plan counts tensors only"
    pairs = [(row.facts.memory_peak_gib, row.facts.memory_planned_gib) for row, _ in drawn]
    return _bars(drawn, f"GiB at the peak{beside * on_cpu}", pairs)


def _bars(
    drawn: Sequence[tuple[Row, str]],
    unit: str,
    pairs: Sequence[tuple[float | None, float | None]],
) -> Figure:
    """Plot a bar per run, filled, and an outlined one for what was planned, if anything was."""
    planned = any(plan is not None for _, plan in pairs)
    inches = TOP_IN + BAR_IN * (1.6 if planned else 1.0) * len(drawn)
    figure = Figure(figsize=(WIDTH_IN, inches), layout="constrained")
    axes = figure.subplots()
    places = ((-0.2, 0.36), (0.2, 0.36)) if planned else ((0.0, 0.7), (0.0, 0.0))
    for number, ((_, colour), pair) in enumerate(zip(drawn, pairs, strict=True)):
        for value, face, (place, height) in zip(pair, (colour, "none"), places, strict=True):
            if value is not None:
                bar = axes.barh(number + place, value, color=face, edgecolor=colour, height=height)
                axes.bar_label(bar, [figures(value)], padding=3, fontsize=SMALL)
    if planned:
        kinds = [Patch(facecolor=face, edgecolor="gray") for face in ("gray", "none")]
        names = ["measured", "planned"]
        figure.legend(kinds, names, loc="outside upper right", ncols=2, fontsize=SMALL)
    axes.set_yticks(range(len(drawn)), [_cut(row.label) for row, _ in drawn], fontsize=SMALL)
    axes.set(xlabel=unit, ylim=(len(drawn) - 0.5, -0.5))
    axes.margins(x=0.08)  # room for numbers
    axes.xaxis.set_major_formatter("{x:,g}")
    _plain(axes)
    return figure


def thinned(points: Curve) -> Curve:
    """Return about POINTS evenly spaced points at most, including the last."""
    stride = -(-len(points) // POINTS)
    return points if stride <= 1 else [*points[:-1:stride], points[-1]]


def _columns(points: Iterable[tuple[int, float]]) -> tuple[list[int], list[float]]:
    pairs = list(points)
    return [step for step, _ in pairs], [loss for _, loss in pairs]


def _cut(label: str) -> str:
    shown = drawable(label)
    return shown if len(shown) <= LABEL else f"{shown[: LABEL - 1]}…"


def _plain(axes: Any) -> None:
    axes.set_axisbelow(True)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _picture(figure: Figure, what: str) -> str:
    """Embed an SVG as <img>, in which its ids cannot clash with those of other pictures."""
    file = BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "graphfold"}):
        figure.savefig(file, format="svg", metadata={"Date": None})
    return (
        f'<img alt="{escape(what)}" '
        f'src="data:image/svg+xml;base64,{base64.b64encode(file.getvalue()).decode()}">'
    )
