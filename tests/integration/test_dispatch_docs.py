"""docs/moe-dispatch.md: its picture is of today, and its figures are those that were measured."""

from __future__ import annotations

import json
import re
from pathlib import Path

from app.cli.plan_views.pictures import save_picture
from scripts.dispatch_picture import PICTURE, picture
from tests.integration.test_parallelism_docs import drawn

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "bench/results"
DOCS = (ROOT / "docs/moe-dispatch.md").read_text()
PIECES = {
    "offsets: choices to rows": "offsets",
    "dispatch": "dispatch",
    "combine": "combine",
    "combine, backward: gradients of rows and probabilities": "combine'",
    "dispatch, backward": "dispatch'",
}


def test_the_picture_is_of_today(tmp_path: Path):
    """scripts/dispatch_picture.py draws it anew."""
    svg = save_picture(picture(), tmp_path, "moe-dispatch")[0].read_text()
    assert drawn(svg) == drawn(PICTURE.read_text())


def test_pieces_are_as_measured():
    rows = json.loads((RESULTS / "dispatch.json").read_text())
    for shown, piece in PIECES.items():
        (line,) = re.findall(rf"^\| {re.escape(shown)} \| (.*) \|$", DOCS, re.MULTILINE)
        measured = [row for row in rows if row["piece"] == piece]
        expected = [
            f"{row['micros']}" + (f" ({int(row['rate'] + 0.5)})" if row["rate"] else "")
            for row in measured
        ]
        cells = line.replace("*", "").replace(", without its host wait", "").split(" | ")
        assert cells == expected


def test_whole_steps_are_as_measured():
    lines = (RESULTS / "step_profile_static.jsonl").read_text().splitlines()
    for row in map(json.loads, lines):
        cells = (
            f"{row['step_ms']:.1f} | {row['tflops_per_gpu']} | {row['planned_gib']:.2f} | "
            f"{row['peak_gib']:.2f} | {row['load_max_over_mean']:.1f}"
        )
        assert cells in DOCS.replace("*", ""), cells
