"""Exports that cannot be: a line that says why, and no folder that looks like one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from app.cli import convert
from app.config import Run
from app.engine.export.texts import keep_texts
from app.errors import ConfigError
from app.hf import write
from app.hf.families import family_of
from app.hf.write import Export
from tests.distributed import run_distributed
from tests.hf_folders import edit_config, save_random
from tests.processes.hf_export import DENSE, a_checkpoint, exported_together
from tests.processes.init_from import run_from

MISTAKES: dict[str, tuple[list[str], str]] = {
    "unknown command": (
        ["to_hf", "a", "b"],
        "command=to_hf: must be from-hf, to-hf or to-peft; did you mean to-hf?",
    ),
    "one folder": (["to-hf", "a"], "arguments=to-hf a: to-hf takes two folders, from and to; 1 "),
    "no run": (["to-hf", "{}/none", "{}/out"], "to-hf={}/none: does not exist"),
    "no checkpoint": (["to-hf", "{}", "{}/out"], "to-hf={}: holds no complete checkpoint"),
    "below a file": (
        ["to-hf", "{}/run", "{}/run/checkpoints/latest/out"],
        "folder={}/run/checkpoints/latest/out: cannot be written: Not a directory",
    ),
    "a slip": (["to-hf", "{}/rum", "{}/out"], "to-hf={}/rum: does not exist; did you mean {}/run?"),
    "another step": (
        ["to-hf", "{}/run/checkpoints/step-0000001", "{}/out"],
        "to-hf={}/run/checkpoints/step-0000001: does not exist; did you mean "
        "{}/run/checkpoints/step-00000001?",
    ),
    "what it has written": (
        ["to-hf", "{}/theirs", "{}/out"],
        "to-hf={}/theirs: is the folder of a Hugging Face model, not a run or checkpoint",
    ),
    "a file": (
        ["from-hf", "{}/theirs/config.json", "{}/out"],
        "from-hf={}/theirs/config.json: is a file, and a model is a folder; did you mean "
        "{}/theirs?",
    ),
    "a run": (
        ["from-hf", "{}/begun", "{}/out"],
        "from-hf={}/begun: is a run, which does not keep the weights that it "
        "started from; resume={}/begun continues from its own weights, and to-hf exports them",
    ),
    "a long name": (
        ["from-hf", "x" * 5000, "{}/out"],
        f"from-hf={'x' * 5000}: cannot be read: File name too long",
    ),
    "there already": (["to-hf", "{}/run", "{}/run"], "folder={}/run: already exists; name a new"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_costs_one_line(mistake: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words, expected = MISTAKES[mistake]
    if mistake in ("below a file", "there already", "a slip", "another step"):
        a_checkpoint(tmp_path / "run", DENSE)
    for folder in ("theirs", "begun/pretrained"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "config.json").write_text("{}")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(SystemExit) as ended:
        convert.main([word.replace("{}", str(tmp_path)) for word in words])
    said = capsys.readouterr()
    assert ended.value.code == 2 and said.out == "" and sorted(tmp_path.iterdir()) == before
    assert said.err.startswith(f"convert: {expected.replace('{}', str(tmp_path))}")
    assert said.err.count("\n") == 1


RANK_FILE = "rank-00000.safetensors"


def cut_file(path: Path) -> None:
    (path / RANK_FILE).write_bytes(b"short")


def flip_bit(path: Path) -> None:
    """The last one of the file, in a moment: nothing that is exported."""
    data = bytearray((path / RANK_FILE).read_bytes())
    data[-1] ^= 1
    (path / RANK_FILE).write_bytes(data)


def edit_manifest(path: Path) -> None:
    found = path / "manifest.json"
    found.write_text(found.read_text().replace('"step": 1', '"step": 2'))


def raise_full(*_: object) -> NoReturn:
    raise OSError(28, "No space left on device")


CHANGED = "was changed after it was saved (sha256 differs)"
BREAKS: dict[str, tuple[Callable[[Path, pytest.MonkeyPatch], object], str]] = {
    "a short file": (
        lambda path, _: cut_file(path),
        f"to-hf={{}}: {RANK_FILE} has 5 bytes instead",
    ),
    "a flipped bit": (lambda path, _: flip_bit(path), f"to-hf={{}}: {RANK_FILE} {CHANGED}"),
    "a manifest": (lambda path, _: edit_manifest(path), f"to-hf={{}}: manifest.json {CHANGED}"),
    "a full disk": (
        lambda _, patch: patch.setattr(write, "file_header", raise_full),
        "folder={.parent.parent.parent}/",
    ),
}


@pytest.mark.parametrize("what", BREAKS)
def test_a_folder_is_whole_or_not_there(
    what: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    path = a_checkpoint(tmp_path / "run", DENSE)
    break_it, expected = BREAKS[what]
    break_it(path, monkeypatch)
    for out in ("out", "new/er/out"):
        with pytest.raises(SystemExit):
            convert.main(["to-hf", str(path), str(tmp_path / out)])
        said = capsys.readouterr().err
        assert said.startswith(f"convert: {expected.format(path)}") and said.count("\n") == 1
        assert what != "a full disk" or "/.out.tmp/model.safetensors: cannot be written" in said
        assert sorted(each.name for each in tmp_path.iterdir()) == ["run"]


def dangle(folder: Path) -> None:
    (folder / "merges.txt").symlink_to("nowhere")


LOST: dict[str, tuple[Callable[[Path], object], str]] = {
    "a link to nothing": (dangle, "merges.txt cannot be read: No such file or directory"),
    "no JSON": (
        lambda folder: (folder / "config.json").write_text("{"),
        "config.json cannot be read: Expecting property name enclosed in double quotes: "
        "line 1 column 2 (char 1)",
    ),
    "another model": (
        lambda folder: edit_config(folder, rms_norm_eps=0.5),
        "config.json has model.norm_eps=0.5, and the checkpoint 1e-05",
    ),
}


@pytest.mark.parametrize("lost", LOST)
def test_unreadable_texts_stop_export_before_weights(
    lost: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    save_random("llama", tmp_path / "theirs")
    run = run_from(tmp_path / "theirs", {})
    path = a_checkpoint(tmp_path / "run", run)
    keep_texts(run, tmp_path / "run")
    break_it, rule = LOST[lost]
    break_it(tmp_path / "run/pretrained")
    monkeypatch.setattr(write.Export, "write", None)
    with pytest.raises(SystemExit):
        convert.main(["to-hf", str(path), str(tmp_path / "out")])
    expected = f"convert: to-hf={tmp_path}/run/pretrained: {rule}\n"
    assert capsys.readouterr().err == expected
    assert sorted(each.name for each in tmp_path.iterdir()) == ["run", "theirs"]


def test_an_earlier_export_stays_until_the_next_one_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/config.json").write_text("earlier")
    export = Export(DENSE.model, family_of(DENSE.model, "", ""), tmp_path / "out", torch.float32)
    export = dataclasses.replace(export, replaces=True)
    rename = Path.rename

    def refused(path: Path, target: Path) -> Path:
        return raise_full() if path == export.temporary else rename(path, target)

    for broken in (True, False):
        export.begin()
        with monkeypatch.context() as patch, nullcontext() if not broken else raises_full():
            if broken:
                patch.setattr(Path, "rename", refused)
            export.finish({"config.json": b"later"})
        export.give_up()
        assert [path.name for path in tmp_path.iterdir()] == ["out"]
        expected = "earlier" if broken else "later"
        assert (tmp_path / "out/config.json").read_text() == expected


def raises_full() -> Any:
    return pytest.raises(ConfigError, match="out: cannot be written: No space left on device")


def refused_together(rank: int, run: Run, folder: Path) -> str:
    try:
        return exported_together(rank, run, folder)
    except ConfigError as error:
        return str(error)


Fault = Callable[[Path, pytest.MonkeyPatch], object]
FAULTS: dict[str, tuple[Fault, str]] = {
    "begin": (
        lambda folder, _: (folder / ".out.tmp").write_text("in the way"),
        "out: cannot be written: File exists",
    ),
    "write": (
        lambda _, patch: patch.setattr(write, "file_header", raise_full),
        ".out.tmp/model.safetensors: cannot be written: No space left on device",
    ),
    "finish": (
        lambda _, patch: patch.setattr(write.Export, "_take_place", raise_full),
        "out: cannot be written: No space left on device",
    ),
}


@pytest.mark.every(3)
@pytest.mark.parametrize("fault", FAULTS)
def test_what_the_system_refuses_one_rank_ends_all(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    break_it, expected = FAULTS[fault]
    break_it(tmp_path, monkeypatch)
    run = dataclasses.replace(DENSE, parallel=dataclasses.replace(DENSE.parallel, dp=2))
    found = run_distributed(refused_together, 2, run, tmp_path)
    assert found == [f"folder={tmp_path}/{expected}"] * 2
    assert not (tmp_path / ".out.tmp").is_dir() and not (tmp_path / "out").exists()
