"""The picture of a layout: what it says a rank holds, against the code that holds it, and its
rows, bars, lines and words.
"""

from __future__ import annotations

import functools
from itertools import chain, combinations
from pathlib import Path

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from app.cli.plan_views.holdings import Span, holding, part_of
from app.cli.plan_views.layout_picture import (
    group_columns,
    group_lines,
    layout_figure,
    save_layout,
    title,
)
from app.cli.plan_views.sheet import MOST_RANKS, Rows
from app.model.layers.context_parallel import own_tokens
from app.plan.groups import GROUPS
from app.plan.model.experts import MoEBodyWeights
from app.plan.model.vocabulary import table
from app.plan.sharding.blocks import ShardCoords
from app.planner.plan import Plan
from tests.cases import chosen
from tests.config import load

# groups that are drawn, where they have several ranks
SHOWN = ("tp", "cp", "pp", "dp_cp", "etp_ep", "edp")
MOE = ("model=mixtral_8x7b", "train.seq_len=4096", "train.micro_batch=1")
FOLDED = (
    "parallel.tp=2",
    "parallel.cp=2",
    "parallel.pp=2",
    "parallel.dp=2",
    "parallel.ep=4",
    "parallel.etp=1",
)
LAYOUTS = {
    "one rank": ("model=dense_tiny",),
    "tp cp": ("model=llama3_8b", "parallel.tp=4", "parallel.cp=2"),
    "folded": (*MOE, *FOLDED),
    "parts of experts": (*MOE, "parallel.dp=4", "parallel.ep=2", "parallel.etp=2"),
    "another order": (
        *MOE,
        "parallel.tp=2",
        "parallel.dp=4",
        "parallel.ep=4",
        "parallel.etp=1",
        "parallel.order=dp-tp-cp-ep-pp",
    ),
    "interleaved": ("model=dense_tiny", "parallel.pp=2", "parallel.vpp=2", "train.micro_batch=1"),
    "experts 128 wide": ("+experiment=deepseek_v3_2048",),
    "32 ranks": (
        *MOE,
        "parallel.tp=4",
        "parallel.pp=4",
        "parallel.vpp=2",
        "parallel.dp=2",
        "parallel.ep=4",
        "parallel.etp=2",
    ),
}
QUICK = ["one rank", "folded", "parts of experts", "interleaved"]


@functools.cache
def plan_of(name: str) -> Plan:
    return Plan(load(*LAYOUTS[name]))


@functools.cache
def figure_of(name: str) -> Figure:
    return layout_figure(plan_of(name))


def points(spans: tuple[Span, ...]) -> list[int]:
    return list(chain(*(range(int(start), int(end)) for start, end in spans)))


@pytest.mark.parametrize("name", chosen(["tp cp", "folded", "another order"], ["folded"]))
def test_tokens_are_those_of_the_model(name: str):
    plan = plan_of(name)
    layout, seq_len = plan.layout, plan.run.train.seq_len
    for rank in range(layout.world_size):
        coords, held = layout.coords(rank), holding(plan, rank)
        inside = own_tokens(seq_len, layout.cp, coords["cp"]).tolist()
        assert points(held.tokens_inside) == inside
        here = len(inside) // layout.tp  # a scatter leaves each tp rank an equal part, in order
        assert points(held.tokens_between) == inside[coords["tp"] * here :][:here]


@pytest.mark.parametrize(
    "name",
    chosen(
        ["tp cp", "folded", "parts of experts", "another order", "32 ranks"],
        ["folded", "parts of experts"],
    ),
)
def test_widths_and_experts_are_those_of_the_parameters(name: str):
    plan = plan_of(name)
    model, layout = plan.run.model, plan.layout
    for rank in range(layout.world_size):
        held, place = holding(plan, rank), ShardCoords.of(layout, rank)
        block = place.block(table(model))
        assert [end * model.vocab_size for end in held.width] == [block.start[0], block.stop[0]]
        if model.moe:
            whole = model.moe.ffn_hidden_size
            block = place.block(MoEBodyWeights.of(model, model.moe).experts.w_down)
            spans = held.experts, tuple(end * whole for end in held.part)
            assert spans == tuple(zip(block.start[:2], block.stop[:2], strict=True))


@pytest.mark.parametrize("name", chosen(LAYOUTS, QUICK))
def test_stages_and_replicas_are_those_of_the_plan(name: str):
    plan = plan_of(name)
    held = [holding(plan, rank) for rank in range(min(plan.layout.world_size, 64))]
    for rank, each in enumerate(held):
        coords = plan.layout.coords(rank)
        stages = plan.stages.stages[coords["pp"]]
        assert (
            each.stages == tuple(stage.layers for stage in stages) and each.replica == coords["dp"]
        )
        assert (each.embedding, each.head) == (
            any(s.embedding for s in stages),
            any(s.head for s in stages),
        )


def test_spans_laid_end_to_end_are_cut_in_equal_parts():
    spans = (0, 4), (12, 16)
    assert [list(part_of(spans, nth, 2)) for nth in range(2)] == [[(0, 4)], [(12, 16)]]
    assert [list(part_of(spans, nth, 4)) for nth in range(4)] == [
        [(0, 2)],
        [(2, 4)],
        [(12, 14)],
        [(14, 16)],
    ]
    assert list(part_of(((0, 2), (4, 8)), 0, 2)) == [(0, 2), (4, 5)]
    assert list(part_of(spans, 0, 1)) == list(spans)


@pytest.mark.parametrize("name", chosen(LAYOUTS, QUICK))
def test_a_line_per_group_with_a_dot_per_rank(name: str):
    plan = plan_of(name)
    rows = Rows.of(plan.layout.world_size)
    columns = group_columns(plan, rows)
    several = {name for name in SHOWN if GROUPS[name].size(plan.layout) > 1}
    assert set(columns) == (several if plan.run.model.moe else several - {"etp_ep", "edp"})
    for kind, lines in columns.items():
        shown = [
            [rows.middle[rank] for rank in group if rank in rows.middle]
            for group in GROUPS[kind].members(plan.layout)
        ]
        assert sorted(line.dots for line in lines) == sorted(tuple(ys) for ys in shown if ys)
        for first, second in combinations(lines, 2):
            apart = (
                first.lane != second.lane or first.end < second.start or second.end < first.start
            )
            assert apart, (kind, first, second)


def test_interleaved_groups_are_adjacent_and_share_lanes():
    rows = Rows.of(8)
    assert [line.lane for line in group_lines([[0, 1], [2, 3], [4, 5], [6, 7]], rows)] == [
        0,
        0,
        0,
        0,
    ]
    assert [line.lane for line in group_lines([[0, 4], [1, 5], [2, 6], [3, 7]], rows)] == [
        0,
        1,
        2,
        3,
    ]
    assert [line.lane for line in group_lines([[0, 2], [1, 3], [4, 6], [5, 7]], rows)] == [
        0,
        1,
        0,
        1,
    ]


def test_many_ranks_are_shown_by_their_ends():
    plan = plan_of("experts 128 wide")
    rows = Rows.of(2048)
    half = MOST_RANKS // 2
    assert [*rows.middle] == [*range(half), *range(2048 - half, 2048)]
    assert rows.middle[half - 1] < rows.gap < rows.middle[2048 - half]
    (pipelines,) = [lines for kind, lines in group_columns(plan, rows).items() if kind == "pp"]
    for line in pipelines:  # sixteen ranks of which one is shown: it leads into the gap
        assert (
            len(line.dots) == 1
            and abs(line.end - line.start) > 0
            and not line.start < rows.gap < line.end
        )
    assert title(plan).endswith("; the first and last 16 ranks")
    assert "… 2,016 more" in words(figure_of("experts 128 wide"))
    assert Rows.of(MOST_RANKS).gap is None


def words(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


@pytest.mark.parametrize("name", chosen(LAYOUTS, QUICK))
def test_everything_lies_within_the_picture_and_words_apart(name: str):
    figure = figure_of(name)
    (axes,) = figure.axes
    renderer = FigureCanvasAgg(figure).get_renderer()
    width, height = figure.bbox.width, figure.bbox.height
    boxes = [
        (text.get_text(), text.get_window_extent(renderer))
        for text in axes.texts
        if text.get_text()
    ]
    legends = [("legend", legend.get_window_extent(renderer)) for legend in figure.legends]
    for text, box in (*boxes, *legends):
        assert box.x0 >= 0 and box.x1 <= width and box.y0 >= 0 and box.y1 <= height, text
    for (first, a), (second, b) in combinations((*boxes, *legends), 2):
        assert a.x1 <= b.x0 or b.x1 <= a.x0 or a.y1 <= b.y0 or b.y1 <= a.y0, (first, second)
    for patch in axes.patches:
        assert (
            isinstance(patch, Rectangle) and patch.get_x() + patch.get_width() <= axes.get_xlim()[1]
        )


def test_headings_and_numbers():
    said = words(figure_of("folded"))
    assert (
        title(plan_of("folded")) == "mixtral_8x7b on 16 ranks: dp 2, tp 2, cp 2, pp 2, ep 4, edp 2"
    )
    for word in (
        "rank",
        "node",
        "layers",
        "sequence",
        "heads and widths",
        "experts of a layer",
        "replica",
        "tp",
        "dp_cp",
        "edp",
    ):
        assert word in said
    assert said.count("0–15") == said.count("16–31") == 8 and said.count("heads 16–31") == 8
    assert said.count("2–3") == 4 and said.count("E") == said.count("H") == 16
    assert "etp_ep" in words(figure_of("parts of experts")) and "node" not in words(
        figure_of("tp cp")
    )
    assert "experts of a layer" not in words(figure_of("tp cp"))
    assert words(figure_of("tp cp")).count("cp") == words(figure_of("tp cp")).count("dp_cp") == 1
    legend = [text.get_text() for text in figure_of("parts of experts").legends[0].get_texts()]
    assert legend == [
        "part of the experts' width",
        "on other ranks",
        "a process group",
    ]


def test_a_dot_for_every_place_in_a_group():
    plan = plan_of("folded")
    dots = [
        len(line.get_xdata())
        for line in figure_of("folded").axes[0].lines
        if line.get_marker() == "o"
    ]
    several = [name for name in SHOWN if GROUPS[name].size(plan.layout) > 1]
    assert sum(dots) == 16 * len(several) and all(
        isinstance(line, Line2D) for line in figure_of("folded").axes[0].lines
    )


def test_equal_plans_make_equal_files_with_words_as_text(tmp_path: Path):
    written = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        paths = save_layout(Plan(load(*LAYOUTS["parts of experts"])), tmp_path / name)
        assert [path.name for path in paths] == ["layout.svg", "layout.png"]
        written.append(paths[0].read_text())
    assert written[0] == written[1] and title(plan_of("parts of experts")) in written[0]
    assert paths[1].read_bytes().startswith(b"\x89PNG") and len(written[0]) < 2**18
