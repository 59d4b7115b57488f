"""Shared by test_generate.py and other tests."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from app.config import ParallelConfig, TrainConfig
from app.engine.checkpoint.load import Progress
from tests.checkpoints import save_checkpoint
from tests.programs import run_forked
from tests.runs import TINY, engine_of, make_run

MODEL = dataclasses.replace(TINY, num_layers=2, vocab_size=264, init_std=0.3)


def saved(rank: int, folder: Path) -> None:
    train = TrainConfig(steps=20, seq_len=32, micro_batch=1, global_batch=4)
    run = make_run(MODEL, parallel=ParallelConfig(tp=2), train=train)
    save_checkpoint(folder, engine_of(run, rank), run, Progress(3), cursor={"sequences": 0})


def generated(folder: Path, *words: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    line = [sys.executable, "-m", "app.cli.generate", str(folder), *words]
    done = run_forked(folder.parent, line)
    return done.returncode, done.stdout, done.stderr
