"""Canvas of layout pictures: a row per rank, and columns from left to right.

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

# colours: shares of other ranks, lines between rows, small text
ELSEWHERE, RULE, FAINT = "#EFEFEF", "#DADADA", "#666666"


MOST_RANKS = 32  # of more, only the first and the last half as many are shown


ROW, BAR = 0.3, 0.2  # heights of a row and of the bar in it


MARGIN, GAP, LANE = 0.25, 0.24, 0.12  # space at the edges, between columns, between group lines


MOST_CUTS, LEAST = 24, 0.025  # most cuts drawn, width at which the smallest share is drawn


TOP, BOTTOM = 1.15, 0.6  # space above and below the rows


FONT, SMALL, HEADING, TITLE_FONT = 7.0, 6.5, 8.5, 11.0  # points


CHARACTER = 0.0088  # width of a character per point of font size


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
    """The ranks that are shown, and the y of the middle of each row."""

    middle: dict[int, float]  # rank -> y
    gap: float | None  # y of the row that stands for ranks left out; None if all are shown
    end: float  # y below the last row

    @classmethod
    def of(cls, world: int) -> Rows:
        """Place all ranks, or the first and last if there are more than MOST_RANKS."""
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
    """Line of a process group."""

    dots: tuple[float, ...]  # y of its ranks that are shown
    start: float  # y
    end: float  # y
    lane: int  # position among parallel lines, from the left


@dataclass(slots=True)
class Sheet:
    """Columns from left to right, drawn as they come."""

    rows: Rows
    right: float = MARGIN  # x after the last column
    shapes: list[Rectangle | LineCollection | Line2D] = field(default_factory=list)
    words: list[tuple[float, float, str, dict[str, Any]]] = field(default_factory=list)

    def column(self, heading: str, remark: str, width: float) -> float:
        """Begin a column at least as wide as its heading; return its x."""
        left = self.right
        self.word(left, TOP - 0.33, heading, ha="left", fontsize=HEADING, fontweight="bold")
        self.word(left, TOP - 0.14, remark, ha="left", fontsize=SMALL, color=FAINT)
        self.right += GAP + max(
            width, CHARACTER * HEADING * len(heading), CHARACTER * SMALL * len(remark)
        )
        return left

    def word(self, x: float, y: float, text: str, **how: Any) -> None:
        """Draw text, vertically centred at y."""
        self.words.append((x, y, text, {"va": "center", "fontsize": FONT, **how}))

    def box(self, x: float, y: float, width: float, height: float, fill: str | Colour) -> None:
        """Draw a rectangle, vertically centred at y."""
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
        """Draw the spans of [0, whole] that a rank holds."""
        for start, end in spans:
            self.box(
                x + width * start / whole,
                self.rows.middle[rank],
                max(LEAST, width * (end - start) / whole),
                height=BAR,
                fill=fill,
            )

    def others(self, x: float, width: float, cuts: Sequence[float]) -> None:
        """Draw other ranks' shares as grey bars in all rows, with white lines at `cuts`, 0 to 1."""
        for y in self.rows.middle.values():
            self.box(x, y, width, height=BAR, fill=ELSEWHERE)
        drawn = [x + width * cut for cut in cuts] if len(cuts) < MOST_CUTS else []
        ends = [
            [(cut, y - BAR / 2), (cut, y + BAR / 2)]
            for cut in drawn
            for y in self.rows.middle.values()
        ]
        # zorder: lines above all boxes
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
        """Draw text inside a span, 0 to 1, if it has room; otherwise beside it, if `alone`."""
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
        """Return the figure, with a title above and a legend below."""
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
