"""What docs/schedules.md says and draws of each schedule is what is planned."""

from __future__ import annotations

import re
import shlex
from functools import cache
from pathlib import Path

import pytest

from app.cli.plan_views.timeline_picture import title
from app.plan.formatting import figures
from app.plan.pipeline.timeline import simulate
from app.plan.plan import GIB, Plan
from app.plan.schedule import build_schedule, v_shaped
from scripts.plan_docs import PICTURE
from tests.test_config import load

DOCS = Path(__file__).parent.parent.parent / "docs"
PAGE = (DOCS / "schedules.md").read_text()
SCHEDULES, PLAN = PAGE.partition("## ")[0].split("| planned bubble |")
COMMANDS = {match[1]: shlex.split(match[0])[3:] for match in PICTURE.finditer(PAGE)}
CHUNKS = {"interleaved": 2, "zero_bubble_v": 2}
NAMES = ("gpipe", "1f1b", "interleaved", "zero_bubble_h1", "zero_bubble_v")


def row_of(page: str, name: str) -> list[str]:
    """The cells behind the first one of the table's row of a schedule."""
    (row,) = re.findall(rf"^\| `{name}`(?:, `parallel\.vpp=2`)? \| (.*) \|$", page, re.MULTILINE)
    return row.split(" | ")


@cache
def planned(name: str, sequences: int = 8) -> Plan:
    """The plan of the command whose picture the page shows."""
    overrides = [
        word
        for word in COMMANDS[name]
        if not word.startswith(("what=", "out=", "train.global_batch="))
    ]
    return Plan(load(*overrides, f"train.global_batch={sequences}"))


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def test_every_schedule_has_a_command():
    assert set(COMMANDS) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_table_of_the_plan_is_what_is_planned(name: str):
    plan = planned(name)
    in_flight = str(plan.timeline.peak_in_flight[0]) + (" halves" if name in CHUNKS else "")
    gib = f"{plan.busiest.total / GIB:.0f}"
    bubbles = [percent(planned(name, sequences).timeline.bubble_fraction) for sequences in (8, 32)]
    found = [bubbles[0], figures(plan.timeline.makespan * 1e3), in_flight, gib, bubbles[1]]
    assert row_of(PLAN, name) == found


FORMULAS = {  # with p = 4 pipeline ranks, M = 8 microbatches, v = 2 stages per rank
    "gpipe": ("(p − 1)/(M + p − 1)", 3 / 11),
    "1f1b": ("the same", 3 / 11),
    "interleaved": ("(p − 1)/(vM + p − 1)", 3 / 19),
    "zero_bubble_h1": ("(p − 1)/(3M + p − 1)", 3 / 27),
    "zero_bubble_v": ("(p − 1)/(6M + p − 1)", 3 / 51),
}


@pytest.mark.parametrize("name", NAMES)
def test_formulas_and_plans_of_the_schedules(name: str):
    text, share = FORMULAS[name]
    lists = build_schedule(name, 4, 8, CHUNKS.get(name, 1))
    assert simulate(lists, v_shape=v_shaped(name)).bubble_fraction == pytest.approx(share)
    shown = percent(planned(name).timeline.bubble_fraction)
    assert row_of(SCHEDULES, name)[1:4] == [text, percent(share), shown]


@pytest.mark.parametrize("name", NAMES)
def test_the_picture_of_a_schedule_is_current(name: str):
    """scripts/plan_docs.py draws it anew."""
    svg = (DOCS / f"schedules/{name}.svg").read_text()
    assert title(planned(name)) in svg and len(svg) < 2**18
    assert f"](schedules/{name}.svg)" in PAGE
