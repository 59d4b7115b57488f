"""Tokens per second of the default model beside programs that keep the cores busy.

    python bench/busy.py [--steps 40] [--rounds 3] [--old FOLDER] [--out FILE] [NAME=VALUE …]

Each NAME=VALUE is an environment, such as OMP_WAIT_POLICY=passive, which is measured beside what
`python train.py` sets itself, what another checkout's sets (--old) and the threads' own default
(GOMP_SPINCOUNT=300000). All take turns in every round, alone, beside one busy process per core and
beside four. Prints medians and spreads, and ratios against the first of them in the same round: the
other checkout, else the default.
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
OLD = "(--old)"  # nothing is set, in the other checkout
BESIDE = (0, 1, 4)  # busy processes per core
LEAST_STEPS = 4  # of a run beside others, which takes its time
VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS")


def measured(root: Path, setting: str, steps: int, folder: Path) -> float:
    """Tokens per second, median over the second half of the steps."""
    env = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    env |= dict([setting.split("=")]) if "=" in setting else {}
    line = [sys.executable, str(root / "train.py"), f"train.steps={steps}", "log=none"]
    line += [
        "checkpoint=none",
        "train.eval_interval=0",
        "train.eval_sequences=8",
        f"run_dir={folder}",
    ]
    subprocess.run(line, env=env, cwd=root, check=True, capture_output=True)
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


def rounds(
    settings: Sequence[str], steps: int, count: int, old: Path
) -> dict[int, dict[str, list[float]]]:
    """Busy processes per core -> setting -> tokens per second of each round."""
    found: dict[int, dict[str, list[float]]] = {}
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        for number in range(count):
            for each in BESIDE:
                for setting in settings:
                    place = Path(folder) / f"{number}-{each}-{settings.index(setting)}"
                    root = old if setting == OLD else ROOT
                    length = max(LEAST_STEPS, steps // (1 + 2 * each))
                    with busy(each * cores):
                        speed = measured(root, setting, length, folder=place)
                    found.setdefault(each, {}).setdefault(setting, []).append(speed)
    return found


def show(found: dict[int, dict[str, list[float]]]) -> None:
    """Medians, least and most, and the median ratio against the first setting."""
    for each, settings in found.items():
        print(f"\n{each} busy processes per core")
        base = next(iter(settings.values()))
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
    parser.add_argument("--old", type=Path, help="another checkout")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    settings = [*([OLD] if args.old else []), THREADS_OWN, OURS, *args.settings]
    old = (args.old or ROOT).resolve()
    found = rounds(settings, args.steps, args.rounds, old=old)
    show(found)
    if args.out:
        args.out.write_text(
            json.dumps({"cores": len(os.sched_getaffinity(0)), "tokens_per_s": found}, indent=1)
            + "\n"
        )


if __name__ == "__main__":
    main()
