"""docs/parallelism.md: its commands print and draw what it shows, its numbers are those of plans
and of bench/results.
"""

from __future__ import annotations

import json
import re
import shlex
from functools import cache
from pathlib import Path

import pytest

from app.cli.plan import main
from app.cli.plan_views.timeline_picture import title
from app.plan.formatting import GIB, figures
from app.plan.layout import ParallelLayout
from app.plan.pipeline.timeline import simulate
from app.plan.schedule import build_schedule, v_shaped
from app.planner.plan import Plan
from scripts.plan_docs import CONSOLE, PICTURE, refreshed
from tests.cases import chosen
from tests.config import load

pytestmark = pytest.mark.docs

ROOT = Path(__file__).parent.parent.parent
DOCS = (ROOT / "docs/parallelism.md").read_text()
PICTURES = {match["name"]: match for match in PICTURE.finditer(DOCS)}
WIDE = (
    "model=mixtral_8x7b",
    "precision=bf16",
    "train.seq_len=4096",
    "train.micro_batch=1",
    "train.global_batch=8",
)
CHUNKS = {"interleaved": 2, "zero_bubble_v": 2}
FORMULAS = {  # with p = 4 pipeline ranks, M = 8 microbatches, v = 2 stages per rank
    "gpipe": ("(p − 1)/(M + p − 1)", 3 / 11),
    "1f1b": ("the same", 3 / 11),
    "interleaved": ("(p − 1)/(vM + p − 1)", 3 / 19),
    "zero_bubble_h1": ("(p − 1)/(3M + p − 1)", 3 / 27),
    "zero_bubble_v": ("(p − 1)/(6M + p − 1)", 3 / 51),
}


def overrides(name: str) -> list[str]:
    """Those of the command that draws a picture."""
    words = shlex.split(PICTURES[name][0])[3:]
    return [word for word in words if not word.startswith(("what=", "out="))]


def volumes(*more: str) -> dict[str, int]:
    """Bytes that one rank sends in a step, by kind of group."""
    return {kind.name: kind.bytes for kind in Plan(load(*more)).traffic}


def rows_of(heading: str, name: str) -> list[list[str]]:
    """Cells behind the first one, of the rows of a schedule behind some text of the page."""
    page = DOCS.partition(heading)[2]
    pattern = rf"^\| `{name}`(?:, `parallel\.vpp=2`)? \| (.*) \|$"
    return [row.split(" | ") for row in re.findall(pattern, page, re.MULTILINE)]


def test_page_shows_every_picture():
    files = {path.stem for path in (ROOT / "docs/parallelism").iterdir()}
    assert files == set(PICTURES) == set(re.findall(r"!\[\w+\]\(parallelism/(\w+)\.svg\)", DOCS))


def test_command_draws_its_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(PICTURES["1f1b"][0])[3:]) == 0
    assert capsys.readouterr().out.endswith("plan/1f1b/timeline.png\n")
    assert (tmp_path / "plan/1f1b/timeline.svg").exists()


@pytest.mark.every(6)
@pytest.mark.parametrize("block", [*CONSOLE.finditer(DOCS)], ids=lambda block: block[1])
def test_console_blocks_show_what_is_printed(block: re.Match[str]):
    """scripts/plan_docs.py refreshes them."""
    assert refreshed(block[0]).splitlines() == block[0].splitlines()


def test_refused_layouts_name_a_nearest_one():
    said = [
        block[0].splitlines()[2]
        for block in CONSOLE.finditer(DOCS)
        if "what=groups" not in block[1]
    ]
    assert len(said) >= 5 and all(
        line.startswith("plan: ") and "; nearest that works: " in line for line in said
    )


def test_folding_examples():
    layout = ParallelLayout(16, tp=4, pp=2, ep=4, etp=1)
    assert (
        layout.groups("dp")[:4]
        == layout.groups("edp", expert=True)[:4]
        == [[0, 4], [1, 5], [2, 6], [3, 7]]
    )
    assert layout.groups("ep", expert=True) == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 10, 11],
        [12, 13, 14, 15],
    ]
    assert ParallelLayout(8, cp=8, ep=8).dp == 1


def test_null_etp_is_tp():
    (folded,) = (block[1] for block in CONSOLE.finditer(DOCS) if "parallel.etp=1" in block[1])
    words = shlex.split(folded)[4:]
    unset = [word for word in words if word != "parallel.etp=1"]
    degrees = [Plan(load(*each)).layout.sizes(True)["etp"] for each in (words, unset)]
    assert degrees == [1, 2]


def test_traffic_formulas_are_those_of_plans():
    """For Mixtral's 32 layers: hidden width 4096, 32 query and 8 key/value heads of width 128,
    K = 2.
    """
    degrees = ("parallel.tp=2", "parallel.cp=2", "parallel.dp=2", "parallel.ep=2", "parallel.etp=2")
    plan = Plan(load(*WIDE, *degrees))
    h, tp, cp, ranks = 4096 // 4 * 4096 * 2, 2, 2, 4
    microbatches, busiest = plan.run.num_microbatches, min(plan.run.model.moe.planned_imbalance, 2)
    assert microbatches == 4 and "5 · (tp − 1) · h" in DOCS
    found, whole = volumes(*WIDE, *degrees), 32 * (2 * 4096 + 4096 * 8) + 4096
    sent = microbatches * (32 * 5 + 2 + 3) * (tp - 1) * h
    assert found["tp"] == sent + 2 * (tp - 1) * whole * 4 // tp
    assert found["cp"] == microbatches * 32 * 2 * (cp - 1) * h * 2 * 8 * 128 // 4096
    assert found["etp_ep"] == pytest.approx(
        microbatches * 32 * 4 * (ranks - 1) / ranks * h * 2 * 2 * busiest
    )
    traded = volumes(*WIDE, *degrees, "parallel.cp_comm_type=all_to_all")["cp"]
    assert traded == microbatches * 32 * 2 * (cp - 1) * h * 2 * (32 + 8) * 128 // 4096 // cp


def test_all_to_all_sends_less_from_cp_8_on():
    sends = {
        (cp, how): volumes(
            "model=llama3_8b",
            "train.seq_len=4096",
            f"parallel.cp={cp}",
            f"parallel.cp_comm_type={how}",
        )["cp"]
        for cp in (4, 8)
        for how in ("all_gather", "all_to_all")
    }
    assert (
        sends[4, "all_to_all"] > sends[4, "all_gather"]
        and sends[8, "all_to_all"] < sends[8, "all_gather"]
    )


@cache
def planned(name: str, sequences: int = 8) -> Plan:
    """Plan of a schedule, with the model and batch of the page's commands."""
    words = [
        word
        for word in overrides("1f1b")
        if not word.startswith(("schedule=", "train.global_batch="))
    ]
    vpp = f"parallel.vpp={CHUNKS.get(name, 1)}"
    return Plan(load(*words, f"schedule={name}", vpp, f"train.global_batch={sequences}"))


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


@pytest.mark.parametrize("name", chosen(FORMULAS, ["interleaved"]))
def test_schedule_tables_are_as_computed_and_planned(name: str):
    text, share = FORMULAS[name]
    lists = build_schedule(name, 4, 8, CHUNKS.get(name, 1))
    assert simulate(lists, v_shape=v_shaped(name)).bubble_fraction == pytest.approx(share)
    plan = planned(name)
    in_flight = str(plan.timeline.peak_in_flight[0]) + (" halves" if name in CHUNKS else "")
    gib = f"{plan.busiest.total / GIB:.0f}"
    bubbles = [percent(planned(name, sequences).timeline.bubble_fraction) for sequences in (8, 32)]
    formulas, plans, *_ = rows_of("## Schedules", name)
    assert formulas[1:] == [text, percent(share)]
    assert plans == [
        bubbles[0], figures(plan.timeline.makespan * 1e3), in_flight, gib, bubbles[1]
    ]  # fmt: skip


@pytest.mark.parametrize("name", PICTURES)
def test_schedule_pictures_are_current(name: str):
    """scripts/plan_docs.py redraws them."""
    svg = (ROOT / f"docs/parallelism/{name}.svg").read_text()
    assert title(planned(name)) in svg and len(svg) < 2**18


def two(gib: float) -> str:
    """Two digits; halves, which floats miss, go up."""
    return f"{gib + 1e-9:.2f}"


@pytest.mark.parametrize(("name", "gpus"), [("pipeline", False), ("layouts", True)])
def test_measured_tables_are_as_recorded(name: str, gpus: bool):
    lines = (ROOT / f"bench/results/{name}.jsonl").read_text().splitlines()
    recorded = {
        (f"{row['step_ms']:.0f}", two(row["peak_gib"]), two(row["planned_gib"]))
        for row in map(json.loads, lines)
        if "peak_gib" in row
    }
    if gpus:
        cells = re.findall(
            r"^\| [^|]+ \| \d \| (\d+) \| [\d.]+ \| ([\d.]+) \| ([\d.]+) \|$", DOCS, re.MULTILINE
        )
        shown = {(ms, peak, plan) for ms, plan, peak in cells}
    else:
        shown = set(
            re.findall(r"^\| [^|]+ \| (\d+) \| ([\d.]+) \| ([\d.]+) \|$", DOCS, re.MULTILINE)
        )
    assert len(shown) >= 6 and shown - recorded == set()
