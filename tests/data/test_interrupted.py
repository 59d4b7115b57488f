"""Preparing a corpus that is killed anywhere continues, with the bytes of one that was not."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import FrameType

import pytest

from app.choices import BadFile, Source
from app.config import DataConfig
from app.data import corpus, prepared
from app.data.load import prepare
from app.data.prepared import left_out
from app.data.sources import find_sources
from app.data.tokenizer import load_tokenizer
from app.errors import ConfigError

TOKENIZER = load_tokenizer("bytes")
TEXTS = [f"{n:03d}:" + chr(97 + n % 26) * (3000 + 100 * (n % 7)) for n in range(40)]
BAD = '{"text": 5}'
# where kills are counted: every line of these
FUNCTIONS = ("prepare_tokens", "_alone", "_write", "write")


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(corpus, "BATCH_BYTES", 15_000)
    monkeypatch.setattr(corpus, "KEPT", 2)


def written(folder: Path, kind: str = "jsonl") -> Callable[..., DataConfig]:
    """Two files, with a bad line in each; the configuration that prepares them into a cache."""
    (folder / "data").mkdir()
    bad = [] if kind == "hub" else [BAD]
    for number, texts in enumerate((TEXTS[:25], TEXTS[25:])):
        lines = [json.dumps({"text": text}) for text in texts]
        text = "\n".join([*lines[:9], *bad, *lines[9:]])
        (folder / f"data/train{number}.jsonl").write_text(text)
    place = {"name": str(folder / "data")} if kind == "hub" else {"path": (f"{folder}/data/*",)}
    rows = BadFile.stop if kind == "hub" else BadFile.skip_rows

    def config(cache: str, num_proc: int = 1) -> DataConfig:
        place_of = f"{folder}/{cache}"
        kinds = {"source": Source(kind), "on_bad_file": rows, "num_proc": num_proc}
        return DataConfig(cache_dir=place_of, **kinds, **place)

    return config


def killed_at(line: int, config: DataConfig) -> bool:
    """Prepare in a process that is killed before it runs this line of FUNCTIONS, counted as they
    are run; whether it came so far.
    """
    child = os.fork()
    if child:
        return os.WIFSIGNALED(os.waitpid(child, 0)[1])
    lines = count()

    def trace(frame: FrameType, event: str, _argument: object) -> Callable | None:
        code = frame.f_code
        if code.co_name not in FUNCTIONS or "/app/data/" not in code.co_filename:
            return None
        if event == "line" and next(lines) == line:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)
    prepare(config, TOKENIZER, say=lambda line: None)
    os._exit(0)


def contents(folder: Path) -> dict[str, str]:
    """Sums of a folder's files: pytest takes minutes to tell long bytes apart."""
    files = sorted(folder.iterdir())
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def batches_made(config: DataConfig, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, int]:
    """Prepare; the folder, and how many batches were tokenized."""
    made = count()
    encode = corpus._Encoder.__call__

    def counted(self: corpus._Encoder, batch: list[bytes]) -> object:
        next(made)
        return encode(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(corpus._Encoder, "__call__", counted)
        folder = prepare(config, TOKENIZER)
    assert folder
    return folder, next(made)


@pytest.mark.parametrize("stride", [29, pytest.param(1, marks=pytest.mark.full)])
def test_killed_at_any_line_continues(stride: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = written(tmp_path)
    folder, total = batches_made(config("whole"), monkeypatch)
    whole = contents(folder)
    assert total == 8 and len(whole) == 2
    used = set()
    for line in count(0, stride):
        if not killed_at(line, config("cut")):
            break
        (state,) = [*(tmp_path / "cut").rglob(corpus.STATE)] or [None]
        kept = json.loads(state.read_text()) if state else {"documents": 0}
        complete = [*(tmp_path / "cut").rglob(prepared.CONTENTS)]
        again, made = batches_made(config("cut"), monkeypatch)
        assert contents(again) == whole, line
        assert [each.name for each in again.parent.iterdir() if each.is_dir()] == [again.name]
        # batches of five documents; what was kept is not tokenized again
        assert made == 0 if complete else made == total - kept["documents"] // 5, line
        used.add(made)
        shutil.rmtree(tmp_path / "cut")
    assert line > 100 and len(used) > 2


def test_kills_one_after_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = written(tmp_path)
    whole = contents(prepare(config("whole"), TOKENIZER))
    # with other processes too, which end with their parent
    for processes in (1, 2, 1):
        assert killed_at(60, config("cut", processes))
    folder, made = batches_made(config("cut"), monkeypatch)
    assert contents(folder) == whole and made == 2
    line = left_out(folder, find_sources(config("cut")))
    assert line == (
        f"data.on_bad_file=skip_rows: 2 rows of 2 files left out: {tmp_path}/data/train0.jsonl: "
        "line 10 holds a number in text, not text"
    )


def test_a_lost_process_loses_no_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = written(tmp_path)
    whole = contents(prepare(config("whole"), TOKENIZER))
    encode = corpus._Encoder.__call__

    def dying(self: corpus._Encoder, batch: list[bytes]) -> object:
        return os._exit(1) if batch[0].startswith(b"030") else encode(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(corpus._Encoder, "__call__", dying)
        with pytest.raises(ConfigError, match=r"data\.num_proc=2: one of these processes has died"):
            prepare(config("cut", 2), TOKENIZER)
    folder, made = batches_made(config("cut"), monkeypatch)
    assert contents(folder) == whole and made == 2


def test_a_folder_of_the_library_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = written(tmp_path, "hub")
    whole = contents(prepare(config("whole"), TOKENIZER))
    assert killed_at(60, config("cut"))
    folder, made = batches_made(config("cut"), monkeypatch)
    assert contents(folder) == whole and made < 8


def test_two_at_once_tokenize_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = written(tmp_path)("cache")
    made = tmp_path / "made"
    encode = corpus._Encoder.__call__

    def noted(self: corpus._Encoder, batch: list[bytes]) -> object:
        with made.open("a") as file:
            file.write(f"{os.getpid()}\n")
        return encode(self, batch)

    monkeypatch.setattr(corpus._Encoder, "__call__", noted)
    monkeypatch.setattr(prepared, "QUIET_S", 0.0)
    children = []
    for _ in range(3):
        if not (child := os.fork()):
            prepare(config, TOKENIZER, say=lambda line: None)
            os._exit(0)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
    assert len(made.read_text().splitlines()) == 8


def test_a_long_wait_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The holder of the lock dies with the word that it is waited for."""
    config = written(tmp_path)("cache")
    monkeypatch.setattr(prepared, "QUIET_S", 0.0)
    reading, writing = os.pipe()
    if not (child := os.fork()):
        monkeypatch.setattr(
            prepared, "_write", lambda *a, **k: (os.write(writing, b"."), signal.pause())
        )
        prepare(config, TOKENIZER)
    os.read(reading, 1)
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        os.kill(child, signal.SIGKILL)

    folder = prepare(config, TOKENIZER, say=say)
    os.waitpid(child, 0)
    assert said == [f"waits for another process that prepares {folder}"]
