"""The picture of a step, by its structure: rows, bars, colours, numbers, words."""

from __future__ import annotations

import functools
import time
from collections import Counter
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from app.cli.plan_views.timeline_picture import (
    HEIGHT,
    MOST_BARS,
    colour,
    save_timeline,
    timeline_figure,
    title,
    windows,
)
from app.plan.actions import Backward, BackwardInput, BackwardWeight, Compute, Forward
from app.planner.plan import Plan
from tests.config import load

pytestmark = pytest.mark.docs

STEP = (
    "model=llama3_8b",
    "precision=bf16",
    "train.seq_len=4096",
    "train.micro_batch=1",
    "parallel.pp=4",
)
KINDS = (Forward, Backward, BackwardInput, BackwardWeight)


@functools.cache
def plan_of(schedule: str, microbatches: int = 8, *more: str) -> Plan:
    return Plan(load(*STEP, f"schedule={schedule}", f"train.global_batch={microbatches}", *more))


def bars(figure: Figure) -> list[list[int]]:
    """[axes][row] bars."""
    return [[len(row.get_paths()) for row in axes.collections] for axes in figure.axes]


def words(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("schedule", "per_row", "legend"),
    [
        ("1f1b", 16, ["forward", "backward", "idle"]),
        ("gpipe", 16, ["forward", "backward", "idle"]),
        ("zero_bubble_h1", 24, ["forward", "backward, inputs", "backward, weights", "idle"]),
        (
            "interleaved parallel.vpp=2",
            32,
            [
                "forward, chunk 0",
                "forward, chunk 1",
                "backward, chunk 0",
                "backward, chunk 1",
                "idle",
            ],
        ),
    ],
)
def test_a_row_per_rank_and_a_bar_per_action(schedule: str, per_row: int, legend: list[str]):
    name, *more = schedule.split()
    figure = timeline_figure(plan_of(name, 8, *more))
    assert bars(figure) == [[per_row] * 4]
    assert words(figure) == legend
    assert len(figure.axes[0].patches) == 4  # grey behind every row


def test_bars_lie_where_the_timeline_says():
    plan = plan_of("1f1b")
    (axes,) = timeline_figure(plan).axes
    for rank, row in enumerate(axes.collections):
        events = [
            event for event in plan.timeline.events[rank] if isinstance(event.action, Compute)
        ]
        spans = [(path.vertices[:, 0].min(), path.vertices[:, 0].max()) for path in row.get_paths()]
        assert spans == [pytest.approx((event.start * 1e3, event.end * 1e3)) for event in events]
        heights = {
            (path.vertices[:, 1].min(), path.vertices[:, 1].max()) for path in row.get_paths()
        }
        assert heights == {(rank - HEIGHT / 2, rank + HEIGHT / 2)}
    low, high = axes.get_ylim()
    assert low > high  # the first rank on top
    assert axes.get_xlim() == (0, pytest.approx(plan.timeline.makespan * 1e3))


def test_microbatches_are_numbered_where_there_is_room():
    (axes,) = timeline_figure(plan_of("1f1b")).axes
    assert Counter(text.get_text() for text in axes.texts) == {str(mb): 8 for mb in range(8)}
    (axes,) = timeline_figure(plan_of("1f1b", 80)).axes
    assert len(axes.texts) < 4 * 160


def test_kinds_chunks_and_microbatches_differ_in_colour():
    fills = {
        (kind, mb, chunk): colour(kind(mb, chunk), 2)
        for kind in KINDS
        for mb in (0, 1)
        for chunk in (0, 1)
    }
    assert len(set(fills.values())) == len(fills)
    assert all(0 <= part <= 1 for fill in fills.values() for part in fill)
    first, odd, later = fills[Forward, 0, 0], fills[Forward, 1, 0], fills[Forward, 0, 1]
    assert sum(first) < sum(odd) < sum(later)  # lighter


def test_title_says_what_and_how_long():
    assert title(plan_of("interleaved", 8, "parallel.vpp=2")).startswith(
        "interleaved: 4 pipeline ranks, 2 stages each, 8 microbatches, bubble "
    )
    plan = plan_of("1f1b")
    assert f"bubble {plan.timeline.bubble_fraction:.1%}, " in title(plan) and title(plan).endswith(
        " ms per step (estimated)"
    )
    assert timeline_figure(plan).get_suptitle() == title(plan)
    alone = Plan(load("model=dense_tiny", "train.global_batch=8"))
    assert title(alone).startswith("none: 1 pipeline rank, 1 microbatch, bubble 0.0%")


def test_a_long_step_is_shown_by_its_ends():
    plan = plan_of("1f1b", 512)
    first, last = windows(plan)
    whole = plan.timeline.makespan * 1e3
    assert first.start == 0 and last.end == whole and first.end < last.start
    assert first.title.startswith("first ") and last.title.startswith("last ")
    for row in [row for axes in bars(timeline_figure(plan)) for row in axes]:
        assert 0 < row <= MOST_BARS
    assert [view.title for view in windows(plan_of("1f1b", MOST_BARS // 2))] == [""]


@pytest.mark.full
def test_a_very_long_step_is_drawn_fast_and_small(tmp_path: Path):
    plan = Plan(load(*STEP, "parallel.pp=16", "train.global_batch=1024"))
    assert plan.timeline.makespan > 0
    start = time.process_time()
    paths = save_timeline(plan, tmp_path)
    assert time.process_time() - start < 10
    assert [path.name for path in paths] == ["timeline.svg", "timeline.png"]
    assert all(0 < path.stat().st_size < 2 * 2**20 for path in paths)


def test_equal_plans_make_equal_files_with_words_as_text(tmp_path: Path):
    svgs = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        svgs.append(save_timeline(plan_of("1f1b"), tmp_path / name)[0].read_text())
    assert svgs[0] == svgs[1]
    assert title(plan_of("1f1b")) in svgs[0]


def test_very_many_bars_become_pixels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("app.cli.plan_views.timeline_picture.RASTER_BARS", 63)
    svg = save_timeline(plan_of("1f1b"), tmp_path)[0].read_text()
    # one per row instead of one per bar
    assert svg.count("<image ") == 4 and svg.count("<path") < 64
    monkeypatch.setattr("app.cli.plan_views.timeline_picture.RASTER_BARS", 64)
    assert "<image " not in save_timeline(plan_of("1f1b"), tmp_path)[0].read_text()
