"""Long runs watched from outside: memory, files and threads of each process, and the folder."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median

from app.engine.files.run_folder import METRICS
from tests.kills import Sight
from tests.ordeals import POLL_S, children
from tests.training import ROOT

WINDOW = 20  # samples, a few steps apart, of which the median is taken at each tenth of the steps
SETTINGS = (
    "parallel.dp=2",
    "checkpoint.memory_every=1",
    "checkpoint.interval=10",
    "train.eval_interval=20",
)
Held = dict[str, float]  # "rank 0 files" -> how many; "resident" and "bytes" are bytes


def tree(pid: int) -> Iterator[tuple[str, int]]:
    """Yield a name, by depth and place, and the number of each process of a program."""
    level, depth = [pid], 0
    while level:
        yield from ((f"process {depth}.{place}", each) for place, each in enumerate(level))
        level, depth = [child for each in level for child in sorted(children(each))], depth + 1


def held(program: int, run: Path, step: int) -> Held:
    """What the processes of a run and its folder hold now, and the mean size of its records."""
    found, sizes = Held(), []
    for name, pid in tree(program):
        with suppress(OSError):
            text = Path(f"/proc/{pid}/status").read_text()
            words = dict(line.split(":", 1) for line in text.splitlines())
            found[f"{name} resident"] = float(words["VmRSS"].split()[0]) * 2**10
            found[f"{name} threads"] = float(words["Threads"])
            found[f"{name} files"] = len(os.listdir(f"/proc/{pid}/fd"))
    for folder, _, names in os.walk(run):  # passes over what is removed meanwhile
        for name in names:
            with suppress(OSError):
                sizes.append(0 if name == METRICS else Path(folder, name).stat().st_size)
    records = (run / METRICS).stat().st_size / step
    return {**found, "folder files": len(sizes), "folder bytes": sum(sizes), "records": records}


def soak(corpus: Sequence[str], run: Path, steps: int) -> list[Held]:
    """Train so many steps; return medians of what was held at each tenth of them."""
    words = (*corpus, *SETTINGS, f"train.steps={steps}", f"run_dir={run}")
    program = subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), *words],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
    )
    sight, found = Sight(run), []
    try:
        for part in range(1, 11):
            samples = []
            for back in reversed(range(WINDOW)):
                step = max(1, steps * part // 10 - 3 * back - 10)
                while (now := sight.step()) < step and program.poll() is None:
                    time.sleep(POLL_S)
                if now < steps and program.poll() is None:  # later processes end
                    samples.append(held(program.pid, run, now))
            common = set.intersection(*map(set, samples))
            found.append({key: median(row[key] for row in samples) for key in sorted(common)})
            print(f"step {steps * part // 10}: {growth(found)}", flush=True)
        assert program.wait() == 0
    finally:
        program.kill()
        program.wait()
    return found


def growth(found: Sequence[Held], since: int = 0) -> Held:
    """Return what differs between a window and the last one."""
    first, last = found[since], found[-1]
    return {key: last[key] - first[key] for key in last if last[key] != first.get(key)}
