"""Runs of several sources: metrics, resuming, and validation documents of their own."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from app.config import Run
from app.engine.files.run_folder import read_metrics
from app.errors import ConfigError
from tests.distributed import run_distributed
from tests.training import ROOT, TINY, composed, train_rank, untimed

ALOUD = ("log.console=true", "log.verbose=true")
FILES = {"plans": "app/plan/*.py", "rules": "app/rules/*.py", "docs": "docs/[a-f]*.md"}


def trained(rank: int, folder: Path, run: Run) -> str:
    """Return what a run prints, or the line that it ends with."""
    os.chdir(folder)
    with redirect_stdout(io.StringIO()) as printed:
        try:
            train_rank(rank, run, {})
        except ConfigError as error:
            return str(error)
    return printed.getvalue()


def listed(sources: Sequence[dict[str, object]]) -> str:
    """Sources as they are typed."""
    entries = (", ".join(f"{key}: {value}" for key, value in each.items()) for each in sources)
    return "[" + ", ".join(f"{{{entry}}}" for entry in entries) + "]"


def write_lines(path: Path, texts: Sequence[str]) -> None:
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))


class Trial:
    """Runs on JSON lines of three sources."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name, pattern in FILES.items():
            texts = [path.read_text() for path in sorted(ROOT.glob(pattern))[:5]]
            lines = [json.dumps({"text": text, "other": text[::-1]}) for text in texts]
            (folder / f"{name}.jsonl").write_text("\n".join(lines))

    def source(self, name: str, **keys: object) -> dict[str, object]:
        return {"path": f"{self.folder}/{name}.jsonl", **keys}

    def go(self, *sources: dict[str, object], more: tuple[str, ...] = (), ranks: int = 1) -> str:
        """Train; what rank 0 prints, or the line that it ends with."""
        several = [f"data.sources={listed(sources)}"] if sources else []
        settings = (*TINY, f"data.cache_dir={self.folder}/cache", *ALOUD)
        run = composed((*settings, *several, "checkpoint.interval=2", *more), ranks)
        return run_distributed(trained, ranks, self.folder, run)[0]


def test_resumed_blend_repeats_and_may_change(tmp_path: Path):
    trial = Trial(tmp_path)
    two = trial.source("plans", weight=3.0), trial.source("rules")
    told = trial.go(*two, more=("train.steps=4", "run_dir=whole"))
    assert "data  75.0% plans of " in told and "; 25.0% rules of " in told
    rows = untimed(tmp_path / "whole")
    last = next(row for row in rows if row["step"] == 4)
    assert last["tokens/plans"] == 3 * last["tokens/rules"]
    assert last["tokens/plans"] + last["tokens/rules"] == last["tokens"]
    assert 0 < last["epochs/rules"] < 1
    assert last["loss"] == pytest.approx(0.75 * last["loss/plans"] + 0.25 * last["loss/rules"])
    held = next(row for row in reversed(rows) if "val_loss" in row)
    assert held["val_loss"] == pytest.approx(
        0.75 * held["val_loss/plans"] + 0.25 * held["val_loss/rules"]
    )

    # the same again from the middle, by two ranks
    saved = "resume=whole/checkpoints/step-00000002"
    told = trial.go(*two, more=(saved, "run_dir=again", "parallel.dp=2", "train.steps=4"), ranks=2)
    again = untimed(tmp_path / "again")
    for row in again:
        same = (each for each in rows if each.keys() == row.keys())
        match = next(each for each in same if each["step"] == row["step"])
        assert {key: pytest.approx(value, rel=1e-5) for key, value in match.items()} == row

    # other sources and weights, told at the start
    changed = trial.source("rules", weight=2.0), trial.source("docs")
    told = trial.go(*changed, more=("resume=whole", "run_dir=other", "train.steps=6"))
    assert "data.sources: docs is new; plans is left out; rules: weight 1.0 -> 2.0" in told
    row = read_metrics(tmp_path / "other")[-2]
    assert row["tokens/rules"] > last["tokens/rules"] and "tokens/plans" not in row


@pytest.mark.full
def test_resumed_blend_refuses_other_texts(tmp_path: Path):
    trial = Trial(tmp_path)
    two = trial.source("plans"), trial.source("rules")
    trial.go(*two, more=("train.steps=2", "run_dir=whole"))
    more = ("resume=whole", "run_dir=other", "train.steps=4")
    other = trial.go(two[0], trial.source("rules", text_field="other"), more=more)
    assert other.startswith("data.sources=rules: text_field=other: ")
    assert other.endswith("was trained with rules: text_field=null")
    held_out = trial.go(*two, more=(*more, f"data.validation={tmp_path}/docs.jsonl"))
    assert held_out.startswith("data.validation=") and "was trained with []" in held_out
    with (tmp_path / "rules.jsonl").open("a") as file:
        file.write('\n{"text": "more"}')
    changed = trial.go(*two, more=more)
    assert "the data have changed since" in changed and "rules: rules.jsonl has" in changed


@pytest.mark.full
def test_validation_documents_of_their_own(tmp_path: Path):
    trial = Trial(tmp_path)
    path = f"data.path={tmp_path}/plans.jsonl"
    files = ("data=jsonl", path, "train.steps=2", "checkpoint.interval=0")
    trial.go(more=(*files, f"data.validation={tmp_path}/rules.jsonl", "run_dir=one"))
    both = listed([trial.source("rules", weight=3.0), trial.source("docs")])
    trial.go(more=(*files, f"data.validation={both}", "run_dir=two"))
    one, two = (untimed(tmp_path / name) for name in ("one", "two"))
    # all documents are trained on, and the other validation changes no step
    train = [[row for row in rows if "loss" in row] for rows in (one, two)]
    assert train[0] == train[1]
    single, several = (next(row for row in rows if "val_loss" in row) for rows in (one, two))
    assert several["val_loss/rules"] == single["val_loss"]
    mean = 0.75 * several["val_loss/rules"] + 0.25 * several["val_loss/docs"]
    assert several["val_loss"] == pytest.approx(mean)


def test_losses_of_sources_in_every_layout(tmp_path: Path):
    """Each rank counts its part; a replayed graph counts every step anew."""
    trial = Trial(tmp_path)
    files = [trial.source("plans", weight=3.0), trial.source("rules")]
    more = ("train.steps=4", "model.num_layers=2", "checkpoint.interval=0", "train.micro_batch=1")
    layouts = {
        "one": (),
        "graph": (
            "cuda_graph=full_iteration",
            "cuda_graph.optimizer=true",
            "cuda_graph.warmup_steps=1",
        ),
        "stages": (
            "parallel.pp=2",
            "parallel.cp=2",
        ),
    }
    found = {}
    for name, layout in layouts.items():
        ranks = 4 if name == "stages" else 1
        trial.go(*files, more=(*more, *layout, f"run_dir={name}"), ranks=ranks)
        rows = [row for row in untimed(tmp_path / name) if "loss" in row]
        found[name] = [(row["loss/plans"], row["loss/rules"]) for row in rows]
        assert len(set(found[name])) == 4
    for name in layouts:
        assert found[name] == [pytest.approx(each, rel=1e-5) for each in found["one"]], name


@pytest.mark.full
def test_source_split_in_three_has_the_same_losses(tmp_path: Path):
    """Of an epoch without learning, of documents that fill a sequence each."""
    trial = Trial(tmp_path)
    text = (ROOT / "app/planner/plan.py").read_bytes().decode("ascii", errors="ignore")
    documents = [text[n * 31 : (n + 1) * 31] for n in range(24)]
    for name, part in {"all": documents, "a": documents[:12], "b": documents[12:18]}.items():
        write_lines(tmp_path / f"{name}.jsonl", part)
    write_lines(tmp_path / "c.jsonl", documents[18:])
    more = ("train.steps=6", "checkpoint.interval=0", "optim.lr=1e-30", "optim.min_lr=0")
    more = (*more, "data.document_mask=true", "data.packing=best_fit")
    more = (*more, f"data.validation={tmp_path}/docs.jsonl")
    trial.go(more=(*more, "data=jsonl", f"data.path={tmp_path}/all.jsonl", "run_dir=whole"))
    sources = trial.source("a", weight=2.0), trial.source("b"), trial.source("c")
    trial.go(*sources, more=(*more, "run_dir=split"))
    whole, split = (
        [row for row in untimed(tmp_path / name) if "loss" in row] for name in ("whole", "split")
    )
    mean = sum(row["loss"] for row in whole) / 6
    assert sum(row["loss"] for row in split) / 6 == pytest.approx(mean, rel=1e-6)
    assert whole[0]["loss"] != split[0]["loss"]
    assert [split[-1][f"epochs/{label}"] for label in "abc"] == [1.0, 1.0, 1.0]
    shares = {"a": 0.5, "b": 0.25, "c": 0.25}
    for row in split:
        parts = sum(share * row[f"loss/{label}"] for label, share in shares.items())
        assert row["loss"] == pytest.approx(parts, rel=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("alone", [pytest.param(True, marks=pytest.mark.full), False])
def test_streams_resume_in_other_layouts(alone: bool, tmp_path: Path):
    trial = Trial(tmp_path)
    (tmp_path / "folder").mkdir()
    for name in ("plans", "docs"):
        (tmp_path / f"{name}.jsonl").rename(tmp_path / f"folder/train-{name}.jsonl")
    stream = {"name": f"{tmp_path}/folder", "streaming": "true"}
    sources = () if alone else ({**stream, "weight": 2.0}, trial.source("rules"))
    keys = [f"data.{key}={value}" for key, value in {"source": "hub", **stream}.items()]
    more = (*(keys if alone else ()), "data.validation_documents=2", "train.steps=4")

    def losses(name: str, ranks: int, *resumed: str) -> dict[int, float]:
        layout = (f"parallel.dp={ranks}", "train.micro_batch=1", f"run_dir={name}")
        told = trial.go(*sources, more=(*more, *layout, *resumed), ranks=ranks)
        rows = untimed(tmp_path / name) if (tmp_path / name).is_dir() else []
        assert rows, told
        return {row["step"]: row["loss"] for row in rows if "loss" in row}

    whole = losses("whole", 2)
    for ranks in (1, 4):
        again = losses(f"by{ranks}", ranks, "resume=whole/checkpoints/step-00000002")
        assert again == {step: pytest.approx(whole[step], rel=1e-5) for step in (3, 4)}
