"""layout.svg and layout.png: a row per rank, with its shares of layers, tokens and weights on the
left and its process groups on the right.

Lengths are inches, from the upper left corner.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from app.cli.plan_views.holdings import cuts, holding, share
from app.cli.plan_views.pictures import ink, save_picture, whitened
from app.cli.plan_views.sheet import (
    BAR,
    CHARACTER,
    ELSEWHERE,
    FAINT,
    FONT,
    HEADING,
    LANE,
    LEAST,
    MOST_RANKS,
    ROW,
    Line,
    Rows,
    Sheet,
)
from app.plan.formatting import count_of, drawable, ranges
from app.plan.groups import GROUPS, Group, GroupKind
from app.planner.plan import Plan
from app.planner.summary import degrees

# Okabe and Ito's palette, legible with every kind of colour vision: a colour per parallel axis
AXIS_COLOURS = {
    "pp": "#505050",
    "cp": "#E69F00",
    "tp": "#0072B2",
    "ep": "#009E73",
    "dp": "#CC79A7",
    "edp": "#56B4E9",
}


TINT = 0.55  # share of white in the colour of what is cut further


ENDS = 0.17  # width of the embedding's and the head's box


NODE, RANK, REPLICA, WIDE = 0.3, 0.34, 0.8, 1.5  # widths of columns


def group_lines(groups: Sequence[Sequence[int]], rows: Rows) -> list[Line]:
    """Return a line per group with a rank that is shown, in as few lanes as possible. The line of a
    group whose other ranks are left out reaches into the gap.
    """
    found = []
    for group in groups:
        dots = tuple(rows.middle[rank] for rank in group if rank in rows.middle)
        if dots:
            ends = [*dots]
            if rows.gap is not None and len(dots) < len(group):
                ends.append(rows.gap - ROW / 4 if min(dots) < rows.gap else rows.gap + ROW / 4)
            found.append((min(ends), max(ends), dots))
    lanes: list[float] = []  # y at which the last line of each lane ends
    lines = []
    for start, end, dots in sorted(found):
        lane = next((nth for nth, taken in enumerate(lanes) if taken < start), len(lanes))
        lanes[lane : lane + 1] = [end]
        lines.append(Line(dots, start, end, lane=lane))
    return lines


def group_columns(plan: Plan, rows: Rows) -> dict[str, list[Line]]:
    """Return group name -> lines, for the groups of several ranks that communicate in this model;
    for tied embeddings, only those whose pipeline ends are shown.
    """
    shown = [
        group
        for group in GROUPS.values()
        if group.kind in (GroupKind.data, GroupKind.stages)
        and group.used_by(plan.run.model)
        and not group.ends_only
        and group.size(plan.layout) > 1
    ]
    return {group.name: group_lines(group.members(plan.layout), rows) for group in shown}


def group_colour(group: Group) -> str:
    """Return the colour of the first of its axes that has one."""
    return next(AXIS_COLOURS[axis] for axis in group.axes if axis in AXIS_COLOURS)


def save_layout(plan: Plan, folder: Path) -> list[Path]:
    """Write both pictures of a plan's layout into an existing folder. Raises OSError."""
    return save_picture(layout_figure(plan), folder, "layout")


def layout_figure(plan: Plan) -> Figure:
    """Draw the picture."""
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
    """Return the title: model, ranks, degrees, and which ranks are shown."""
    world = plan.layout.world_size
    what = f"{drawable(plan.run.model.name)} on {count_of(world, 'rank')}: {degrees(plan)}"
    return what if world <= MOST_RANKS else f"{what}; the first and last {MOST_RANKS // 2} ranks"


def _nodes(sheet: Sheet, plan: Plan) -> None:
    """Draw the ranks, and their nodes if there are several."""
    per_node = plan.run.parallel.gpus_per_node
    rows = sheet.rows
    if plan.layout.world_size > per_node:
        x = sheet.column("node", "", NODE)
        over_lines = {"facecolor": "white", "linewidth": 0, "pad": 1.5}
        for node in sorted({rank // per_node for rank in rows.middle}):
            ys = [y for rank, y in rows.middle.items() if rank // per_node == node]
            sheet.box(x, (ys[0] + ys[-1]) / 2, 0.04, height=ys[-1] - ys[0] + BAR, fill=FAINT)
            sheet.word(x + 0.1, (ys[0] + ys[-1]) / 2, str(node), ha="left", bbox=over_lines)
    x = sheet.column("rank", "", RANK)
    for rank, y in rows.middle.items():
        sheet.word(x + CHARACTER * HEADING * 4, y, str(rank), ha="right", fontsize=FONT + 1)
    if rows.gap is not None:
        sheet.word(
            x, rows.gap, f"… {plan.layout.world_size - MOST_RANKS:,} more", ha="left", color=FAINT
        )


def _layers(sheet: Sheet, plan: Plan) -> None:
    """Draw embedding, decoder layers and head."""
    count = plan.run.model.num_layers
    fill = AXIS_COLOURS["pp"]
    left = sheet.column("layers", f"{count}, E embedding, H head", WIDE)
    x = left + ENDS + 0.03
    width = WIDE - 2 * (ENDS + 0.03)
    sheet.others(
        x, width, [stage.layers[0] / count for stage in plan.stages.in_order if stage.layers][1:]
    )
    for rank, y in sheet.rows.middle.items():
        held = holding(plan, rank)
        for at, letter, here in ((left, "E", held.embedding), (left + WIDE - ENDS, "H", held.head)):
            colour = fill if here else ELSEWHERE
            sheet.box(at, y, ENDS, height=BAR, fill=colour)
            sheet.word(at + ENDS / 2, y, letter, ha="center", color=ink(colour) if here else FAINT)
        spans = [(layers[0], layers[-1] + 1) for layers in held.stages if layers]
        sheet.bar(x, rank, width, spans=spans, whole=count, fill=fill)
        for start, end in spans:
            sheet.label(
                x,
                rank,
                width,
                span=(start / count, end / count),
                text=ranges(range(start, end)),
                fill=fill,
                alone=len(spans) == 1,
            )


def _tokens(sheet: Sheet, plan: Plan) -> None:
    """Draw each rank's part of a sequence, inside attention and matrices and between them."""
    seq_len = plan.run.train.seq_len
    cp = plan.layout.cp
    fill = AXIS_COLOURS["cp"]
    chunks = 2 * cp if cp > 1 else 1
    x = sheet.column(
        "sequence", f"{seq_len:,} tokens" + (f", {chunks} chunks" if cp > 1 else ""), WIDE
    )
    sheet.others(x, WIDE, cuts(chunks))
    for rank, y in sheet.rows.middle.items():
        held = holding(plan, rank)
        sheet.bar(x, rank, WIDE, spans=held.tokens_inside, whole=seq_len, fill=whitened(fill, TINT))
        sheet.bar(x, rank, WIDE, spans=held.tokens_between, whole=seq_len, fill=fill)
        for start, end in held.tokens_inside if cp > 1 else ():
            sheet.word(
                x + WIDE * (start + end) / 2 / seq_len,
                y,
                str(int(start) * chunks // seq_len),
                ha="center",
            )


def _widths(sheet: Sheet, plan: Plan) -> None:
    """Draw each rank's share of heads, dense and shared MLPs and vocabulary."""
    model = plan.run.model
    tp = plan.layout.tp
    fill = AXIS_COLOURS["tp"]
    x = sheet.column(
        "heads and widths", f"{model.num_heads} query, {model.num_kv_heads} kv heads", WIDE
    )
    sheet.others(x, WIDE, cuts(tp))
    for rank in sheet.rows.middle:
        span = holding(plan, rank).width
        sheet.bar(x, rank, WIDE, spans=[span], whole=1, fill=fill)
        heads = range(*(int(model.num_heads * end) for end in span))
        sheet.label(x, rank, WIDE, span=span, text=f"heads {ranges(heads)}", fill=fill)


def _experts(sheet: Sheet, plan: Plan) -> None:
    """Draw each rank's share of a layer's experts; the height shows its share of their width."""
    moe = plan.run.model.moe
    fill = AXIS_COLOURS["ep"]
    if moe is None:
        return
    count = moe.num_experts
    x = sheet.column("experts of a layer", f"{count} of width {moe.ffn_hidden_size:,}", WIDE)
    sheet.others(x, WIDE, cuts(plan.layout.ep))
    for rank, y in sheet.rows.middle.items():
        held = holding(plan, rank)
        (first, end), (top, bottom) = held.experts, held.part
        sheet.bar(x, rank, WIDE, spans=[held.experts], whole=count, fill=whitened(fill, TINT))
        at = x + WIDE * first / count
        width = WIDE * (end - first) / count
        sheet.box(
            at,
            y + BAR * ((top + bottom) / 2 - 0.5),
            max(LEAST, width),
            height=BAR * (bottom - top),
            fill=fill,
        )
        under = fill if plan.layout.expert_tp == 1 else whitened(fill, TINT)
        numbers = ranges(range(int(first), int(end)))
        sheet.label(x, rank, WIDE, span=(first / count, end / count), text=numbers, fill=under)


def _replicas(sheet: Sheet, plan: Plan) -> None:
    """Draw the data-parallel replica of each rank."""
    dp = plan.layout.dp
    fill = AXIS_COLOURS["dp"]
    x = sheet.column(
        "replica", f"of {count_of(plan.run.train.global_batch // dp, 'sequence')}", REPLICA
    )
    sheet.others(x, REPLICA, cuts(dp))
    for rank in sheet.rows.middle:
        replica = holding(plan, rank).replica
        span = share(1, replica, dp)
        sheet.bar(x, rank, REPLICA, spans=[span], whole=1, fill=fill)
        sheet.label(x, rank, REPLICA, span=span, text=str(replica), fill=fill)


def _groups(sheet: Sheet, plan: Plan) -> None:
    """Draw a column of lines for every kind of process group."""
    for name, lines in group_columns(plan, sheet.rows).items():
        group = GROUPS[name]
        fill = group_colour(group)
        lanes = 1 + max(line.lane for line in lines)
        left = sheet.column(name, f"{group.size(plan.layout)} ranks", lanes * LANE)
        for line in lines:
            x = left + LANE * (line.lane + 0.5)
            sheet.shapes.append(
                Line2D(
                    [x, x], [line.start, line.end], color=fill, linewidth=1.8, solid_capstyle="butt"
                )
            )
            dots = Line2D(
                [x] * len(line.dots),
                line.dots,
                color=fill,
                marker="o",
                markersize=5.5,
                linestyle="none",
            )
            sheet.shapes.append(dots)


def _legend(plan: Plan) -> list[Patch | Line2D]:
    """Return the legend: colours that no heading explains."""
    layout = plan.layout
    found = []
    if layout.tp > 1:
        found = [
            Patch(
                color=whitened(AXIS_COLOURS["cp"], TINT),
                label="tokens inside attention and matrices",
            ),
            Patch(color=AXIS_COLOURS["cp"], label="… and between them"),
        ]
    if plan.run.model.moe and layout.expert_tp > 1:
        found.append(Patch(color=AXIS_COLOURS["ep"], label="part of the experts' width"))
    line = Line2D(
        [],
        [],
        color=FAINT,
        marker="o",
        markersize=4.5,
        linewidth=1.8,
        label="a process group",
    )
    if layout.world_size == 1:
        return []
    return [*found, Patch(color=ELSEWHERE, label="on other ranks"), line]
