"""Long runs watched from outside: memory, open files and threads of each process, and the folder.

Samples are taken at steps, and medians of the same number of samples are compared: at a tenth of
the steps, and at the end.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from app.engine.files.run_folder import METRICS
from tests.kills import Sight
from tests.ordeals import children
from tests.training import ROOT

KIB = 2**10
WINDOW = 20  # samples of which the median is taken
POLL_S = 0.005
SETTINGS = (
    "parallel.dp=2",
    "checkpoint.memory_every=1",
    "checkpoint.interval=10",
    "checkpoint.keep_last=2",
    "train.eval_interval=20",
)
FIELDS = ("resident", "files", "threads")  # of a process: bytes, and counts


@dataclass
class Watched:
    """Medians of what a run holds, by process, and of its folder without metrics.jsonl."""

    steps: list[int] = field(default_factory=list)  # of the windows' ends
    processes: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    folder: dict[str, list[float]] = field(default_factory=dict)
    metrics: list[float] = field(default_factory=list)  # bytes of metrics.jsonl per step

    def growth(self, since: int = 0) -> dict[str, dict[str, float]]:
        """Return the last median minus that of a window, for everything."""
        rows = {**self.processes, "folder": self.folder, "metrics": {"per_step": self.metrics}}
        return {
            name: {key: values[-1] - values[since] for key, values in row.items()}
            for name, row in rows.items()
        }


def tree(pid: int) -> Iterator[tuple[str, int]]:
    """Yield a name, by depth and place, and the number of each process of a program."""
    level, depth = [pid], 0
    while level:
        yield from ((f"{depth}.{place}", each) for place, each in enumerate(level))
        level, depth = [child for each in level for child in sorted(children(each))], depth + 1


def held(pid: int) -> dict[str, float]:
    """What a process holds now; nothing of one that has ended."""
    with suppress(OSError, ValueError):
        words = dict(
            line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        )
        counts = len(os.listdir(f"/proc/{pid}/fd")), float(words["Threads"])
        return dict(zip(FIELDS, (float(words["VmRSS"].split()[0]) * KIB, *counts), strict=True))
    return {}


def folder_of(run: Path) -> dict[str, float]:
    """Number and bytes of a run's files, without metrics.jsonl."""
    sizes = []
    for folder, _, names in os.walk(run):  # passes over what is removed meanwhile
        for name in names:
            with suppress(OSError):
                if name != METRICS:
                    sizes.append(Path(folder, name).stat().st_size)
    return {"files": len(sizes), "bytes": sum(sizes)}


def soak(
    corpus: Sequence[str], run: Path, steps: int, tell: Callable[[str], object] = print
) -> Watched:
    """Train so many steps; return what was held at a tenth of them, …, at the end."""
    words = (*corpus, *SETTINGS, f"train.steps={steps}", f"run_dir={run}")
    program = subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), *words],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
    )
    try:
        found = _watch(program, run, steps, tell)
        assert program.wait() == 0
    finally:
        program.kill()
        program.wait()
    return found


def _watch(
    program: subprocess.Popen[bytes], run: Path, steps: int, tell: Callable[[str], object]
) -> Watched:
    sight, found = Sight(run), Watched()
    for part in range(1, 11):
        first = steps * part // 10 - 4 * WINDOW  # a sample every third step, on its average
        samples: list[dict[str, dict[str, float]]] = []
        sizes = []
        for sample in range(WINDOW):
            step = _reach(sight, first + 3 * sample, program)
            if step is None:
                break
            samples.append({name: held(pid) for name, pid in tree(program.pid)})
            sizes.append((folder_of(run), (run / METRICS).stat().st_size / step))
        if not samples:
            break
        names = samples[0].keys()
        found.steps.append(steps * part // 10)
        for name in names:
            row = found.processes.setdefault(name, {key: [] for key in FIELDS})
            for key in FIELDS:
                values = [each[name][key] for each in samples if each.get(name)]
                row[key].append(median(values))
        for key in ("files", "bytes"):
            found.folder.setdefault(key, []).append(median(size[key] for size, _ in sizes))
        found.metrics.append(median(each for _, each in sizes))
        tell(f"step {found.steps[-1]}: {found.growth()}")
    return found


def _reach(sight: Sight, step: int, program: subprocess.Popen[bytes]) -> int | None:
    """Wait for a step; None: the program has ended before."""
    step = max(1, step)
    while (now := sight.step()) < step:
        if program.poll() is not None:
            return None
        time.sleep(POLL_S)
    return now
