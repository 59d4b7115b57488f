"""Files that a run reads are data: what is crafted is refused or replaced, and never run."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
import yaml

from app.data.sources import file_sum
from app.engine.checkpoint.synced import write_synced
from app.engine.files.checkpoints import CHECKPOINTS, MANIFEST, manifest_digest
from app.engine.report.trackers import recorded_id
from tests.cases import chosen
from tests.programs import run_forked
from tests.training import ROOT, corpus_in

STEP = f"{CHECKPOINTS}/step-00000004"
RANK = "rank-00000.safetensors"
REFUSED, GOES_ON = 2, 0
# What a run reads, as a glob of the folder where it starts; its exit code where that is crafted.
READ = {
    f"runs/a/{STEP}/{MANIFEST}": REFUSED,
    f"runs/a/{STEP}/{RANK}": REFUSED,
    f"runs/a/{CHECKPOINTS}/latest": GOES_ON,
    "runs/a/config.yaml": GOES_ON,
    "runs/a/plan.json": GOES_ON,
    "runs/a/metrics.jsonl": GOES_ON,
    "cache/graphfold/*/tokens.arrow": GOES_ON,
    "cache/graphfold/*/contents.json": GOES_ON,
}


class Crafted:
    """Makes a folder when it is unpickled."""

    def __init__(self, made: str) -> None:
        self.made = made

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (self.made,)


def pickled(made: str) -> bytes:
    return pickle.dumps(Crafted(made))


def torch_saved(made: str) -> bytes:
    file = io.BytesIO()
    torch.save(Crafted(made), file)
    return file.getvalue()


def tagged(made: str) -> bytes:
    return f"train: !!python/object/apply:os.mkdir ['{made}']\n".encode()


def targeted(made: str) -> bytes:
    """Return YAML of an object that Hydra would instantiate."""
    return f"train:\n  _target_: os.mkdir\n  _args_: ['{made}']\n".encode()


def in_json(made: str) -> bytes:
    return json.dumps({"py/reduce": [{"py/function": "os.mkdir"}, [made]], "step": 4}).encode()


PAYLOADS = {each.__name__: each for each in (pickled, torch_saved, tagged, targeted, in_json)}


@pytest.mark.parametrize(
    ("payload", "load"),
    [
        (pickled, pickle.loads),
        (torch_saved, lambda data: torch.load(io.BytesIO(data), weights_only=False)),
        (tagged, yaml.unsafe_load),
    ],
)
def test_what_is_crafted_would_work(
    payload: Callable[[str], bytes], load: Callable[[bytes], object], tmp_path: Path
):
    load(payload(f"{tmp_path}/made"))
    assert (tmp_path / "made").is_dir()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    *settings, _ = corpus_in(tmp_path_factory.mktemp("corpus"))
    return (*settings, "data.cache_dir=cache", "checkpoint.interval=2")


def trained(folder: Path, corpus: tuple[str, ...], *overrides: str) -> tuple[int, str]:
    """Exit code and what was said of a run that starts in a folder."""
    line = [sys.executable, str(ROOT / "train.py"), *corpus, *overrides]
    done = run_forked(folder, line)
    return done.returncode, done.stderr


@pytest.fixture(scope="module")
def four_steps(corpus: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder in which a run of four steps was started."""
    folder = tmp_path_factory.mktemp("four")
    assert trained(folder, corpus, "train.steps=4", "run_dir=runs/a") == (0, "")
    return folder


def resumes(folder: Path, corpus: tuple[str, ...], code: int) -> str:
    """Return what a run that resumes there prints; it must end without a traceback."""
    found, said = trained(folder, corpus, "train.steps=6", "resume=auto", "run_dir=runs/a")
    assert (found, "Traceback" in said) == (code, False), said
    assert found != REFUSED or said.count("\n") == 1
    return said


CASES = [(name, payload) for name in READ for payload in ("pickled", "torch_saved")] + [
    ("runs/a/config.yaml", "tagged"),
    ("runs/a/config.yaml", "targeted"),
    (f"runs/a/{STEP}/{MANIFEST}", "in_json"),
    ("runs/a/metrics.jsonl", "in_json"),
    ("cache/graphfold/*/contents.json", "in_json"),
]
QUICK = [(f"runs/a/{STEP}/{RANK}", "torch_saved")]


@pytest.mark.parametrize(("name", "payload"), chosen(CASES, QUICK))
def test_nothing_that_is_read_is_run(
    name: str, payload: str, corpus: tuple[str, ...], four_steps: Path, tmp_path: Path
):
    folder, made = shutil.copytree(four_steps, tmp_path / "there"), tmp_path / "made"
    (file,) = folder.glob(name)
    file.write_bytes(PAYLOADS[payload](str(made)))
    said = resumes(folder, corpus, READ[name])
    assert not made.exists()
    assert READ[name] == GOES_ON or file.name in said


@pytest.mark.full
@pytest.mark.parametrize("payload", PAYLOADS)
def test_a_configuration_that_is_read_to_choose_a_run_is_not_run(
    payload: str, corpus: tuple[str, ...], four_steps: Path, tmp_path: Path
):
    """It is where no folder is named and the manifest cannot be read."""
    folder, made = shutil.copytree(four_steps, tmp_path / "there"), tmp_path / "made"
    (folder / "runs/a/config.yaml").write_bytes(PAYLOADS[payload](str(made)))
    (folder / "runs/a" / STEP / MANIFEST).unlink()
    code, said = trained(folder, corpus, "train.steps=6", "resume=auto")
    assert (code, said.count("\n")) == (REFUSED, 1) and MANIFEST in said
    assert not made.exists()


@pytest.mark.parametrize("content", [b"", b"\x80\x04", b"../../x y", b"a/b", b"x" * 1000])
def test_invalid_wandb_id_starts_new_run(
    content: bytes, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    file = tmp_path / "wandb_id"
    assert recorded_id(file) is None and capfd.readouterr().err == ""
    file.write_text("j7sw8pey")
    assert recorded_id(file) == "j7sw8pey" and capfd.readouterr().err == ""
    file.write_bytes(content)
    assert recorded_id(file) is None
    assert capfd.readouterr().err == (
        f"train.py: {file} holds no id of a Weights & Biases run, so a new one begins\n"
    )


# Forgeries, with sums that fit.


def forge_rank_file(folder: Path, content: bytes) -> None:
    step = folder / "runs/a" / STEP
    manifest = json.loads((step / MANIFEST).read_text())
    manifest["files"][RANK] |= write_synced(step / RANK, lambda file: file.write(content))
    manifest["sha256"] = manifest_digest(manifest)
    (step / MANIFEST).write_text(json.dumps(manifest))


def forge_tokens(folder: Path, content: bytes) -> None:
    (file,) = folder.glob("cache/graphfold/*/tokens.arrow")
    file.write_bytes(content)
    sums = {"tokens.arrow": (len(content), file_sum(file))}
    (file.parent / "contents.json").write_text(json.dumps({"files": sums}))


def with_extension(made: str, folder: Path) -> bytes:
    """The tokens in a column of the type that old pyarrow made by unpickling (CVE-2023-47248)."""
    (file,) = folder.glob("cache/graphfold/*/tokens.arrow")
    with pa.ipc.open_stream(file.read_bytes()) as stream:
        table = stream.read_all()
    names: Mapping[str, Any] = {
        "ARROW:extension:name": "arrow.py_extension_type",
        "ARROW:extension:metadata": pickled(made),
    }
    schema = pa.schema([table.schema.field("ids").with_metadata(names)])
    out = io.BytesIO()
    with pa.ipc.new_stream(out, schema) as writer:
        writer.write_table(pa.table([table["ids"]], schema=schema))
    return out.getvalue()


@pytest.mark.full
@pytest.mark.parametrize("payload", ["pickled", "torch_saved"])
def test_a_forged_checkpoint_is_not_run(
    payload: str, corpus: tuple[str, ...], four_steps: Path, tmp_path: Path
):
    folder, made = shutil.copytree(four_steps, tmp_path / "there"), tmp_path / "made"
    forge_rank_file(folder, PAYLOADS[payload](str(made)))
    code, _ = trained(folder, corpus, "train.steps=6", "resume=auto", "run_dir=runs/a")
    assert code and not made.exists()


@pytest.mark.full
def test_forged_tokens_are_not_run(corpus: tuple[str, ...], four_steps: Path, tmp_path: Path):
    folder, made = shutil.copytree(four_steps, tmp_path / "there"), tmp_path / "made"
    forge_tokens(folder, with_extension(str(made), folder))
    resumes(folder, corpus, GOES_ON)
    assert not made.exists()
