"""The paper of layout pictures: rows of ranks, and columns from left to right.

Lengths are inches, from the upper left corner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from app.cli.plan_views.holdings import Span
from app.cli.plan_views.pictures import Colour, ink

# what other ranks hold, lines between rows, small words
ELSEWHERE, RULE, FAINT = "#EFEFEF", "#DADADA", "#666666"


MOST_RANKS = 32  # with more, the first and the last half as many


ROW, BAR = 0.3, 0.2  # height of a row and of the bar in it


MARGIN, GAP, LANE = 0.25, 0.24, 0.12  # at the edges, between columns, between lines of groups


MOST_CUTS, LEAST = 24, 0.025  # cuts that are drawn, width of the smallest share


TOP, BOTTOM = 1.15, 0.6  # above and below the rows


FONT, SMALL, HEADING, TITLE_FONT = 7.0, 6.5, 8.5, 11.0  # points


CHARACTER = 0.0088  # width of one, per point of its size


LEGEND: dict[str, Any] = {
    "ncols": 5,
    "frameon": False,
    "fontsize": 7.0,
    "borderpad": 0,
    "borderaxespad": 0,
    "columnspacing": 1.6,
    "handlelength": 1.4,
}


@dataclass(frozen=True, slots=True)
class Rows:
    """Which ranks are shown, and where: y of the middle of each row."""

    middle: dict[int, float]  # rank -> y
    gap: float | None  # y of the row for those left out
    end: float  # y below the last row

    @classmethod
    def of(cls, world: int) -> Rows:
        """All ranks, or the first and last of many."""
        half = MOST_RANKS // 2
        ranks = (
            [*range(world)] if world <= MOST_RANKS else [*range(half), *range(world - half, world)]
        )
        late = [int(world > MOST_RANKS and nth >= half) for nth in range(len(ranks))]
        middle = {rank: TOP + ROW * (nth + late[nth] + 0.5) for nth, rank in enumerate(ranks)}
        return cls(
            middle,
            TOP + ROW * (half + 0.5) if any(late) else None,
            TOP + ROW * (len(ranks) + any(late)),
        )


@dataclass(frozen=True, slots=True)
class Line:
    """A group in the picture."""

    dots: tuple[float, ...]  # y of its ranks that are shown
    start: float  # y
    end: float  # y
    lane: int  # from the left


@dataclass(slots=True)
class Sheet:
    """Columns from left to right, drawn as they come."""

    rows: Rows
    right: float = MARGIN  # x behind the last column
    shapes: list[Rectangle | LineCollection | Line2D] = field(default_factory=list)
    words: list[tuple[float, float, str, dict[str, Any]]] = field(default_factory=list)

    def column(self, heading: str, remark: str, width: float) -> float:
        """Begin a column, as wide as its heading at least; returns its x."""
        left = self.right
        self.word(left, TOP - 0.33, heading, ha="left", fontsize=HEADING, fontweight="bold")
        self.word(left, TOP - 0.14, remark, ha="left", fontsize=SMALL, color=FAINT)
        self.right += GAP + max(
            width, CHARACTER * HEADING * len(heading), CHARACTER * SMALL * len(remark)
        )
        return left

    def word(self, x: float, y: float, text: str, **how: Any) -> None:
        """Words with their middle at y."""
        self.words.append((x, y, text, {"va": "center", "fontsize": FONT, **how}))

    def box(self, x: float, y: float, width: float, height: float, fill: str | Colour) -> None:
        """A rectangle with its middle at y."""
        self.shapes.append(
            Rectangle((x, y - height / 2), width, height, facecolor=fill, linewidth=0)
        )

    def bar(
        self,
        x: float,
        rank: int,
        width: float,
        spans: Sequence[Span],
        whole: float,
        fill: str | Colour,
    ) -> None:
        """The spans of a whole that a rank holds."""
        for start, end in spans:
            self.box(
                x + width * start / whole,
                self.rows.middle[rank],
                max(LEAST, width * (end - start) / whole),
                height=BAR,
                fill=fill,
            )

    def others(self, x: float, width: float, cuts: Sequence[float]) -> None:
        """What other ranks hold, in every row, with white lines where the whole, 0 to 1, is cut."""
        for y in self.rows.middle.values():
            self.box(x, y, width, height=BAR, fill=ELSEWHERE)
        drawn = [x + width * cut for cut in cuts] if len(cuts) < MOST_CUTS else []
        ends = [
            [(cut, y - BAR / 2), (cut, y + BAR / 2)]
            for cut in drawn
            for y in self.rows.middle.values()
        ]
        # lines lie above all boxes
        self.shapes.append(LineCollection(ends, colors="white", linewidths=1))

    def label(
        self,
        x: float,
        rank: int,
        width: float,
        span: Span,
        text: str,
        fill: str | Colour,
        alone: bool = True,
    ) -> None:
        """Words in a span, 0 to 1, where they have room; otherwise behind or in front of it,
        where it stands alone.
        """
        start = width * span[0]
        end = width * span[1]
        room = CHARACTER * FONT * len(text)
        y = self.rows.middle[rank]
        place = 0.04
        if end - start > room:
            self.word(x + (start + end) / 2, y, text, ha="center", color=ink(fill))
        elif alone and width - end > room + place:
            self.word(x + end + place, y, text, ha="left", color=FAINT)
        elif alone and start > room + place:
            self.word(x + start - place, y, text, ha="right", color=FAINT)

    def figure(self, heading: str, legend: Sequence[Patch | Line2D]) -> Figure:
        """All that has been drawn, with a title above and a legend below."""
        width = max(self.right - GAP, MARGIN + CHARACTER * TITLE_FONT * len(heading)) + MARGIN
        height = self.rows.end + BOTTOM
        figure = Figure(figsize=(width, height))
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set(xlim=(0, width), ylim=(height, 0))
        axes.set_axis_off()
        for y in (TOP, *(middle + ROW / 2 for middle in self.rows.middle.values())):
            axes.axhline(y, MARGIN / width, 1 - MARGIN / width, color=RULE, linewidth=0.5, zorder=0)
        for shape in self.shapes:
            axes.add_artist(shape)
        for x, y, text, how in self.words:
            axes.text(x, y, text, **how)
        axes.text(MARGIN, 0.32, heading, fontsize=TITLE_FONT, va="center")
        place = (MARGIN / width, 0.12 / height)
        figure.legend(handles=legend, loc="lower left", bbox_to_anchor=place, **LEGEND)
        return figure
