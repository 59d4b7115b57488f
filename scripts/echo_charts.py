"""The charts of docs/echo.md, of what bench/results has: one for each of its tables."""

from __future__ import annotations

import json
from collections.abc import Callable
from math import isnan, nan
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

RESULTS = Path(__file__).resolve().parent.parent / "bench/results"
LINES = {  # of algorithms (Okabe and Ito)
    "one_shot_greedy": ("#E69F00", "o"),
    "approx_bin_packing": ("#009E73", "s"),
    "exact": ("#0072B2", "D"),
}
DASHES = {"1": "-", "2": "--", "4": ":"}  # of spares
EVEN = 0.01  # %: what is less is drawn here
ROOM = (0.09, 0.13, 0.66, 0.84)  # of the axes beside a legend
Json = dict[str, Any]
# of a row, by a way of cloning, or without any: then NaN says that there is nothing to draw
Value = Callable[[Json, str | None], float]


def charts() -> dict[str, Figure]:
    """By the name of their file."""
    found = json.loads((RESULTS / "echo_loads.json").read_text())
    laws: list[dict[str, Json]] = [{}, {}]
    for row in found["synthetic"]:
        if row["ranks"] == 8 and row["experts"] == 128:
            law, value = row["skew"].split()
            laws[law == "dirichlet"][f"{law.capitalize()}\n{value}"] = row
    models: dict[float, dict[str, Json]] = {}
    for row in found["trained"]:
        coefficient = row["aux_loss_coeff"]
        models.setdefault(coefficient, {})[f"{row['ranks']} ranks\naux {coefficient:g}"] = row
    return {
        "echo-loads": loads_chart(laws),
        "echo-clones": clones_chart(laws),
        "echo-capacity": capacity_chart(found["synthetic"]),
        "echo-routing": loads_chart(list(models.values())),
        "echo-simulated": simulated_chart(found["simulated"]),
        "echo-pieces": pieces_chart(json.loads((RESULTS / "echo_pieces.json").read_text())),
        "echo-steps": steps_chart(measured_steps()),
    }


def loads_chart(groups: list[dict[str, Json]]) -> Figure:
    """What the fullest rank has above the mean, in percent; a line for each group."""
    figure, axes = _beside_legend()
    _draw_ways(axes, groups, _excess)
    axes.set_yscale("log")
    axes.set_yticks([0.01, 0.1, 1, 10, 100], ["≤ 0.01", "0.1", "1", "10", "100"])
    axes.set_ylabel("the fullest rank above the mean, %", fontsize=9)
    figure.legend(loc="center right", frameon=False, fontsize=8)
    return figure


def clones_chart(groups: list[dict[str, Json]]) -> Figure:
    """Clones of a layer, a line for each group."""
    figure, axes = _beside_legend()
    _draw_ways(axes, groups, lambda row, way: row["after"][way]["clones"] if way else nan)
    axes.set_ylabel("clones per layer", fontsize=9)
    figure.legend(loc="center right", frameon=False, fontsize=8)
    return figure


def capacity_chart(rows: list[Json]) -> Figure:
    """The capacity factor that suffices, by ranks."""
    worst: dict[str, Json] = {}
    for row in rows:
        ranks = worst.setdefault(f"{row['ranks']} ranks", {"before": 0.0, "after": {}})
        ranks["before"] = max(ranks["before"], row["before"][2])
        for way, value in row["after"].items():
            ranks["after"][way] = max(ranks["after"].get(way, 0.0), value["load"][2])
    figure, axes = _beside_legend()
    _draw_ways(axes, [worst], lambda row, way: row["after"][way] if way else row["before"])
    axes.set_ylabel("capacity factor that suffices", fontsize=9)
    figure.legend(loc="center right", frameon=False, fontsize=8)
    return figure


def simulated_chart(rows: list[Json]) -> Figure:
    """A layer's time over that at even loads without clones, by what the fullest rank has."""
    figure, axes = _beside_legend()
    limit = max(row["before"] for row in rows)
    axes.plot([1, limit], [1, limit], color="black", label="no clones")
    marks = dict(zip((2, 4, 8, 16), ("o", "s", "D", "^"), strict=True))
    colours = dict(zip(marks, ("#E69F00", "#009E73", "#0072B2", "#CC79A7"), strict=True))
    for ranks, mark in marks.items():
        points = [
            (row["before"], row["exact 2, threshold 0.05"] / row["even"])
            for row in rows
            if row["ranks"] == ranks
        ]
        axes.scatter(*zip(*points, strict=True), s=22, color=colours[ranks], marker=mark,
                     label=f"{ranks} ranks, 2 spares")  # fmt: skip
    axes.set_xlabel("rows of the fullest rank over the mean", fontsize=9)
    axes.set_ylabel("time of a layer over that at even loads", fontsize=9)
    figure.legend(loc="center right", frameon=False, fontsize=8)
    return figure


def pieces_chart(rows: list[Json]) -> Figure:
    """Microseconds of each piece."""
    figure = Figure(figsize=(9.8, 5.4))
    axes = figure.add_axes((0.29, 0.09, 0.66, 0.88))
    names = [f"{row['piece']} {row['way']}".strip().replace("_", " ") for row in rows]
    bars = axes.barh(range(len(rows)), [row["micros"] for row in rows], color="#0072B2")
    axes.bar_label(bars, fmt="%.1f", padding=2, fontsize=8)
    axes.set_yticks(range(len(rows)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("µs", fontsize=9)
    return figure


def measured_steps() -> dict[str, Json]:
    """By skew: max/mean of ranks, and milliseconds of a step without clones and with them; medians
    where a case was repeated.
    """
    found: dict[str, Json] = {}
    times: dict[tuple[str, str], list[float]] = {}
    for text in (RESULTS / "echo_steps.jsonl").read_text().splitlines():
        row = json.loads(text)
        words = row["overrides"]
        forced = "model.moe.force_balance=true" in words
        (skew,) = [w for w in words if w.startswith("hot=")] or ["forced" if forced else "none"]
        case = found.setdefault(skew, {})
        kind = "with" if any("echo" in word for word in words) else "without"
        times.setdefault((skew, kind), []).append(row["step_ms"])
        case[kind] = median(times[skew, kind])
        if kind == "with":
            case |= {"clones": row["clones"]}
            case |= {"before": row["rank_load_before"], "after": row["rank_load_after"]}
        else:
            case["load"] = row["rank_load"]
    return {skew: found[skew] for skew in sorted(found)}


def steps_chart(cases: dict[str, Json]) -> Figure:
    """Tokens per second over those of forced balance without clones."""
    figure, axes = _beside_legend()
    forced = cases["forced"]["without"]
    natural = sorted((case for name, case in cases.items() if name != "forced"), key=_load)
    loads = [case["load"] for case in natural]
    for kind, colour in (("without", "black"), ("with", "#0072B2")):
        shares = [100 * forced / case[kind] for case in natural]
        axes.plot(loads, shares, color=colour, marker="o", label=f"{kind} clones")
    axes.axhline(100, color="#009E73", label="forced balance")
    axes.axhline(95, color="#AAAAAA", linestyle=":", label="95 %")
    axes.set_xlabel("rows of the fuller rank over the mean, without clones", fontsize=9)
    axes.set_ylabel("tokens/s, % of forced balance", fontsize=9)
    figure.legend(loc="center right", frameon=False, fontsize=8)
    return figure


def _load(case: Json) -> float:
    return float(case["load"])


def _beside_legend() -> tuple[Figure, Axes]:
    figure = Figure(figsize=(9.8, 4.2))
    axes = figure.add_axes(ROOM)
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.6)
    return figure, axes


def _draw_ways(axes: Axes, groups: list[dict[str, Json]], value: Value) -> None:
    """A line for each way and group, through the group's rows side by side."""
    first = 0
    for group in groups:
        rows = list(group.values())
        places = range(first, first + len(rows))
        before = [value(row, None) for row in rows]
        if not isnan(before[0]):
            label = None if first else "no clones"
            axes.plot(places, before, color="black", marker="x", label=label)
        for way in rows[0]["after"]:
            algorithm, spares = way.split()
            colour, mark = LINES[algorithm]
            label = None if first else f"{algorithm}, {spares} spare{'s' * (spares != '1')}"
            style = {"color": colour, "marker": mark, "linestyle": DASHES[spares], "markersize": 4}
            axes.plot(places, [value(row, way) for row in rows], label=label, **style)
        first += len(rows)
    axes.set_xticks(range(first), [name for group in groups for name in group], fontsize=8)


def _excess(row: Json, way: str | None) -> float:
    load = row["after"][way]["load"] if way else row["before"]
    return max(100 * (load[1] - 1), EVEN)
