"""Short trainings for tests of stopping and going on: in forked ranks, or as programs with the
same settings.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

import app.data.hub  # noqa: F401 - what every forked rank would load anew
from app.cli.options.compose import load_run, register_schema
from app.config import Run
from app.data.feed import Batch
from app.engine.build import build_engine
from app.engine.files.attempt import Attempt
from app.engine.files.run_folder import FolderLock, read_metrics
from app.engine.ranks.agreement import rank_zero_says
from app.engine.ranks.groups import create_groups
from app.engine.run import trainer
from app.engine.start.start import find_start, load_all_data
from app.planner.plan import Plan

ROOT = Path(__file__).parent.parent
TINY = (
    "model.num_layers=1",
    "model.hidden_size=32",
    "model.moe.ffn_hidden_size=32",
    "train.seq_len=32",
    "train.micro_batch=2",
    "train.global_batch=4",
    "train.eval_interval=5",
    "train.eval_sequences=4",
    "train.sample_tokens=0",
    "train.device=cpu",
    "optim.warmup_steps=2",
    "optim.decay_steps=100",
    "log=none",
    "log.interval=1",
    "checkpoint.interval=100",
)
TOKENS_PER_STEP = 4 * 32
# Two ranks that share the experts, for long enough to be interrupted.
LONG = ("parallel.ep=2", "train.steps=150", "checkpoint.interval=10", "train.eval_interval=0")
TIMED = {
    "time",
    "data_wait_ms",
    "data_wait_max_ms",
    "host_delay_ms",
    "host_cores",
    "host_others",
    "step_ms",
    "tokens_per_s",
    "tokens_per_s_per_gpu",
    "tflops_per_gpu",
    "memory_allocated_gib",
    "memory_peak_gib",
    "checkpoint_blocked_ms",
}
Seen = list[list[list[int]]]  # per step, per microbatch: tokens


def corpus_in(folder: Path) -> tuple[str, ...]:
    """Write a small corpus; returns the overrides of a short training on it."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, file in enumerate(sorted((ROOT / "app/plan").glob("*.py"))[:6]):
        (folder / f"{number}.txt").write_text(file.read_text())
    return (*TINY, "data=text", f"data.path=[{folder}/*.txt]", f"data.cache_dir={folder}/cache")


def composed(overrides: Sequence[str], world_size: int) -> Run:
    """The run that train.py would make of these overrides."""
    register_schema()
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return load_run(compose("train", list(overrides)), world_size)


def train_rank(
    rank: int, run: Run, told_at: dict[int, int], earlier: Path | None = None
) -> tuple[bool, Seen]:
    """Train as one rank: whether the run came to its end, and its tokens.

    Ranks in `told_at` get SIGTERM during that step. `earlier` is the folder of an attempt
    before this one, as a launcher that starts it again knows.
    """
    plan = Plan(run)
    groups = create_groups(plan.layout, rank)
    start = rank_zero_says(groups, lambda: find_start(run, earlier))
    data = load_all_data(run, groups, rank)
    training = trainer.Trainer(build_engine(plan, groups, torch.device("cpu")), data, start)
    seen, give = [], training.feed.next_step
    trainer.sum_up = lambda *facts, **named: None  # this process is about to end

    def next_step() -> list[Batch]:
        batches = give()
        seen.append([batch.tokens_BS.flatten().tolist() for batch in batches])
        if told_at.get(rank) == training.progress.step + 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return batches

    training.feed.next_step = next_step
    with FolderLock() as lock:
        return training.fit(Attempt(), lock), seen


def untimed(run_dir: Path) -> list[dict[str, Any]]:
    """The reports of a run, without times and memory."""
    rows = read_metrics(run_dir)
    return [{key: value for key, value in row.items() if key not in TIMED} for row in rows]


def losses(run_dir: Path) -> dict[int, float]:
    """step -> loss of a run that has recorded every step once."""
    rows = [row for row in read_metrics(run_dir) if "loss" in row]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert [row["tokens"] for row in rows] == [row["step"] * TOKENS_PER_STEP for row in rows]
    return {row["step"]: row["loss"] for row in rows}


def wait_for(condition: Callable[[], object], seconds: float = 600) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
