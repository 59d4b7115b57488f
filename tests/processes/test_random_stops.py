"""Programs told to stop at a drawn moment go on: their records are those of a run left alone.

A case that fails prints its command line and the moment.
"""

from __future__ import annotations

import random
import shlex
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from app.engine.checkpoint_folder import read_manifest
from app.engine.run_folder import newest_checkpoint
from tests.distributed import run_distributed
from tests.processes.test_stop import started, untimed
from tests.training import ROOT, composed, corpus_in, train_rank

pytestmark = pytest.mark.full
STEPS = 24
SETTINGS = (
    f"train.steps={STEPS}",
    "checkpoint.interval=6",
    "train.eval_interval=4",
    "train.sample_tokens=8",
)
LAYOUTS = (("single", 1), ("dp2", 2), ("ep2", 2), ("tp2", 2), ("cp2", 2), ("pp2", 2))
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Moment:
    """When a program is told to stop: some seconds after something has been seen in its folder."""

    name: str
    seen: Callable[[Path], object]
    seconds: float


def step_is_told(step: int) -> Callable[[Path], object]:
    return lambda folder: any(row["step"] >= step for row in recorded(folder))


def recorded(folder: Path) -> Rows:
    return untimed(folder) if (folder / "metrics.jsonl").is_file() else []


def draw_moment(draw: random.Random) -> Moment:
    """Before anything is there, in a step, validation or save, or when all steps are done."""
    step, later = draw.randint(1, STEPS - 1), draw.uniform(0, 0.05)
    return draw.choice((
        Moment("start-up", lambda folder: True, draw.uniform(0, 6)),
        Moment("folder", lambda folder: (folder / "config.yaml").exists(), draw.uniform(0, 0.5)),
        Moment(f"step {step}", step_is_told(step), later),
        Moment(f"validation at {step - step % 4}", step_is_told(step - step % 4), later / 5),
        Moment("save", lambda folder: any(folder.glob("checkpoints/.*.tmp")), later / 5),
        Moment("end", step_is_told(STEPS), later),
    ))  # fmt: skip


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    return (*corpus_in(tmp_path_factory.mktemp("corpus")), *SETTINGS)


@pytest.fixture(scope="module")
def undisturbed(
    corpus: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, int], Rows]:
    """What a layout records when nobody stops it."""
    folder, found = tmp_path_factory.mktemp("undisturbed"), {}

    def rows(layout: str, ranks: int) -> Rows:
        if layout not in found:
            train(corpus, layout, ranks, folder / layout)
            found[layout] = in_order(folder / layout)
        return found[layout]

    return rows


def train(corpus: tuple[str, ...], layout: str, ranks: int, folder: Path) -> None:
    """Train to the end, from where a run in that folder has got to.

    One that was stopped after its last step goes on as an attempt does: typed, it is refused, as it
    has taken all its steps.
    """
    line = (*corpus, f"parallel={layout}", f"run_dir={folder}", "resume=auto")
    newest = newest_checkpoint(folder)
    ended = newest is not None and read_manifest(newest)["step"] == STEPS
    earlier = folder if ended else None
    seen = run_distributed(train_rank, ranks, composed(line, ranks), {}, earlier)
    assert all(finished for finished, _ in seen)


def in_order(folder: Path) -> Rows:
    return sorted(untimed(folder), key=lambda row: (row["step"], "val_loss" in row))


@pytest.mark.parametrize("seed", range(10))
def test_told_at_any_moment(
    seed: int, corpus: tuple[str, ...], tmp_path: Path, undisturbed: Callable[[str, int], Rows]
):
    draw = random.Random(seed)
    layout, ranks = draw.choice(LAYOUTS)
    moment = draw_moment(draw)
    line = (str(ROOT / "train.py"), *corpus, f"parallel={layout}", "run_dir=run", "resume=auto")
    print(f"SIGTERM {moment.seconds:.3f} s after {moment.name}: python {shlex.join(line)}")
    process = started(tmp_path, *line)
    while process.poll() is None and not moment.seen(tmp_path / "run"):
        time.sleep(0.002)
    time.sleep(moment.seconds)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=120)
    print(f"exit code {process.returncode}: {said}")
    ends = 0, 75, -signal.SIGTERM, 128 + signal.SIGTERM  # the last two: before it listens
    assert process.returncode in ends and "Traceback" not in said
    expected = undisturbed(layout, ranks)
    if process.returncode:
        train(corpus, layout, ranks, tmp_path / "run")
    assert in_order(tmp_path / "run") == expected
