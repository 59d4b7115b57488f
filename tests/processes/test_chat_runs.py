"""Runs on conversations: resumed bit for bit, on other ranks, and beside text."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from app.data.corpora import HeldOut
from app.data.feed import DataSplit
from app.data.packing import PackedSequences
from app.engine.run.validations import Validations
from app.errors import ConfigError
from tests.distributed import run_distributed
from tests.processes.test_blended_runs import trained, write_lines
from tests.runs import make_run
from tests.training import TINY, composed, untimed


def go(folder: Path, *more: str, ranks: int = 1) -> str:
    """Train on conversations in bytes; what rank 0 prints, or its mistake."""
    rows = [
        {"conversations": [{"from": "human", "value": "?" * (number % 5 + 1)},
                           {"from": "gpt", "value": "ab" * (number * 7 % 23 + 1)}]}
        for number in range(120)
    ]  # fmt: skip
    (folder / "talk.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_lines(folder / "text.jsonl", [f"plain {number} " * 3 for number in range(60)])
    settings = (
        *TINY, "data=chat", f"data.cache_dir={folder}/cache", "train.steps=4", "log.console=true",
        "checkpoint.interval=2", "train.seq_len=40", "data.truncate=left",
    )  # fmt: skip
    return run_distributed(trained, ranks, folder, composed((*settings, *more), ranks))[0]


DATA = {
    "alone": "data.path=talk.jsonl",
    "blend": "data.sources=[{path: talk.jsonl}, {path: text.jsonl, source: jsonl}]",
}


def test_validation_without_a_loss_is_refused():
    validations = object.__new__(Validations)
    split = DataSplit(PackedSequences.__new__(PackedSequences), None)
    validations.run = make_run()
    validations.sets = [(HeldOut("talk", 1.0, split), [])]  # type: ignore[list-item]
    validations.by_count = {0: lambda batches: (0.0, 0)}  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match=r"eval_sequences=.*validation of talk has no token with"):
        validations.report(step=1)


@pytest.mark.full
@pytest.mark.parametrize("kind", DATA)
def test_runs_on_conversations_resume_exactly(kind: str, tmp_path: Path):
    words = (DATA[kind],)
    told = go(tmp_path, *words, "run_dir=whole")
    assert re.search(r"data  \d+ of \d+ conversations.* longer than train.seq_len=40", told), told
    rows = untimed(tmp_path / "whole")
    saved = "resume=whole/checkpoints/step-00000002"
    go(tmp_path, *words, saved, "run_dir=again")
    later = [row for row in rows if row["step"] > 2 and "loss" in row]
    assert [
        row for row in untimed(tmp_path / "again") if row["step"] > 2 and "loss" in row
    ] == later
    assert (tmp_path / "again/chat_template.jinja").is_file()


@pytest.mark.full
def test_runs_on_conversations_continue_on_other_ranks(tmp_path: Path):
    go(tmp_path, DATA["alone"], "run_dir=whole")
    losses = {row["step"]: row["loss"] for row in untimed(tmp_path / "whole") if "loss" in row}
    saved = "resume=whole/checkpoints/step-00000002"
    for key in ("dp", "cp"):
        go(tmp_path, DATA["alone"], saved, f"run_dir={key}", f"parallel.{key}=2", ranks=2)
        found = {row["step"]: row["loss"] for row in untimed(tmp_path / key) if "loss" in row}
        assert found.keys() >= {3, 4}
        assert {step: pytest.approx(losses[step], rel=1e-5) for step in found} == found
