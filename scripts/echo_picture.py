"""Draw docs/echo-plan.svg: plans of ECHO for one example, as `app.moe.echo` makes them.

python scripts/echo_picture.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from app.choices import CloneAlgorithm
from app.cli.plan_views.pictures import ink, save_picture, whitened
from app.moe.echo import plan_clones

ROOT = Path(__file__).resolve().parent.parent
LOADS = ((50, 100, 150, 200), (20, 40, 60, 170), (30, 20, 40, 50), (10, 25, 15, 20))
AVERAGE = sum(map(sum, LOADS)) // len(LOADS)
SPILLS = ((3, 200), (2, 50), (7, 40))  # expert, tokens: the largest first
ROOMS = ((3, 180), (2, 110))  # rank, tokens
COLOURS = ("#E69F00", "#0072B2", "#009E73", "#CC79A7")  # of ranks (Okabe and Ito)
EDGE, FREE = "#666666", "#F4F4F4"


def main() -> None:
    """Draw it."""
    with tempfile.TemporaryDirectory() as folder:
        svg = save_picture(plan_picture(), Path(folder), "echo-plan")[0]
        (ROOT / "docs/echo-plan.svg").write_text(svg.read_text())


def plan_picture() -> Figure:
    """Spills of one rank; the lines of spills and rooms; the ranks before and after."""
    figure = Figure(figsize=(9.6, 6.4))
    _draw_spills(_bare(figure, (0.02, 0.8, 0.96, 0.18)))
    _draw_lines(_bare(figure, (0.02, 0.5, 0.96, 0.25)))
    counts_RE = torch.zeros(len(LOADS), sum(map(len, LOADS)), dtype=torch.int64)
    counts_RE[0] = torch.tensor(LOADS).flatten()
    none = counts_RE.new_zeros(counts_RE.shape[1], len(LOADS))
    plans = {"before": none}
    for algorithm in (CloneAlgorithm.one_shot_greedy, CloneAlgorithm.target_search):
        plans[f"{algorithm.value}, one spare"] = plan_clones(counts_RE, 1, algorithm)[0]
    for nth, (title, moved_ES) in enumerate(plans.items()):
        axes = _bare(figure, (0.02 + 0.325 * nth, 0.06, 0.31, 0.38))
        _draw_ranks(axes, title, moved_ES.tolist())
    kinds = [Patch(facecolor=each, label=f"of rank {r}") for r, each in enumerate(COLOURS)]
    kinds.append(Patch(facecolor="white", edgecolor=EDGE, hatch="////", label="in a slot"))
    figure.legend(handles=kinds, loc="lower center", ncols=5, frameon=False, fontsize=8)
    return figure


def _bare(figure: Figure, place: tuple[float, float, float, float]) -> Any:
    axes = figure.add_axes(place)
    axes.axis("off")
    return axes


def _draw_spills(axes: Any) -> None:
    """Experts of the first rank along a line, the smallest first, up to the average and beyond."""
    axes.set(xlim=(-130, 630), ylim=(-0.9, 1.9))
    _word(axes, -5, 0.5, "rank 0's experts", side="right")
    end = 0
    for expert, load in enumerate(LOADS[0]):
        stays = max(0, min(load, AVERAGE - end))
        _box(axes, end, 0, stays, COLOURS[0], f"{stays}")
        _box(axes, end + stays, 0, load - stays, COLOURS[0], f"{load - stays} spill", hatch="////")
        _word(axes, end + load / 2, -0.45, f"expert {expert}: {load}")
        end += load
    axes.plot([AVERAGE, AVERAGE], [-0.15, 1.35], color="black", linewidth=1.5)
    _word(axes, AVERAGE, 1.6, f"average of ranks {AVERAGE}")


def _draw_lines(axes: Any) -> None:
    """Spills above, rooms below; what overlaps may move."""
    axes.set(xlim=(-65, 315), ylim=(-1.5, 3.4))
    _word(axes, -3, 2.5, "spills, largest first", side="right")
    _word(axes, -3, 0.5, "rooms, largest first", side="right")
    starts, end = [], 0
    for expert, tokens in SPILLS:
        _box(axes, end, 2, tokens, COLOURS[expert // 4], f"expert {expert}: {tokens}")
        starts.append((end, end + tokens, expert))
        end += tokens
    end = 0
    for rank, tokens in ROOMS:
        _box(axes, end, 0, tokens, FREE, f"rank {rank}: {tokens}")
        overlaps = [
            (min(end + tokens, stop) - max(end, start), max(end, start), expert)
            for start, stop, expert in starts
        ]
        largest = max(overlaps)
        for moved, start, expert in overlaps:
            if moved > 0:
                hatch = "////" if (moved, start, expert) == largest else None
                fill = whitened(COLOURS[expert // 4], 0.5)
                _box(axes, start, 1.15, moved, fill, f"{moved}", hatch=hatch, height=0.7)
        _word(
            axes, end + tokens / 2, -0.55,
            f"its slot: {largest[0]} tokens of expert {largest[2]}",
        )  # fmt: skip
        end += tokens


def _draw_ranks(axes: Any, title: str, moved_ES: list[list[int]]) -> None:
    """What each rank computes: its experts', and what its slot holds."""
    axes.set(xlim=(-0.7, 3.7), ylim=(-70, 590))
    _word(axes, 1.5, 570, title, size=9.5)
    for rank, loads in enumerate(LOADS):
        own = sum(loads) - sum(map(sum, moved_ES[rank * 4 : rank * 4 + 4]))
        taken = any(moved_S[rank] for moved_S in moved_ES)
        _box(axes, rank - 0.4, 0, 0.8, COLOURS[rank], f"{own}" if taken else "", height=own)
        total = own
        for expert, moved_S in enumerate(moved_ES):
            if moved_S[rank]:
                fill = whitened(COLOURS[expert // 4], 0.5)
                _box(axes, rank - 0.4, own, 0.8, fill, f"{moved_S[rank]}", hatch="////",
                     height=moved_S[rank])  # fmt: skip
                total += moved_S[rank]
        _word(axes, rank, total + 18, f"{total}")
        _word(axes, rank, -25, f"rank {rank}")
    axes.plot([-0.6, 3.6], [AVERAGE, AVERAGE], color="black", linewidth=1, linestyle="--")


def _box(
    axes: Any, x: float, y: float, width: float, fill: Any, text: str, *,
    hatch: str | None = None, height: float = 1.0,
) -> None:  # fmt: skip
    if not width * height:
        return
    corner = (x, y)
    axes.add_patch(
        Rectangle(corner, width, height, facecolor=fill, edgecolor=EDGE, hatch=hatch, linewidth=0.7)
    )
    under = {"facecolor": fill, "edgecolor": "none", "pad": 1.0} if hatch else None
    axes.text(
        x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=8,
        color=ink(fill), bbox=under,
    )  # fmt: skip


def _word(
    axes: Any, x: float, y: float, text: str, *, side: str = "center", size: float = 8.5
) -> None:
    axes.text(x, y, text, ha=side, va="center", fontsize=size)


if __name__ == "__main__":
    main()
