"""docs/echo.md: its pictures are of today, and its figures are those that were computed."""

from __future__ import annotations

import json
import re

import torch

from app.cli.plan_views.pictures import save_picture
from app.moe.echo import plan_clones
from scripts.echo_charts import RESULTS, measured_steps
from scripts.echo_pictures import AVERAGE, LOADS, ROOMS, ROOT, SPILLS, pictures
from tests.integration.test_parallelism_docs import drawn

DOCS = (ROOT / "docs/echo.md").read_text()
FOUND = json.loads((RESULTS / "echo_loads.json").read_text())
COLUMNS = (
    *("one_shot_greedy 1", "approx_bin_packing 1", "exact 1", "one_shot_greedy 2", "exact 2"),
    *("one_shot_greedy 4", "exact 4"),
)


def line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def test_pictures_are_of_today(tmp_path):
    """scripts/echo_pictures.py draws them anew, and the page shows each."""
    today = pictures()
    assert set(today) == set(re.findall(r"\]\(([\w-]+)\.svg\)", DOCS))
    for name, picture in today.items():
        svg = save_picture(picture, tmp_path, name)[0].read_text()
        assert drawn(svg) == drawn((ROOT / f"docs/{name}.svg").read_text()), name


def test_the_example_is_what_is_planned():
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


def test_synthetic_loads_are_as_computed():
    rows = [row for row in FOUND["synthetic"] if row["ranks"] == 8 and row["experts"] == 128]
    assert len(rows) == 9
    for row in rows:
        after = [row["after"][name] for name in COLUMNS]
        loads = [f"{value['load'][1]:.3f}" for value in after]
        assert line(row["skew"], f"{row['before'][1]:.3f}", *loads) in DOCS
        clones = [f"{value['clones']:.1f}, {value['out'][0]:.1f}" for value in after]
        assert line(row["skew"], *clones) in DOCS


def test_capacity_factors_are_as_computed():
    for ranks in (2, 4, 8, 16):
        rows = [row for row in FOUND["synthetic"] if row["ranks"] == ranks]
        worst = [max(row["after"][name]["load"][2] for row in rows) for name in COLUMNS]
        before = max(row["before"][2] for row in rows)
        assert line(str(ranks), *(f"{value:.2f}" for value in (before, *worst))) in DOCS


def test_learned_routing_is_as_computed():
    assert len(FOUND["trained"]) == 6
    for row in FOUND["trained"]:
        loads = [row["before"], *(row["after"][name]["load"] for name in COLUMNS)]
        cells = [f"{mean:.3f} ({worst:.2f})" for _, mean, worst in loads]
        assert line(f"{row['aux_loss_coeff']:g}, {row['ranks']}", *cells) in DOCS


def test_the_simulation_is_as_computed():
    plain = DOCS.replace("**", "")
    shown = re.findall(
        r"^\| ((?:zipf|dirichlet|learned) [\d.]+), (\d+) \| (.*) \|$", plain, re.MULTILINE
    )
    assert len(shown) == 18
    rows = {(row.pop("skew"), row.pop("ranks")): row for row in FOUND["simulated"]}
    for skew, ranks, cells in shown:
        before, *micros = rows[skew, int(ranks)].values()
        assert cells == " | ".join((f"{before:.3f}", *map(str, micros)))
    for name in ("rows_us", "wire_us", "clone_us"):
        assert f"{FOUND['assumed'][0][name]} µs" in DOCS


def test_steps_are_as_measured():
    cases = measured_steps()
    forced = cases["forced"]["without"]
    assert len(cases) == 5
    for name, case in cases.items():
        times = case["without"], case["with"]
        shares = [f"{100 * forced / time:.1f}" for time in times]
        hot = {"forced": "forced balance", "none": "0"}.get(name, name[4:5])
        after = f"{case['after']:.3f}", f"{case['clones'] / (12 * 8):.1f}"
        ms = [f"{time:.1f}" for time in times]
        assert line(hot, f"{case['load']:.3f}", *ms, *shares, *after) in DOCS


def test_pieces_are_as_measured():
    rows = json.loads((RESULTS / "echo_pieces.json").read_text())
    table = DOCS.split("replayed from a graph:")[1]
    shown = re.findall(r"^\|.*\| ([\d.]+) \|$", table, re.MULTILINE)
    assert sorted(map(float, shown)) == sorted(row["micros"] for row in rows)
