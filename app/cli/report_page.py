"""A report as one HTML file: a table, loss curves and throughput; pictures are inside, so it opens without a network."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from html import escape
from io import BytesIO
from typing import Any

import matplotlib
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from app.cli.report import COLUMNS, Report, Row, cells
from app.cli.sweep_record import State

POINTS = 500  # of a curve that are drawn at most
FEW = 10  # runs that have colours of their own; more take theirs from a scale, best first
BAR_IN, TOP_IN, WIDTH_IN = 0.28, 0.9, 10.0  # inches of a bar, of a picture's margins, of its width
SKIPPED_COLOUR = "transparent"
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 1100px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: .2rem; }  h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p { margin: .2rem 0; }  .quiet { color: #666; }  code { background: #f4f4f4; padding: .1em .3em; overflow-wrap: anywhere; }
table { border-collapse: collapse; width: 100%; margin-top: 1rem; }
th { text-align: left; color: #666; font-weight: normal; border-bottom: 1px solid #999; }
th, td { padding: .3rem .6rem; vertical-align: top; }  tr + tr td { border-top: 1px solid #e5e5e5; }
.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.label { overflow-wrap: anywhere; min-width: 12rem; padding-left: 1.6rem; text-indent: -1.3em; }
.colour { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin-right: .5em; text-indent: 0; }
.failed, .interrupted { color: #a11; }  .skipped, .waiting, .unfinished { color: #666; }
img { width: 100%; height: auto; }  .wide { overflow-x: auto; }
"""


def page(report: Report) -> str:
    """The whole file."""
    rows, colours = report.rows, _colours(report.rows)
    body = [f"<h1>{escape(report.title)}</h1>", f'<p class="quiet">{escape(_summary(rows))}</p>']
    if report.command and report.began:
        began = report.began.replace("T", " ")
        body.append(f'<p class="quiet">Begun {began} by <code>{escape(report.command)}</code></p>')
    body += [_table(rows, colours), '<p class="quiet">' + escape(LEGEND) + "</p>"]
    drawn = [(row, colour) for row, colour in zip(rows, colours, strict=True) if row.facts.curve]
    if drawn:
        body += ["<h2>Loss</h2>", _picture(_losses(drawn), "Loss of every run by step")]
        body += ["<h2>Throughput</h2>", _picture(_throughput(drawn), "Tokens per second of every run")]
    head = f'<meta charset="utf-8"><title>{escape(report.title)}</title><style>{STYLE}</style>'
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body>\n' + "\n".join(body) + "\n</body></html>\n"


LEGEND = (
    "Best loss first. Loss in nats per token: the last validation's; * of the last step. Tokens/s of all ranks and model TFLOP/s "
    "per rank: median over the second half of the steps. Peak: memory of the rank that needed most."
)


def _summary(rows: Sequence[Row]) -> str:
    counts = {state: sum(row.state is state for row in rows) for state in State}
    told = [f"{count} {state.value}" for state, count in counts.items() if count]
    return f"{len(rows)} run{'s' * (len(rows) != 1)}: {', '.join(told)}"


def _table(rows: Sequence[Row], colours: Sequence[str]) -> str:
    last = len(COLUMNS) - 1
    head = "".join(f"<th{_class('number') if 0 < n < last else ''}>{escape(name)}</th>" for n, name in enumerate(COLUMNS))
    lines = "\n".join(map(_line, rows, colours))
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>\n{lines}\n</tbody></table></div>'


def _line(row: Row, colour: str) -> str:
    label, *numbers, state = map(escape, cells(row))
    square = f'<span class="colour" style="background:{colour}"></span>'
    measured = "".join(f"<td{_class('number')}>{number}</td>" for number in numbers)
    return f"<tr><td{_class('label')}>{square}{label}</td>{measured}<td{_class(row.state.value)}>{state}</td></tr>"


def _class(name: str) -> str:
    return f' class="{name}"'


def _colours(rows: Sequence[Row]) -> list[str]:
    """One per row; runs without a curve have none."""
    drawn = [row for row in rows if row.facts.curve]
    few, scale = matplotlib.colormaps["tab10"], matplotlib.colormaps["viridis"]
    found = [to_hex(few(n) if len(drawn) <= FEW else scale(0.95 * n / (len(drawn) - 1))) for n in range(len(drawn))]
    of_row = dict(zip((row.name for row in drawn), found, strict=True))
    return [of_row.get(row.name, SKIPPED_COLOUR) for row in rows]


def _losses(drawn: Sequence[tuple[Row, str]]) -> Figure:
    """Thin: training; dotted with marks: validation."""
    figure = Figure(figsize=(WIDTH_IN, 4.5), layout="constrained")
    axes = figure.subplots()
    for row, colour in reversed(drawn):  # the best on top
        axes.plot(*_columns(thinned(row.facts.curve)), color=colour, linewidth=0.9, alpha=0.8)
        axes.plot(*_columns(row.facts.validations), "o:", color=colour, markersize=4)
    axes.set(xlabel="step", ylabel="nats per token (line: training, marks: validation)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _plain(axes)
    return figure


def _throughput(drawn: Sequence[tuple[Row, str]]) -> Figure:
    figure = Figure(figsize=(WIDTH_IN, TOP_IN + BAR_IN * len(drawn)), layout="constrained")
    axes = figure.subplots()
    rates, colours = [row.facts.tokens_per_s or 0 for row, _ in drawn], [colour for _, colour in drawn]
    axes.barh(range(len(drawn)), rates, color=colours, height=0.7)
    axes.set_yticks(range(len(drawn)), [_cut(row.label) for row, _ in drawn], fontsize=8)
    axes.set(xlabel="tokens/s", ylim=(len(drawn) - 0.5, -0.5))
    _plain(axes)
    return figure


def thinned(points: Sequence[tuple[int, float]]) -> Sequence[tuple[int, float]]:
    """At most about POINTS of them, evenly, the last included."""
    stride = -(-len(points) // POINTS)
    return points if stride <= 1 else [*points[:-1:stride], points[-1]]


def _columns(points: Iterable[tuple[int, float]]) -> tuple[list[int], list[float]]:
    pairs = list(points)
    return [step for step, _ in pairs], [loss for _, loss in pairs]


def _cut(label: str) -> str:
    return label if len(label) <= 48 else f"{label[:47]}…"


def _plain(axes: Any) -> None:
    axes.set_axisbelow(True)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _picture(figure: Figure, what: str) -> str:
    """An SVG inside an <img>: its names cannot meet those of another."""
    file = BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "graphfold"}):
        figure.savefig(file, format="svg", metadata={"Date": None})
    return f'<img alt="{escape(what)}" src="data:image/svg+xml;base64,{base64.b64encode(file.getvalue()).decode()}">'
