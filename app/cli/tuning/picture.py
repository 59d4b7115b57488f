"""Picture of the front: memory and time of all combinations, and which of them were measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from app.advice.combinations import PlannedCombination, front
from app.cli.plan_views.pictures import save_picture
from app.plan.formatting import GIB


def save_front(
    combinations: Sequence[PlannedCombination],
    times: Mapping[str, float],
    limit: int,
    folder: Path,
) -> list[Path]:
    """Write front.svg and front.png: planned memory against time, with measured times beside.

    times: measured milliseconds by key. limit: bytes of a GPU's memory. Raises OSError.
    """
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    shown = [each for each in combinations if each.fits]
    axes.plot(*_planned(shown), ".", color="#b8c4d0", label="planned", markersize=4)
    axes.plot(*_planned(front(combinations)), "o-", color="#1f5fa8", label="front", markersize=4)
    timed = [each for each in combinations if each.key in times]
    if timed:
        memory = [each.memory / GIB for each in timed]
        axes.plot(memory, [times[each.key] for each in timed], "x", color="#c2410c",
                  label="measured")  # fmt: skip
    if shown and max(each.memory for each in shown) > limit / 2:
        axes.axvline(limit / GIB, color="#555555", linestyle=":", label="memory of a GPU")
    axes.set_yscale("log")
    axes.set_xlabel("planned memory of the busiest rank, GiB")
    axes.set_ylabel("step, ms")
    axes.legend(frameon=False)
    return save_picture(figure, folder, "front")


def _planned(combinations: Sequence[PlannedCombination]) -> tuple[list[float], list[float]]:
    return [each.memory / GIB for each in combinations], [
        each.seconds * 1e3 for each in combinations
    ]
