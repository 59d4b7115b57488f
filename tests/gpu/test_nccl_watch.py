"""A rank that stops while it trains over NCCL is named, with what the other's device is in."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.gpu.programs import GPUS, ROOT, command

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 2, reason="needs two CUDA devices")]
TIMEOUT_S = 20
COLLECTIVE = r"\w+ \d+ (\(or one before it\) )?of \w+( in graphs)? \(.*\)"


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize(
    ("overrides", "where"),
    [
        ("parallel.dp=2", COLLECTIVE),
        ("parallel.dp=2 parallel.ep=2", COLLECTIVE),
        ("parallel=tp2", COLLECTIVE),
        (
            "parallel=tp2 model=dense_tiny cuda_graph=full_iteration",
            # a device ends the replay that it has begun: the other one waits in the next
            rf"({COLLECTIVE}|forwards and backwards of a step)",
        ),
        (
            "parallel=tp2 model=dense_tiny cuda_graph=full_iteration cuda_graph.optimizer=true",
            rf"({COLLECTIVE}|forwards and backwards of a step|the end of the step)",
        ),
        ("parallel=cp2", COLLECTIVE),
        ("parallel=pp2", rf"({COLLECTIVE}|[FB]\d+\.\d+|\w+\[.*\]|the end of the step)"),
    ],
)
def test_a_rank_that_stops_is_named(tmp_path: Path, overrides: str, where: str):
    line = command(
        tmp_path / "run",
        "train.steps=1000000",
        f"schedule.timeout_s={TIMEOUT_S}",
        *overrides.split(),
    )
    with subprocess.Popen(line, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        metrics, since = tmp_path / "run" / "metrics.jsonl", time.monotonic()
        while not (metrics.exists() and len(metrics.read_text().splitlines()) > 10):
            assert process.poll() is None and time.monotonic() - since < 120, process.communicate()[
                1
            ][-2000:]
            time.sleep(0.2)
        (launcher,) = children(process.pid)
        os.kill(children(launcher)[1], signal.SIGSTOP)
        since = time.monotonic()
        said = process.communicate(timeout=120)[1]
        print(said)
        assert process.returncode == 124 and time.monotonic() - since < 1.5 * TIMEOUT_S + 10
        waited = rf"for \d+ s \(schedule.timeout_s={TIMEOUT_S}\)(; under way: .*)?"
        stuck = f"rank 0 is stuck in {where} {waited}; rank 1 "
        assert re.search(stuck, said), said
