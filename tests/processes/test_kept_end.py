"""The token that ends a run's documents stays as it was trained, unless that was wrong."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from app.engine.start.kept_tokenizer import changed_end, keep_tokenizer, kept_end, recorded_end
from app.engine.start.start import check_tokenizer
from app.errors import ConfigError
from tests.data.special_tokens import GEMMA, QWEN, TWO, saved
from tests.processes.own_tokenizer import with_tokenizer
from tests.runs import make_run, with_model

EARLIER: dict[str, Any] = {"data": {"tokenizer": "sum"}}  # a checkpoint that does not record it
TURN = {"tokenizer_config": {"eos_token": "<|im_end|>"}}


def end_in(path: Path, manifest: dict[str, Any] | None) -> str:
    """The end that a run takes that continues or uses a checkpoint."""
    run = with_tokenizer(with_model(make_run(), vocab_size=512), path)
    return recorded_end(check_tokenizer(run, manifest))["end_of_document"]


def test_right_end_of_an_earlier_run_stays(tmp_path: Path):
    path = saved(tmp_path, QWEN, [], **TURN)
    assert end_in(path, None) == "<|im_end|>"
    assert end_in(path, EARLIER) == "<|endoftext|>"
    assert changed_end(EARLIER, str(path), kept=False) is None
    told = f"documents still end with '<|endoftext|>', although {path} ends them with"
    assert changed_end(EARLIER, str(path)) == f"{told} '<|im_end|>'"


def test_wrong_end_token_of_earlier_run_changes_with_notice(tmp_path: Path):
    path = saved(tmp_path, GEMMA, ["</s>"])
    assert end_in(path, EARLIER) == "<eos>"
    told = "documents end with '<eos>' from here on, and ended with '</s>' so far, an ordinary"
    assert changed_end(EARLIER, str(path)) == f"{told} token of {path}"


@pytest.mark.parametrize(("special", "ordinary"), [(TWO, []), (["<stop>"], ["<|endoftext|>"])])
def test_earlier_runs_resume_where_new_ones_are_refused(
    special: list[str], ordinary: list[str], tmp_path: Path
):
    path = saved(tmp_path, special, ordinary)
    with pytest.raises(ConfigError, match=r"data\.tokenizer"):
        end_in(path, None)
    assert end_in(path, EARLIER) == "<|endoftext|>"
    assert changed_end(EARLIER, str(path)) is None


def test_recorded_end_stays(tmp_path: Path):
    path = saved(tmp_path, QWEN, [])
    manifest = {"data": {"tokenizer": "sum", "end_of_document": "<|im_end|>"}}
    assert end_in(path, manifest) == "<|im_end|>" and end_in(path, None) == "<|endoftext|>"
    assert changed_end(manifest, str(path), kept=False) is None


def test_nothing_is_kept_of_bytes_and_of_conversions(tmp_path: Path):
    path = saved(tmp_path, QWEN, [], **TURN)
    for manifest, spec in ((EARLIER, "bytes"), ({"imported": "float32"}, str(path)), (None, "")):
        assert kept_end(manifest, spec) is None and changed_end(manifest, spec) is None


def test_run_folder_records_end_of_document(tmp_path: Path):
    """Its tokenizer can be named by other runs, as the one it was."""
    path = saved(tmp_path / "theirs", QWEN, [], **TURN)
    run = with_tokenizer(with_model(make_run(), vocab_size=512), path)
    (tmp_path / "run").mkdir()
    keep_tokenizer(run, tmp_path / "run")
    assert end_in(tmp_path / "run/tokenizer.json", None) == "<|im_end|>"
    keep_tokenizer(dataclasses.replace(run), tmp_path / "run", "<|endoftext|>")
    kept = json.loads((tmp_path / "run/tokenizer_config.json").read_text())
    assert kept == {"eos_token": "<|endoftext|>"}
