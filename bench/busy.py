"""Tokens per second of the default model beside programs that keep the cores busy.

    python bench/busy.py [--steps 40] [--rounds 3] [--out FILE] [NAME=VALUE …]

Each NAME=VALUE is an environment, such as OMP_WAIT_POLICY=passive, which is measured beside what
`python train.py` sets itself and the threads' own default (GOMP_SPINCOUNT=300000); all take turns
in every round, alone, beside one busy process per core and beside four. Prints medians and spreads,
and ratios against the default of the same round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
THREADS_OWN = "GOMP_SPINCOUNT=300000"  # libgomp's default where threads do not outnumber cores
OURS = ""  # nothing is set: what train.py chooses
BESIDE = (0, 1, 4)  # busy processes per core
LEAST_STEPS = 4  # of a run beside others, which takes its time
VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS")


def measured(setting: str, steps: int, folder: Path) -> float:
    """Tokens per second, median over the second half of the steps."""
    env = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    env |= dict([setting.split("=")]) if setting else {}
    line = [sys.executable, str(ROOT / "train.py"), f"train.steps={steps}", "log=none"]
    line += [
        "checkpoint=none",
        "train.eval_interval=0",
        "train.eval_sequences=8",
        f"run_dir={folder}",
    ]
    subprocess.run(line, env=env, check=True, capture_output=True)
    rows = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
    speeds = [row["tokens_per_s"] for row in rows if "tokens_per_s" in row]
    return statistics.median(speeds[len(speeds) // 2 :])


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """So many processes that do nothing but compute."""
    started = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)
    ]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def rounds(settings: Sequence[str], steps: int, count: int) -> dict[int, dict[str, list[float]]]:
    """Busy processes per core -> setting -> tokens per second of each round."""
    found: dict[int, dict[str, list[float]]] = {}
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        for number in range(count):
            for each in BESIDE:
                for setting in settings:
                    place = Path(folder) / f"{number}-{each}-{settings.index(setting)}"
                    with busy(each * cores):
                        speed = measured(setting, max(LEAST_STEPS, steps // (1 + 2 * each)), place)
                    found.setdefault(each, {}).setdefault(setting, []).append(speed)
    return found


def show(found: dict[int, dict[str, list[float]]]) -> None:
    """Medians, least and most, and the median ratio against the threads' own default."""
    for each, settings in found.items():
        print(f"\n{each} busy processes per core")
        base = settings[THREADS_OWN]
        for setting, speeds in settings.items():
            ratio = statistics.median(s / b for s, b in zip(speeds, base, strict=True))
            spread = f"{min(speeds):,.0f} to {max(speeds):,.0f}"
            name = setting or "(python train.py)"
            print(
                f"  {name:<28}{statistics.median(speeds):>10,.0f} tokens/s  {spread:>20}  "
                f"{ratio:5.2f}"
            )


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("settings", nargs="*", metavar="NAME=VALUE")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found = rounds([THREADS_OWN, OURS, *args.settings], args.steps, args.rounds)
    show(found)
    if args.out:
        args.out.write_text(
            json.dumps({"cores": len(os.sched_getaffinity(0)), "tokens_per_s": found}, indent=1)
            + "\n"
        )


if __name__ == "__main__":
    main()
