"""A resumed run continues with the data of its checkpoint, or reports what has changed."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from app.config import Run
from app.data import sources
from app.engine.files.checkpoints import (
    MANIFEST,
    manifest_digest,
    newest_checkpoint,
    parse_manifest,
)
from app.engine.ranks.groups import create_groups
from app.engine.start.start import load_all_data
from app.errors import ConfigError
from app.planner.plan import Plan
from tests.distributed import run_distributed
from tests.hf_folders import save_byte_level
from tests.programs import run_forked
from tests.training import ROOT, composed, corpus_in, train_rank

STEPS = ("train.steps=4", "checkpoint.interval=2", "log.console=true")


def trained(rank: int, folder: Path, run: Run) -> str:
    """Return what a run prints, or the line that it ends with."""
    os.chdir(folder)
    with redirect_stdout(io.StringIO()) as printed:
        try:
            train_rank(rank, run, {})
        except ConfigError as error:
            return str(error)
    return printed.getvalue()


def rows(printed: str, name: str) -> list[str]:
    """The lines of the opening with this word in front."""
    lines = [line.strip().split("  ", 1) for line in printed.splitlines()]
    return [text for word, *rest in lines if word == name for text in rest]


class Trial:
    """A run of two steps on a corpus of its own, and what follows it."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        self.folder, self.corpus = folder, folder / "corpus"
        self.settings = (*corpus_in(self.corpus), *STEPS, *overrides)
        assert "train.steps" not in self.go("train.steps=2", "run_dir=run")
        self.checkpoint = newest_checkpoint(folder / "run")

    def go(self, *overrides: str, ranks: int = 1) -> str:
        """Train once more; what every rank said, which must be the same where it is an error."""
        run = composed((*self.settings, *overrides), ranks)
        said = run_distributed(trained, ranks, self.folder, run)
        assert len({text for text in said if text}) == 1
        return said[0]

    def resumes(self, *overrides: str, ranks: int = 1) -> str:
        return self.go("resume=run", *overrides, ranks=ranks)


def test_changed_data_are_refused_or_accepted_and_listed(tmp_path: Path):
    """By two ranks as well, with the same line; once accepted, they are what is compared with."""
    trial = Trial(tmp_path)
    file = trial.corpus / "2.txt"
    size = file.stat().st_size
    file.write_text(file.read_text() + "more")
    change = f"2.txt has {size + 4} bytes, had {size}"
    refused = (
        f"data.path={trial.corpus}/*.txt: the data have changed since run/checkpoints/"
        f"step-00000002 was saved: {change}; restore them, or "
        "continue with data.accept_changed=true"
    )
    for ranks in (1, 2):
        overrides = ("parallel.dp=2",) if ranks == 2 else ()
        assert trial.resumes(*overrides, ranks=ranks) == refused
    assert newest_checkpoint(tmp_path / "run") == trial.checkpoint
    told = trial.resumes("data.accept_changed=true")
    assert rows(told, "changed") == ["train.steps: 2 -> 4", f"data: {change}"]
    told = trial.resumes("train.steps=6")
    assert rows(told, "changed") == ["train.steps: 4 -> 6"]


@pytest.mark.full
def test_the_same_files_elsewhere_are_the_same_data(tmp_path: Path):
    """Resuming accepts a moved corpus; one that has also changed is refused by both runs."""
    trial = Trial(tmp_path)
    moved = tmp_path / "moved"
    shutil.move(trial.corpus, moved)
    elsewhere = f"data.path=[{moved}/*.txt]"
    told = trial.resumes(elsewhere, f"data.cache_dir={moved}/cache")
    changed = [line.split(":")[0] for line in rows(told, "changed")]
    assert changed == ["data.path", "data.cache_dir", "train.steps"]
    (moved / "0.txt").unlink()
    moved.rename(tmp_path / "again")
    refused = trial.resumes(f"data.path=[{tmp_path}/again/*.txt]", "train.steps=6")
    assert f"was trained with [{moved}/*.txt], which held" in refused
    assert "held other data: 0.txt is gone; did you mean [" in refused
    assert refused.endswith("data.accept_changed=true")
    assert not any((tmp_path / "runs").glob("*"))


@pytest.mark.full
def test_resume_auto_follows_the_data(tmp_path: Path):
    """Two runs in one folder each resume with their own corpus, wherever it is now."""
    other = tmp_path / "other"
    settings = (*corpus_in(tmp_path / "corpus"), *STEPS)
    corpus_in(other)
    (other / "0.txt").write_text("something else " * 50)
    told = []
    for place, steps in (("corpus", 2), ("other", 2), ("corpus", 4), ("copy", 4)):
        if place == "copy":
            other.rename(tmp_path / "copy")
        data = (f"data.path=[{tmp_path}/{place}/*.txt]", f"train.steps={steps}", "resume=auto")
        run = composed((*settings, *data), 1)
        told += run_distributed(trained, 1, tmp_path, run)
    first, second = rows(told[0], "folder") + rows(told[1], "folder")
    assert rows(told[2], "folder") + rows(told[3], "folder") == [first, second]
    assert first != second
    (passed,) = rows(told[2], "passed over")
    assert passed.startswith(f"{second}/checkpoints/step-00000002: data.path=")


@pytest.mark.full
def test_checkpoint_without_data_record_resumes_with_notice(tmp_path: Path):
    trial = Trial(tmp_path)
    assert trial.checkpoint
    manifest = parse_manifest(trial.checkpoint)
    assert [name for name, *_ in manifest.pop("data")["files"]] == [f"{n}.txt" for n in range(6)]
    manifest["sha256"] = manifest_digest(manifest)
    (trial.checkpoint / MANIFEST).write_text(json.dumps(manifest))
    (trial.corpus / "0.txt").write_text("something else " * 500)
    told = trial.resumes()
    assert rows(told, "data") == [
        "not compared: the checkpoint does not say what it was trained on"
    ]
    assert rows(trial.resumes("train.steps=6"), "data") == []


@pytest.mark.full
def test_a_stream_is_compared_too(tmp_path: Path):
    lines = [json.dumps({"text": f"document {n} " * 9}) for n in range(300)]
    (tmp_path / "hub").mkdir()
    file = tmp_path / "hub/train.jsonl"
    file.write_text("\n".join(lines))
    stream = (
        "data=hub", "data.path=[]", f"data.name={tmp_path}/hub", "data.streaming=true",
        "data.validation_documents=50",
    )  # fmt: skip
    trial = Trial(tmp_path, *stream)
    file.write_text("\n".join([*lines, lines[0]]))
    assert "the data have changed since" in trial.resumes()
    told = trial.resumes("data.accept_changed=true")
    assert told.startswith("data.accept_changed=true: a position in a stream is invalid")


def found_on(rank: int, folder: Path, run: Run) -> str:
    """Act as two hosts, one of which has a different copy of the data."""
    if rank:
        (folder / "other").mkdir()
        (folder / "other/0.txt").write_text("something else " * 500)
        files = [str(folder / "other/0.txt")]
        sources.source_files = lambda config: (files, None)
    try:
        load_all_data(run, create_groups(Plan(run).layout, rank), 0)
    except ConfigError as error:
        return str(error)
    return "nothing was found"


@pytest.mark.full
def test_hosts_with_different_data_are_reported(tmp_path: Path):
    run = composed((*corpus_in(tmp_path / "corpus"), "parallel.dp=2"), 2)
    said = run_distributed(found_on, 2, tmp_path, run)
    assert said[0] == said[1]
    assert ": rank 1 on " in said[0] and "finds other data than rank 0: 0.txt has 7500" in said[0]


def broken(rank: int, run: Run, missing: str) -> str:
    """The line that a rank ends with when a listed file is gone for the first of the ranks only."""
    if rank == 0:
        sources.source_files = lambda config: ([missing], None)
    try:
        load_all_data(run, create_groups(Plan(run).layout, rank), rank)
    except ConfigError as error:
        return str(error)
    return "nothing was found"


def test_what_one_rank_cannot_read_ends_all_with_one_line(tmp_path: Path):
    run = composed((*corpus_in(tmp_path / "corpus"), "parallel.dp=2"), 2)
    said = run_distributed(broken, 2, run, str(tmp_path / "gone.txt"))
    line = "is no longer there, although it has just been listed"
    assert said == [f"data.path={tmp_path}/gone.txt: {line}"] * 2


GOOD = b'{"text": "a document of some length"}\n' * 40
FAULTS: dict[str, tuple[str, bytes, str]] = {
    "latin": ("text", b"caf\xe9" + GOOD, "bad: is not UTF-8: byte 0xe9 at offset 3; "),
    "line": ("jsonl", GOOD + b'{"text": \n', "bad: line 41 is not JSON: Expecting value"),
    "empty": ("jsonl", b"", "corpus/*: no text: every file has 0 bytes"),
    "parquet": ("parquet", b"PAR1", "bad: is not a whole parquet file: "),
    "denied": ("text", GOOD, "bad: cannot be read: Permission denied"),
    "vanished": ("text", GOOD, "bad: is no longer there, although it has just been listed"),
}


@pytest.mark.every(3)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_one_line_and_nothing_is_written(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    kind, content, told = FAULTS[name]
    settings = corpus_in(tmp_path / "tiny")[:-3]
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus/bad").write_bytes(content)
    if name in ("denied", "vanished"):
        fail = PermissionError if name == "denied" else FileNotFoundError

        def refuse(path: str, mode: str) -> object:
            raise fail(13, "Permission denied", path)

        monkeypatch.setattr(sources, "open", refuse, raising=False)
    line = [sys.executable, str(ROOT / "train.py"), *settings, f"data={kind}", "run_dir=new"]
    where = [f"data.path=[{tmp_path}/corpus/*]", f"data.cache_dir={tmp_path}/cache"]
    done = run_forked(tmp_path, [*line, *where])
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.startswith(f"train.py: data.path={tmp_path}/corpus/")
    assert told in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "new").exists() and not (tmp_path / "runs").exists()
    assert not list(tmp_path.glob("cache/graphfold/*/"))


def test_changed_tokenizer_is_named_as_such(tmp_path: Path):
    own = tmp_path / "tokenizer.json"
    save_byte_level(own)
    trial = Trial(tmp_path, f"data.tokenizer={own}", "model.vocab_size=1024")
    own.write_text(own.read_text() + "\n")
    refused = trial.resumes()
    assert refused.startswith(f"data.tokenizer={own}: the data have changed since ")
    assert ": the tokenizer has other contents; restore them, or " in refused
    moved = tmp_path / "moved"
    shutil.copytree(trial.corpus, moved)
    elsewhere = f"data.path=[{moved}/*.txt]"
    assert trial.resumes(elsewhere).startswith(f"data.tokenizer={own}: ")
