"""docs/moe.md: its pictures are current, its numbers are those measured or computed."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from app.cli.plan_views.pictures import save_picture
from app.moe.echo import plan_clones
from scripts.dispatch_picture import PICTURE, picture
from scripts.echo_picture import AVERAGE, LOADS, ROOMS, SPILLS, plan_picture
from tests.integration.parallelism_docs import drawn

pytestmark = pytest.mark.docs

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "bench/results"
DOCS = (ROOT / "docs/moe.md").read_text().replace("**", "")
PIECES = {
    "offsets: choices to places": "offsets",
    "dispatch": "dispatch",
    "combine": "combine",
    "combine, backward": "combine'",
    "dispatch, backward": "dispatch'",
}
PLANNERS = {"greedy": "one_shot_greedy", "packing": "approx_bin_packing", "target_search": "exact"}
Json = dict[str, Any]


def recorded(name: str) -> list[Json]:
    return [json.loads(line) for line in (RESULTS / name).read_text().splitlines()]


def table(first: str) -> Iterator[dict[str, str]]:
    """Rows, by column, of the table whose first column has this name."""
    head, rows = re.search(rf"^\| ({first} \|.*)\n\|[-|]+\n((?:\|.*\n)+)", DOCS, re.M).groups()
    columns = head.strip(" |").split(" | ")
    for row in rows.splitlines():
        yield dict(zip(columns, row.strip(" |").split(" | "), strict=True))


def test_pictures_are_current(tmp_path: Path):
    """scripts/dispatch_picture.py and scripts/echo_picture.py redraw them."""
    for name, figure in (("moe-dispatch", picture()), ("echo-plan", plan_picture())):
        svg = save_picture(figure, tmp_path, name)[0].read_text()
        assert drawn(svg) == drawn((ROOT / f"docs/{name}.svg").read_text())
        assert f"]({name}.svg)" in DOCS
    assert PICTURE.name == "moe-dispatch.svg"


def test_dispatch_pieces_are_as_measured():
    rows = json.loads((RESULTS / "dispatch.json").read_text())
    shown = {row.pop("piece"): list(row.values()) for row in table("piece")}
    assert set(shown) == set(PIECES)
    for name, piece in PIECES.items():
        expected = [
            f"{row['micros']}" + (f" ({int(row['rate'] + 0.5)})" if row["rate"] else "")
            for row in rows
            if row["piece"] == piece
        ]
        assert [cell.removesuffix(", without its host wait") for cell in shown[name]] == expected


def test_steps_of_dispatchers_are_as_measured():
    measured = [
        [
            f"{row['step_ms']:.1f}",
            f"{row['tflops_per_gpu']}",
            f"{row['planned_gib']:.2f}",
            f"{row['peak_gib']:.2f}",
            f"{row['load_max_over_mean']:.1f}",
        ]
        for row in recorded("step_profile_static.jsonl")
    ]
    shown = [list(row.values())[1:] for row in table("dispatcher, graphs")]
    assert len(shown) >= 6 and all(row in measured for row in shown)


def test_echo_example_is_what_is_planned():
    counts_RE = torch.zeros(4, 16, dtype=torch.int64)
    counts_RE[2] = torch.tensor(LOADS).flatten()
    moved_ES, _ = plan_clones(counts_RE, 4)
    slots = [(e, s // 4, int(moved_ES[e, s])) for e, s in moved_ES.nonzero().tolist()]
    assert sorted(slots) == [(2, 2, 50), (3, 2, 20), (3, 3, 180), (7, 2, 40)]
    assert [sum(n for e, _, n in slots if e == each) for each, _ in SPILLS] == [200, 50, 40]
    assert [AVERAGE - sum(LOADS[rank]) for rank, _ in ROOMS] == [room for _, room in ROOMS]
    moved_ES, _ = plan_clones(counts_RE, 1, "target_search")
    slots = [(e, s, int(moved_ES[e, s])) for e, s in moved_ES.nonzero().tolist()]
    assert slots == [(2, 2, 110), (3, 3, 180), (7, 0, 40)]


def echo_loads(row: Json, columns: list[str], which: int) -> list[float]:
    """Loads without clones and by each column's planner: `which` 1 is the mean, 2 the worst."""
    loads = [row["before"][which]]
    for column in columns[1:]:
        planner, spares = column.split()
        loads.append(row["after"][f"{PLANNERS[planner]} {spares}"]["load"][which])
    return loads


def test_echo_loads_are_as_computed():
    packed = (RESULTS / "echo_loads.json.gz").read_bytes()
    found = json.loads(gzip.decompress(packed))["synthetic"]
    computed = {r["skew"]: r for r in found if (r["ranks"], r["experts"]) == (8, 128)}
    shown = list(table("popularity"))
    assert len(shown) >= 5
    for row in shown:
        loads = echo_loads(computed[row.pop("popularity")], list(row), 1)
        assert list(row.values()) == [f"{load:.3f}" for load in loads]
    for row in table("ranks"):
        ranks = int(row.pop("ranks"))
        cases = [echo_loads(r, list(row), 2) for r in found if r["ranks"] == ranks]
        worst = [max(column) for column in zip(*cases, strict=True)]
        assert list(row.values()) == [f"{load:.2f}" for load in worst]


def test_echo_steps_are_as_measured():
    cases: dict[str, Json] = {}
    for row in recorded("echo_steps.jsonl"):
        forced = "model.moe.force_balance=true" in row["overrides"]
        hot = [word[4:5] for word in row["overrides"] if word.startswith("hot=")]
        case = cases.setdefault(*hot or ["forced balance" if forced else "0"], {})
        clones = any("echo" in word for word in row["overrides"])
        case.setdefault(clones, []).append(row)
    ms = {
        name: {clones: median(row["step_ms"] for row in rows) for clones, rows in case.items()}
        for name, case in cases.items()
    }
    balanced = ms["forced balance"][False]
    shown = {row.pop("hot experts"): list(row.values()) for row in table("hot experts")}
    assert set(shown) == set(cases)
    for name, case in cases.items():
        times = ms[name][False], ms[name][True]
        with_clones = case[True][-1]
        assert shown[name] == [
            f"{case[False][-1]['rank_load']:.3f}",
            *(f"{time:.1f}" for time in times),
            *(f"{100 * balanced / time:.1f}" for time in times),
            f"{with_clones['rank_load_after']:.3f}",
            f"{with_clones['clones'] / (12 * 8):.1f}",
        ]
