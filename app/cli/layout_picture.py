"""layout.svg and layout.png: a row per rank, with what it holds on the left and whom it exchanges with on the right.

Lengths are inches, from the upper left corner.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from app.cli.pictures import Colour, ink, save_picture, whitened
from app.plan.blocks import Place
from app.plan.export import GROUP_AXES, rank_groups
from app.plan.figures import count_of, ranges
from app.plan.layout import ParallelLayout
from app.plan.plan import Plan
from app.plan.summary import degrees

Span = tuple[float, float]  # where something begins and ends

# Okabe and Ito's palette, told apart with every kind of colour vision: one for each axis and what it cuts.
AXIS_COLOURS = {"pp": "#505050", "cp": "#E69F00", "tp": "#0072B2", "ep": "#009E73", "dp": "#CC79A7", "edp": "#56B4E9"}
ELSEWHERE, RULE, FAINT = "#EFEFEF", "#DADADA", "#666666"  # what other ranks hold, lines between rows, small words
TINT = 0.55  # share of white in the colour of what is cut further
MOST_RANKS = 32  # with more, the first and the last half as many
ROW, BAR = 0.3, 0.2  # height of a row and of the bar in it
MARGIN, GAP, LANE = 0.25, 0.24, 0.12  # at the edges, between columns, between lines of groups
MOST_CUTS, LEAST = 24, 0.025  # cuts that are drawn, width of the smallest share
ENDS = 0.17  # width of the embedding's and the head's box
TOP, BOTTOM = 1.15, 0.6  # above and below the rows
NODE, RANK, REPLICA, WIDE = 0.3, 0.34, 0.8, 1.5  # widths of columns
FONT, SMALL, HEADING, TITLE_FONT = 7.0, 6.5, 8.5, 11.0  # points
CHARACTER = 0.0088  # width of one, per point of its size
LEGEND: dict[str, Any] = {
    "ncols": 5, "frameon": False, "fontsize": 7.0, "borderpad": 0, "borderaxespad": 0, "columnspacing": 1.6, "handlelength": 1.4
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Holding:
    """What one rank holds of a step and of the model."""

    stages: tuple[tuple[int, ...], ...]  # decoder layers of each of its stages
    embedding: bool
    head: bool
    tokens_inside: tuple[Span, ...]  # of a sequence, inside attention and matrices
    tokens_between: tuple[Span, ...]  # of a sequence, between them
    width: Span  # share of heads, hidden widths and vocabulary, of 1
    experts: Span  # of each layer's
    part: Span  # share of these experts' hidden width, of 1
    replica: int


def holding(plan: Plan, rank: int) -> Holding:
    """That of a global rank."""
    layout, model, seq_len = plan.layout, plan.run.model, plan.run.train.seq_len
    place, coords = Place.of(layout, rank), layout.coords(rank)
    stages = plan.stages.stages[coords["pp"]]
    inside = sequence_pieces(seq_len, layout.cp, coords["cp"])
    experts = share(model.moe.num_experts if model.moe else 0, *place.ep)
    return Holding(
        tuple(stage.layers for stage in stages),
        any(stage.embedding for stage in stages),
        any(stage.head for stage in stages),
        inside,
        tuple(part_of(inside, *place.tp)),
        share(1, *place.tp),
        experts,
        share(1, *place.etp),
        coords["dp"],
    )


def cuts(parts: int) -> list[float]:
    """Where a whole of 1 is cut into equal parts."""
    return [nth / parts for nth in range(1, parts)]


def share(whole: float, index: int, parts: int) -> Span:
    """Where part `index` of equal parts of something begins and ends."""
    return whole * index / parts, whole * (index + 1) / parts


def sequence_pieces(seq_len: int, cp: int, cp_rank: int) -> tuple[Span, ...]:
    """The tokens of a context-parallel rank: two of 2·cp pieces, of which each late one goes with an early one."""
    if cp == 1:
        return ((0, seq_len),)
    return share(seq_len, cp_rank, 2 * cp), share(seq_len, 2 * cp - 1 - cp_rank, 2 * cp)


def part_of(spans: Sequence[Span], index: int, parts: int) -> Iterator[Span]:
    """Where part `index` of all spans, laid end to end, is."""
    low, high = share(sum(end - start for start, end in spans), index, parts)
    for start, end in spans:
        cut = max(start, start + low), min(end, start + high)
        if cut[0] < cut[1]:
            yield cut
        low, high = low - (end - start), high - (end - start)


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
        ranks = [*range(world)] if world <= MOST_RANKS else [*range(half), *range(world - half, world)]
        late = [int(world > MOST_RANKS and nth >= half) for nth in range(len(ranks))]
        middle = {rank: TOP + ROW * (nth + late[nth] + 0.5) for nth, rank in enumerate(ranks)}
        return cls(middle, TOP + ROW * (half + 0.5) if any(late) else None, TOP + ROW * (len(ranks) + any(late)))


@dataclass(frozen=True, slots=True)
class Line:
    """A group in the picture."""

    dots: tuple[float, ...]  # y of its ranks that are shown
    start: float  # y
    end: float  # y
    lane: int  # from the left


def group_lines(groups: Sequence[Sequence[int]], rows: Rows) -> list[Line]:
    """The groups with a rank that is shown, in as few lanes as they need; a line goes to the gap for those that are not."""
    found = []
    for group in groups:
        dots = tuple(rows.middle[rank] for rank in group if rank in rows.middle)
        if dots:
            ends = [*dots]
            if rows.gap is not None and len(dots) < len(group):
                ends.append(rows.gap - ROW / 4 if min(dots) < rows.gap else rows.gap + ROW / 4)
            found.append((min(ends), max(ends), dots))
    lanes: list[float] = []  # where the last line of each ends
    lines = []
    for start, end, dots in sorted(found):
        lane = next((nth for nth, taken in enumerate(lanes) if taken < start), len(lanes))
        lanes[lane : lane + 1] = [end]
        lines.append(Line(dots, start, end, lane))
    return lines


def group_columns(plan: Plan, rows: Rows) -> dict[str, list[Line]]:
    """Lines by kind of group, of those kinds whose groups have several ranks."""
    kinds = [kind for kind, (_, expert) in GROUP_AXES.items() if plan.run.model.moe or not expert]
    groups = {kind: rank_groups(plan.layout, kind) for kind in kinds}
    return {kind: group_lines(found, rows) for kind, found in groups.items() if len(found[0]) > 1}


def kind_name(layout: ParallelLayout, kind: str) -> str:
    """The axes that a kind of group spans: dp·cp shares gradients of dense layers, etp·ep has all of a layer's experts."""
    axes, expert = GROUP_AXES[kind]
    sizes = layout.sizes(expert)
    return "·".join(axis for axis in axes if sizes[axis] > 1 or axis == kind)


def save_layout(plan: Plan, folder: Path) -> list[Path]:
    """Write both pictures of a plan's layout into an existing folder. Raises OSError."""
    return save_picture(layout_figure(plan), folder, "layout")


def layout_figure(plan: Plan) -> Figure:
    """The picture."""
    rows = Rows.of(plan.layout.world_size)
    sheet = Sheet(rows)
    _nodes(sheet, plan)
    _layers(sheet, plan)
    _tokens(sheet, plan)
    _widths(sheet, plan)
    _experts(sheet, plan)
    _replicas(sheet, plan)
    _groups(sheet, plan)
    return sheet.figure(title(plan), _legend(plan))


def title(plan: Plan) -> str:
    """Model, ranks, degrees, and which ranks are shown."""
    world = plan.layout.world_size
    what = f"{plan.run.model.name} on {count_of(world, 'rank')}: {degrees(plan)}"
    return what if world <= MOST_RANKS else f"{what}; the first and last {MOST_RANKS // 2} ranks"


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
        self.right += GAP + max(width, CHARACTER * HEADING * len(heading), CHARACTER * SMALL * len(remark))
        return left

    def word(self, x: float, y: float, text: str, **how: Any) -> None:
        """Words with their middle at y."""
        self.words.append((x, y, text, {"va": "center", "fontsize": FONT, **how}))

    def box(self, x: float, y: float, width: float, height: float, fill: str | Colour) -> None:
        """A rectangle with its middle at y."""
        self.shapes.append(Rectangle((x, y - height / 2), width, height, facecolor=fill, linewidth=0))

    def bar(self, x: float, rank: int, width: float, spans: Sequence[Span], whole: float, fill: str | Colour) -> None:
        """The spans of a whole that a rank holds."""
        for start, end in spans:
            self.box(x + width * start / whole, self.rows.middle[rank], max(LEAST, width * (end - start) / whole), BAR, fill)

    def others(self, x: float, width: float, cuts: Sequence[float]) -> None:
        """What other ranks hold, in every row, with white lines where the whole, 0 to 1, is cut."""
        for y in self.rows.middle.values():
            self.box(x, y, width, BAR, ELSEWHERE)
        drawn = [x + width * cut for cut in cuts] if len(cuts) < MOST_CUTS else []
        ends = [[(cut, y - BAR / 2), (cut, y + BAR / 2)] for cut in drawn for y in self.rows.middle.values()]
        self.shapes.append(LineCollection(ends, colors="white", linewidths=1))  # lines lie above all boxes

    def label(self, x: float, rank: int, width: float, span: Span, text: str, fill: str | Colour, alone: bool = True) -> None:
        """Words in a span, 0 to 1, where they have room; otherwise behind or in front of it, where it stands alone."""
        start, end, room = width * span[0], width * span[1], CHARACTER * FONT * len(text)
        y, place = self.rows.middle[rank], 0.04
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


def _nodes(sheet: Sheet, plan: Plan) -> None:
    """Ranks, and the node of each where there are several."""
    per_node, rows = plan.run.parallel.gpus_per_node, sheet.rows
    if plan.layout.world_size > per_node:
        x, over_lines = sheet.column("node", "", NODE), {"facecolor": "white", "linewidth": 0, "pad": 1.5}
        for node in sorted({rank // per_node for rank in rows.middle}):
            ys = [y for rank, y in rows.middle.items() if rank // per_node == node]
            sheet.box(x, (ys[0] + ys[-1]) / 2, 0.04, ys[-1] - ys[0] + BAR, FAINT)
            sheet.word(x + 0.1, (ys[0] + ys[-1]) / 2, str(node), ha="left", bbox=over_lines)
    x = sheet.column("rank", "", RANK)
    for rank, y in rows.middle.items():
        sheet.word(x + CHARACTER * HEADING * 4, y, str(rank), ha="right", fontsize=FONT + 1)
    if rows.gap is not None:
        sheet.word(x, rows.gap, f"… {plan.layout.world_size - MOST_RANKS:,} more", ha="left", color=FAINT)


def _layers(sheet: Sheet, plan: Plan) -> None:
    """Embedding, decoder layers and head."""
    count, fill = plan.run.model.num_layers, AXIS_COLOURS["pp"]
    left = sheet.column("layers", f"{count}, E embedding, H head", WIDE)
    x, width = left + ENDS + 0.03, WIDE - 2 * (ENDS + 0.03)
    sheet.others(x, width, [stage.layers[0] / count for stage in plan.stages.in_order if stage.layers][1:])
    for rank, y in sheet.rows.middle.items():
        held = holding(plan, rank)
        for at, letter, here in ((left, "E", held.embedding), (left + WIDE - ENDS, "H", held.head)):
            colour = fill if here else ELSEWHERE
            sheet.box(at, y, ENDS, BAR, colour)
            sheet.word(at + ENDS / 2, y, letter, ha="center", color=ink(colour) if here else FAINT)
        spans = [(layers[0], layers[-1] + 1) for layers in held.stages if layers]
        sheet.bar(x, rank, width, spans, count, fill)
        for start, end in spans:
            sheet.label(x, rank, width, (start / count, end / count), ranges(range(start, end)), fill, len(spans) == 1)


def _tokens(sheet: Sheet, plan: Plan) -> None:
    """The part of every sequence of the replica, inside matrices and between them."""
    seq_len, cp, fill = plan.run.train.seq_len, plan.layout.cp, AXIS_COLOURS["cp"]
    pieces = 2 * cp if cp > 1 else 1
    x = sheet.column("sequence", f"{seq_len:,} tokens" + (f", {pieces} pieces" if cp > 1 else ""), WIDE)
    sheet.others(x, WIDE, cuts(pieces))
    for rank, y in sheet.rows.middle.items():
        held = holding(plan, rank)
        sheet.bar(x, rank, WIDE, held.tokens_inside, seq_len, whitened(fill, TINT))
        sheet.bar(x, rank, WIDE, held.tokens_between, seq_len, fill)
        for start, end in held.tokens_inside if cp > 1 else ():
            sheet.word(x + WIDE * (start + end) / 2 / seq_len, y, str(int(start) * pieces // seq_len), ha="center")


def _widths(sheet: Sheet, plan: Plan) -> None:
    """The share of attention's heads, of dense and shared feed-forwards and of the vocabulary."""
    model, tp, fill = plan.run.model, plan.layout.tp, AXIS_COLOURS["tp"]
    x = sheet.column("heads and widths", f"{model.num_heads} query, {model.num_kv_heads} kv heads", WIDE)
    sheet.others(x, WIDE, cuts(tp))
    for rank in sheet.rows.middle:
        span = holding(plan, rank).width
        sheet.bar(x, rank, WIDE, [span], 1, fill)
        heads = range(*(int(model.num_heads * end) for end in span))
        sheet.label(x, rank, WIDE, span, f"heads {ranges(heads)}", fill)


def _experts(sheet: Sheet, plan: Plan) -> None:
    """The share of each layer's experts, and from top to bottom of their width."""
    moe, fill = plan.run.model.moe, AXIS_COLOURS["ep"]
    if moe is None:
        return
    count = moe.num_experts
    x = sheet.column("experts of a layer", f"{count} of width {moe.ffn_hidden_size:,}", WIDE)
    sheet.others(x, WIDE, cuts(plan.layout.ep))
    for rank, y in sheet.rows.middle.items():
        held = holding(plan, rank)
        (first, end), (top, bottom) = held.experts, held.part
        sheet.bar(x, rank, WIDE, [held.experts], count, whitened(fill, TINT))
        at, width = x + WIDE * first / count, WIDE * (end - first) / count
        sheet.box(at, y + BAR * ((top + bottom) / 2 - 0.5), max(LEAST, width), BAR * (bottom - top), fill)
        under = fill if plan.layout.expert_tp == 1 else whitened(fill, TINT)
        numbers = ranges(range(int(first), int(end)))
        sheet.label(x, rank, WIDE, (first / count, end / count), numbers, under)


def _replicas(sheet: Sheet, plan: Plan) -> None:
    """Which data-parallel replica."""
    dp, fill = plan.layout.dp, AXIS_COLOURS["dp"]
    x = sheet.column("replica", f"of {count_of(plan.run.train.global_batch // dp, 'sequence')}", REPLICA)
    sheet.others(x, REPLICA, cuts(dp))
    for rank in sheet.rows.middle:
        span = share(1, holding(plan, rank).replica, dp)
        sheet.bar(x, rank, REPLICA, [span], 1, fill)
        sheet.label(x, rank, REPLICA, span, str(holding(plan, rank).replica), fill)


def _groups(sheet: Sheet, plan: Plan) -> None:
    """A column of lines for every kind of group."""
    for kind, lines in group_columns(plan, sheet.rows).items():
        fill, lanes = AXIS_COLOURS[kind], 1 + max(line.lane for line in lines)
        ranks = len(rank_groups(plan.layout, kind)[0])
        left = sheet.column(kind_name(plan.layout, kind), f"{ranks} ranks", lanes * LANE)
        for line in lines:
            x = left + LANE * (line.lane + 0.5)
            sheet.shapes.append(Line2D([x, x], [line.start, line.end], color=fill, linewidth=1.8, solid_capstyle="butt"))
            dots = Line2D([x] * len(line.dots), line.dots, color=fill, marker="o", markersize=5.5, linestyle="none")
            sheet.shapes.append(dots)


def _legend(plan: Plan) -> list[Patch | Line2D]:
    """What the colours mean that no heading tells."""
    layout, found = plan.layout, []
    if layout.tp > 1:
        found = [
            Patch(color=whitened(AXIS_COLOURS["cp"], TINT), label="tokens inside attention and matrices"),
            Patch(color=AXIS_COLOURS["cp"], label="… and between them"),
        ]
    if plan.run.model.moe and layout.expert_tp > 1:
        found.append(Patch(color=AXIS_COLOURS["ep"], label="part of the experts' width"))
    line = Line2D([], [], color=FAINT, marker="o", markersize=4.5, linewidth=1.8, label="a group: ranks that exchange")
    return [*found, Patch(color=ELSEWHERE, label="on other ranks"), line] if layout.world_size > 1 else []
