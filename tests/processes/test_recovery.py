"""Ranks that are killed at drawn moments of a run with copies in memory, beside the same run."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from app.engine.files.run_folder import METRICS, read_metrics
from tests.training import ROOT, TIMED, TINY

STEPS = 30
SETTINGS = (
    *TINY[:-3],
    "log=console",
    "log.interval=100",
    f"train.steps={STEPS}",
    "checkpoint.interval=1000",
    "model.num_layers=2",
)
GRAPHS = "cuda_graph.impl=local cuda_graph.scope=[attn] cuda_graph.warmup_steps=2"
WHOLE = "model.moe.dispatcher=static cuda_graph.impl=full_iteration cuda_graph.warmup_steps=2"
CASES = {
    "dp": "parallel.dp=2",
    "tp": "parallel.tp=2",
    "pp": "parallel.pp=2",
    "experts": "parallel.dp=2 parallel.ep=2",
    "every-third": "parallel.dp=2 checkpoint.memory_every=3",
    "four": "parallel.tp=2 parallel.dp=2 parallel.ep=2",
    "graphs": f"parallel.dp=2 {GRAPHS}",
    "full-iteration": f"parallel.dp=2 parallel.ep=2 {WHOLE}",
}
LIMIT_S = 240.0


def command(folder: Path, words: str, *more: str) -> list[str]:
    program = [sys.executable, str(ROOT / "train.py"), *SETTINGS, f"run_dir={folder}"]
    return [*program, *words.split(), *more]


def start(folder: Path, words: str, *more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(folder, words, *more),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def supervised(folder: Path) -> dict[int, int]:
    """Rank -> process of a run's supervised ranks."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"run_dir={folder}".encode() not in (entry / "cmdline").read_bytes():
                continue
            words = (entry / "environ").read_bytes().split(b"\0")
            env = dict(word.split(b"=", 1) for word in words if b"=" in word)
            if (
                b"GRAPHFOLD_RANK_RESTARTS" in env
                and b"parent.py" not in (entry / "cmdline").read_bytes()
            ):
                found[int(env[b"RANK"])] = int(entry.name)
    return found


def last_step(folder: Path) -> int:
    with suppress(FileNotFoundError):
        steps = re.findall(r'"step": (\d+)', (folder / METRICS).read_text())
        return int(steps[-1]) if steps else 0
    return 0


def wait_for_step(folder: Path, step: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while last_step(folder) < step:
        assert process.poll() is None and time.monotonic() < deadline, process.stdout.read()
        time.sleep(0.005)


def rows(folder: Path) -> list[dict[str, float]]:
    # what a process measures of itself, or counts since its start, is not the run's
    return [
        {key: value for key, value in row.items() if key not in TIMED and "ms" not in key}
        for row in read_metrics(folder)
        if "recovery_s" not in row
    ]


def same_numbers(one: Path, other: Path) -> None:
    keys = ("step", "loss", "grad_norm", "lr", "tokens", "val_loss", "aux_loss")
    first, second = (
        [{key: row[key] for key in keys if key in row} for row in rows(each)]
        for each in (one, other)
    )
    assert first == second
    files = sorted((one / f"checkpoints/step-{STEPS:08d}").glob("*.safetensors"))
    assert files
    for file in files:
        here, there = load_file(file), load_file(other / file.relative_to(one))
        assert here.keys() == there.keys()
        assert all(torch.equal(here[name], there[name]) for name in here)


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_killed_ranks_change_no_bit(name: str, tmp_path: Path):
    words, draw = CASES[name], random.Random(name)
    plain, killed = tmp_path / "plain", tmp_path / "killed"
    undisturbed = start(plain, words.replace("checkpoint.memory_every=3", ""))
    assert undisturbed.communicate(timeout=LIMIT_S) and undisturbed.returncode == 0
    every = "" if "memory_every" in words else "checkpoint.memory_every=1"
    process = start(killed, words, *every.split())
    # far apart: the second rank would otherwise die before the first has its state back
    for at in (draw.randrange(5, 12), draw.randrange(18, STEPS - 4)):
        wait_for_step(killed, at, process)
        time.sleep(0.05 * draw.random())
        ranks = supervised(killed)
        target = draw.choice(sorted(ranks))
        os.kill(ranks[target], signal.SIGKILL)
        deadline = time.monotonic() + LIMIT_S
        while len(now := supervised(killed)) < len(ranks) or now[target] == ranks[target]:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        assert {r: pid for r, pid in now.items() if r != target} == {
            r: pid for r, pid in ranks.items() if r != target
        }
    said, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, said
    back = re.findall(r"back from step (\d+) to (\d+)", said)
    assert len(back) == 2, said
    most = 3 if "memory_every" in words else 1
    assert all(int(step) - int(to) <= most for step, to in back), said
    told = [row for row in read_metrics(killed) if "recovery_s" in row]
    assert [(row["recovery_from"], row["step"]) for row in told] == [
        (int(step), int(to)) for step, to in back
    ]
    captured = "cuda_graph" in words
    assert captured == ("capture_s" in str(told[0])) == (", capture " in said)
    assert all(row["recovery_ranks"] == 1 for row in told)
    assert all("recovery_rejoin_s" in row and "recovery_state_s" in row for row in told)
    same_numbers(plain, killed)
    assert not supervised(killed)
