"""Draw docs/moe-dispatch.svg: the tokens of two ranks, and the rows that a static dispatcher puts
them into, as `app.moe.dispatch.expert_rows` places them.

    python scripts/dispatch_picture.py

Lengths are cells, from the lower left corner.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from app.cli.plan_views.pictures import ink, save_picture
from app.moe.dispatch.expert_rows import ExpertRows, place_rows

PICTURE = Path(__file__).resolve().parent.parent / "docs/moe-dispatch.svg"
RANKS, TOKENS, LOCAL, TOP_K = 2, 4, 2, 2
CHOICES = [[0, 1], [0, 2], [2, 3], [1, 3], [1, 3], [0, 1], [1, 3], [0, 3]]
ROWS = RANKS * TOKENS * min(TOP_K, LOCAL)
COLOURS = ["#E69F00", "#F0E442", "#0072B2", "#56B4E9"]  # of experts (Okabe and Ito)
LINK, NEAR, FREE, EDGE = "#D55E00", "#888888", "#F4F4F4", "#666666"
GAP = 1.5  # between ranks
WIDTH, TOP, JOIN, BOTTOM = ROWS * RANKS + GAP, 7.0, 2.6, 0.0
WIDE = 1.9  # a token's box


def main() -> None:
    """Draw it."""
    with tempfile.TemporaryDirectory() as folder:
        svg = save_picture(picture(), Path(folder), "moe-dispatch")[0]
        PICTURE.write_text(svg.read_text())


def picture() -> Figure:
    """Tokens above, rows below, and what goes from one to the other."""
    figure = Figure(figsize=(9.6, 4.1))
    axes = figure.add_axes((0.01, 0.1, 0.98, 0.88))
    axes.set(xlim=(-0.2, WIDTH + 0.2), ylim=(-1.7, TOP + 2.6))
    axes.axis("off")
    for token in range(RANKS * TOKENS):
        _draw_token(axes, token)
    for rank in range(RANKS):
        _draw_rank(axes, rank)
    kinds = [
        Line2D([], [], color=LINK, linewidth=1.6, label="over the link, once for each rank"),
        Line2D([], [], color=NEAR, linewidth=1.0, label="within the GPU"),
        *(
            Patch(facecolor=each, edgecolor=EDGE, label=f"expert {e}")
            for e, each in enumerate(COLOURS)
        ),
        Patch(facecolor=FREE, edgecolor=EDGE, label="free"),
    ]
    figure.legend(handles=kinds, loc="lower center", ncols=7, frameon=False, fontsize=8)
    return figure


def _token_x(token: int) -> float:
    """Left edge of a token's box; those of a rank are in the middle of its half."""
    rank, place = divmod(token, TOKENS)
    return rank * (ROWS + GAP) + ROWS / 2 + (place - TOKENS / 2) * (WIDE + 0.5)


def _row_x(rank: int, row: int) -> float:
    return rank * (ROWS + GAP) + row


def _draw_token(axes: Any, token: int) -> None:
    left = _token_x(token)
    axes.add_patch(Rectangle((left, TOP), WIDE, 1, facecolor="white", edgecolor=EDGE))
    _word(axes, left + WIDE / 2, TOP + 0.5, _name(token), size=10)
    for k, expert in enumerate(CHOICES[token]):
        fill, half = COLOURS[expert], WIDE / TOP_K
        corner = left + k * half, TOP - 0.8
        axes.add_patch(Rectangle(corner, half, 0.8, facecolor=fill, edgecolor=EDGE))
        _word(axes, corner[0] + half / 2, TOP - 0.4, str(expert), colour=ink(fill))


def _draw_rank(axes: Any, rank: int) -> None:
    left, first = _row_x(rank, 0), rank * LOCAL
    experts = f"experts {first} and {first + LOCAL - 1}"
    _word(axes, left + ROWS / 2, TOP + 1.9, f"tokens of rank {rank}, and the experts they choose")
    _word(axes, left + ROWS / 2, -1.2, f"rows of {experts} on rank {rank}: memory for {ROWS}")
    for row in range(ROWS):
        axes.add_patch(Rectangle((left + row, BOTTOM), 1, 1, facecolor=FREE, edgecolor=EDGE))
    rows: ExpertRows = place_rows(torch.tensor(CHOICES), first, LOCAL, ROWS)
    for token, places in enumerate(rows.row_of_NK.tolist()):
        found = [(k, row) for k, row in enumerate(places) if row < ROWS]
        if found:
            _draw_way(axes, token, rank, [row for _, row in found])
        for k, row in found:
            fill = COLOURS[CHOICES[token][k]]
            axes.add_patch(Rectangle((left + row, BOTTOM), 1, 1, facecolor=fill, edgecolor=EDGE))
            _word(axes, left + row + 0.5, BOTTOM + 0.5, _name(token), colour=ink(fill))


def _draw_way(axes: Any, token: int, rank: int, rows: list[int]) -> None:
    """A line to the rank, and from there to each row."""
    middles = [_row_x(rank, row) + 0.5 for row in rows]
    meets = sum(middles) / len(middles)
    colour, width = (NEAR, 1.0) if token // TOKENS == rank else (LINK, 1.6)
    start = _token_x(token) + WIDE / 2
    axes.plot([start, meets], [TOP - 0.8, JOIN], color=colour, linewidth=width, zorder=0)
    for middle in middles:
        axes.plot([meets, middle], [JOIN, BOTTOM + 1], color=NEAR, linewidth=1.0, zorder=0)


def _name(token: int) -> str:
    return "abcdefgh"[token]


def _word(
    axes: Any, x: float, y: float, text: str, *, colour: str = "black", size: float = 8.5
) -> None:
    axes.text(x, y, text, ha="center", va="center", fontsize=size, color=colour)


if __name__ == "__main__":
    main()
