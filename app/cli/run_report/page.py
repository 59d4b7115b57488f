"""Report as one HTML file, in which runs are chosen: table, loss, throughput and memory.

Numbers, styles and script are in the file, which needs no network and is not allowed to use one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from math import isfinite
from typing import Any

from app.cli.run_report.facts import RunFacts
from app.cli.run_report.page_script import SCRIPT, STYLE
from app.cli.run_report.sweep_record import JobState
from app.cli.run_report.table import Report, Row, loss_text, standing
from app.plan.formatting import figures

POINTS = 500  # most points drawn of a curve
# up to so many runs have distinct colours; more are coloured by a scale, best first
DISTINCT = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f",
            "#bcbd22", "#17becf")  # fmt: skip
SCALE = ("#440154", "#3b528b", "#21918c", "#5ec962", "#dde318")  # viridis, without its brightest
Curve = Sequence[tuple[int, float]]  # (step, loss)
Pair = tuple[float | None, float | None]  # measured, planned
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
LEGEND = (
    "Best loss first. Loss in nats per token: of the last validation; with *, of the last step. "
    "Tokens/s of all ranks and model TFLOP/s per rank: median over the second half of the steps. "
    "Memory of the rank that needed most; planned: tensors according to plan.json."
)
ON_CPU = "On the CPU it is all memory of the process, but the plan counts tensors only."
LOSSES = "Lines: training; dots: validation. The first tenth of the steps may lie above the plot."
BARS = "Filled: measured; outlined: planned."
CHOICE = """<p id="choice" hidden><label><input type="checkbox" id="all" checked> all runs</label>
<label><input type="checkbox" id="only"> only the chosen ones in the table</label></p>
<noscript><p class="quiet">The plots, and choosing runs, need JavaScript.</p></noscript>"""
PLOTS = f"""<h2>Loss</h2>
<p class="quiet">{LOSSES}</p>
<svg id="losses" height="380" role="img" aria-label="Loss of the chosen runs by step">
</svg>
<p class="quiet" id="near">&nbsp;</p>
<h2>Throughput, tokens/s</h2>
<p class="quiet">{BARS}</p>
<div class="bars" id="rates"></div>"""


@dataclass(frozen=True, slots=True)
class Column:
    """Numbers of the table; those of all runs may be missing, and so is the column then."""

    group: str  # heading over columns that belong together
    name: str
    cell: Callable[[RunFacts], str]


def _number(value: float | None) -> str:
    return "" if value is None else figures(value)


def _of_plan(pair: Pair) -> str:
    """Return the measured share of what was planned, in per cent."""
    measured, planned = pair
    return f"{measured / planned:.0%}" if measured is not None and planned else ""


def rates(facts: RunFacts) -> Pair:
    """Return tokens per second, measured and planned."""
    return facts.tokens_per_s, facts.tokens_per_s_planned


def peaks(facts: RunFacts) -> Pair:
    """Return peak memory in GiB, measured and planned."""
    return facts.memory_peak_gib, facts.memory_planned_gib


COLUMNS = (
    Column("tokens/s", "measured", lambda facts: _number(facts.tokens_per_s)),
    Column("tokens/s", "planned", lambda facts: _number(facts.tokens_per_s_planned)),
    Column("tokens/s", "of plan", lambda facts: _of_plan(rates(facts))),
    Column("TFLOP/s", "per rank", lambda facts: _number(facts.tflops_per_gpu)),
    Column("memory, GiB", "peak", lambda facts: _number(facts.memory_peak_gib)),
    Column("memory, GiB", "planned", lambda facts: _number(facts.memory_planned_gib)),
    Column("memory, GiB", "of plan", lambda facts: _of_plan(peaks(facts)) if facts.on_gpu else ""),
    Column("memory, GiB", "reserved", lambda facts: _number(facts.memory_reserved_gib)),
    Column("energy", "J/token", lambda facts: _number(facts.joules_per_token)),
)


def page(report: Report) -> str:
    """Return the HTML file."""
    rows = report.rows
    colours = _colours(rows)
    drawn = [row for row in rows if row.facts.curve]
    body = [f"<h1>{escape(report.title)}</h1>", _quiet(_summary(rows))]
    if report.command and report.began:
        began = escape(report.began.replace("T", " "))
        body.append(f'<p class="quiet">Begun {began} by <code>{escape(report.command)}</code></p>')
    body += [CHOICE] if drawn else []
    body.append(_table(rows, colours))
    if drawn:
        body.append(PLOTS)
    if any(row.facts.memory_peak_gib is not None for row in drawn):
        told = BARS if all(row.facts.on_gpu for row in drawn) else f"{BARS} {ON_CPU}"
        body += ["<h2>Memory, GiB at the peak</h2>", _quiet(told), '<div class="bars" id="memory">']
        body.append("</div>")
    if drawn:
        body += [_data(rows, colours), f"<script>{SCRIPT}</script>"]
    head = (
        f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f"<title>{escape(report.title)}</title><style>{STYLE}</style>"
    )
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body>\n'
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def _quiet(text: str) -> str:
    return f'<p class="quiet">{escape(text)}</p>'


def _summary(rows: Sequence[Row]) -> str:
    counts = {state: sum(row.state is state for row in rows) for state in JobState}
    told = [f"{count} {state.value}" for state, count in counts.items() if count]
    return f"{len(rows)} run{'s' * (len(rows) != 1)}: {', '.join(told)}"


def _table(rows: Sequence[Row], colours: Sequence[str | None]) -> str:
    """Return the table of results and the explanation of its columns."""
    columns = [each for each in COLUMNS if any(each.cell(row.facts) for row in rows)]
    groups = [each.group for each in columns]
    spans = "".join(
        f'<th class="group" colspan="{groups.count(name)}">{escape(name)}</th>'
        for name in dict.fromkeys(groups)
    )
    names = "".join(f'<th class="number">{escape(each.name)}</th>' for each in columns)
    head = (
        f'<tr><th></th>{spans}<th class="group" colspan="2">loss</th><th></th></tr>'
        f'<tr><th>run</th>{names}<th class="number">last</th>'
        '<th class="number">to best</th><th>state</th></tr>'
    )
    best = min((loss for row in rows if (loss := _compared(row)) is not None), default=0.0)
    lines = "\n".join(
        _line(row, columns, colour, best=best) for row, colour in zip(rows, colours, strict=True)
    )
    table = f"<table><thead>{head}</thead><tbody>\n{lines}\n</tbody></table>"
    return f'<div class="wide">{table}</div>\n{_quiet(LEGEND)}'


def _line(row: Row, columns: Sequence[Column], colour: str | None, *, best: float) -> str:
    loss = _compared(row)
    above = "" if loss is None else "best" if loss == best else f"+{loss - best:.4f}"
    texts = [*(each.cell(row.facts) for each in columns), loss_text(row.facts)]
    numbers = "".join(f'<td class="number">{escape(text)}</td>' for text in texts)
    square = f'<span class="colour" style="background:{colour or "transparent"}"></span>'
    # no tick before the script runs: without it none would do anything
    tick = f'<input type="checkbox" value="{escape(row.name)}" hidden checked>' if colour else ""
    named = f"<label>{tick}{square}{escape(row.label)}</label>"
    return (
        f'<tr><td class="label">{named}</td>{numbers}<td class="number above">{above}</td>'
        f'<td class="{row.state.value}">{escape(standing(row))}</td></tr>'
    )


def _compared(row: Row) -> float | None:
    """Return the loss by which finished runs are compared."""
    loss = row.facts.val_loss if row.state is JobState.done else None
    return loss if loss is not None and isfinite(loss) else None


def _colours(rows: Sequence[Row]) -> list[str | None]:
    """Return a colour per row; None for runs without a curve, which cannot be chosen."""
    count = sum(bool(row.facts.curve) for row in rows)
    found = iter(
        DISTINCT if count <= len(DISTINCT) else map(_on_scale, range(count), [count] * count)
    )
    return [next(found) if row.facts.curve else None for row in rows]


def _on_scale(place: int, count: int) -> str:
    """Return the colour at a place among several, between those of SCALE."""
    at = place / (count - 1) * (len(SCALE) - 1)
    low = min(int(at), len(SCALE) - 2)
    ends = [[int(each[n : n + 2], 16) for n in (1, 3, 5)] for each in SCALE[low : low + 2]]
    mixed = (round(a + (b - a) * (at - low)) for a, b in zip(*ends, strict=True))
    return "#" + "".join(f"{each:02x}" for each in mixed)


def _data(rows: Sequence[Row], colours: Sequence[str | None]) -> str:
    """Return what the script draws, as JSON: the runs that can be chosen, in order of the table."""
    runs = [
        {
            "name": row.name.encode(errors="replace").decode(),  # in addresses: no lone surrogates
            "label": row.label,
            "colour": colour,
            "curve": _finite(thinned(row.facts.curve)),
            "validations": _finite(row.facts.validations),
            "range": shown([row.facts.curve, row.facts.validations]),
            "loss": _compared(row),
            "rates": _with_texts(rates(row.facts)),
            "memory": _with_texts(peaks(row.facts)),
        }
        for row, colour in zip(rows, colours, strict=True)
        if colour
    ]
    text = json.dumps(runs, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json" id="data">{text}</script>'


def _finite(points: Curve) -> list[tuple[int, float | None]]:
    return [(step, loss if isfinite(loss) else None) for step, loss in points]


def _with_texts(pair: Pair) -> list[Any]:
    return [None if value is None else [value, figures(value)] for value in pair]


def shown(curves: Sequence[Curve]) -> tuple[float, float] | None:
    """Return the lowest and highest loss to plot, so that the ends of the curves can be told apart;
    None without any.

    The first tenth of each curve, where all fall steeply, may lie above the plot.
    """
    late = [loss for curve in curves for step, loss in curve if step > curve[-1][0] / 10]
    losses = [loss for loss in late if isfinite(loss)]
    return (min(losses), max(losses)) if losses else None


def thinned(points: Curve) -> Curve:
    """Return about POINTS evenly spaced points at most, including the last."""
    stride = -(-len(points) // POINTS)
    return points if stride <= 1 else [*points[:-1:stride], points[-1]]
