"""Output between the last step of a run and its end, and the time limit of the sample."""

from __future__ import annotations

import io
import math
import os
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest

from app import telling
from app.config import ParallelConfig
from app.engine.checkpoint import save as checkpoint_save
from app.engine.checkpoint.tensor_file import Writable
from app.engine.decoding.generate import sample_tokens
from app.errors import CLEAR
from tests.distributed import run_distributed
from tests.runs import TINY, engine_of, make_run
from tests.training import composed, corpus_in, train_rank, wait_for


def test_fast_work_prints_nothing(capfd: pytest.CaptureFixture[str]):
    with telling.telling("saving"):
        pass
    assert capfd.readouterr().out == ""


def test_slow_work_prints_progress(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(telling, "FIRST_S", 0.02)
    monkeypatch.setattr(telling, "EVERY_S", 0.02)
    # a stream of its own: what captures stdout must not be read while a thread writes to it
    done, said = 0, io.StringIO()

    def told() -> bool:
        return f"counting: {done} of 3" in said.getvalue()

    with telling.telling("counting", lambda: f"{done} of 3", stream=said):
        for done in range(4):  # noqa: B007
            wait_for(told)
    with telling.telling("other", aloud=False, stream=said):
        time.sleep(0.05)
    lines = said.getvalue().splitlines()
    assert all(re.fullmatch(r"counting: \d of 3, \d s so far", line) for line in lines[:-1])
    assert re.fullmatch(r"counting: 3 of 3, done in \d s", lines[-1])


def test_a_terminal_gets_one_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(telling, "FIRST_S", 0.01)
    monkeypatch.setattr(telling, "REDRAWN_S", 0.01)
    ours, theirs = os.openpty()
    asked, shown = [], ""

    def progress() -> str:
        asked.append(len(asked))
        return f"{asked[-1]}"

    with open(theirs, "w") as terminal:
        with telling.telling("counting", progress, stream=terminal):
            wait_for(lambda: len(asked) > 4)
        while "\n" not in shown:  # a terminal hands on what is written a little later
            shown += os.read(ours, 2**16).decode()
    os.close(ours)
    assert shown.count("\n") == 1 and shown.count(CLEAR) > 3
    assert re.search(r"counting: \d+, 0 s so far", shown) and shown.rstrip().endswith("done in 0 s")


def test_error_is_not_reported_as_done(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(telling, "FIRST_S", 0.0)
    with pytest.raises(OSError), telling.telling("saving"):
        time.sleep(0.05)
        raise OSError
    assert "done" not in capfd.readouterr().out


def slow_save(rank: int, beside: bool, run: object) -> None:
    """A run whose last checkpoint takes a while."""
    telling.FIRST_S = telling.EVERY_S = 0.02
    write = checkpoint_save.write_tensors

    def slowly(file: Writable, *arguments: object) -> None:
        write(file, *arguments)
        file.file.flush()
        time.sleep(0.2)

    checkpoint_save.write_tensors = slowly
    train_rank(rank, run, {})


@pytest.mark.every(2)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_last_save_prints_progress(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], asynchronous: bool
):
    settings = (
        "train.steps=2",
        "checkpoint.interval=1",
        "log.console=true",
        f"run_dir={tmp_path}/run",
        f"checkpoint.asynchronous={str(asynchronous).lower()}",
    )
    run = composed((*corpus_in(tmp_path / "corpus"), *settings), 1)
    run_distributed(slow_save, 1, asynchronous, run)
    said = capfd.readouterr().out
    assert re.search(
        r"^saving step-00000002: 100% of the [\d.]+ .?B of rank 0, \d s so far$", said, re.MULTILINE
    )
    assert re.search(r"^saving step-00000002: done in \d s$", said, re.MULTILINE)
    assert "saving step-00000001" not in said, "training continues and prints steps"


def sampled_in_time(rank: int, seconds: tuple[float, ...]) -> list[int]:
    run = make_run(replace(TINY, num_layers=4), parallel=ParallelConfig(pp=2))
    facts = dict(window=16, vocab=run.model.vocab_size, seed=5, seconds=seconds[rank])
    return list(sample_tokens(engine_of(run, rank), [1, 2, 3], 4, **facts))


def test_rank_0_decides_when_a_sample_is_over():
    assert run_distributed(sampled_in_time, 2, (0.0, math.inf)) == [[], []]
    one, other = run_distributed(sampled_in_time, 2, (math.inf, 0.0))
    assert one == other and len(one) == 4
