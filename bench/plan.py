"""How long planning takes: importing `app.plan`, the whole plan of a 671 B model on 2,048 ranks,
and time and memory of 1,000 of its layouts.

    python bench/plan.py [--rounds 5] [overrides …]

Every round runs in fresh processes, one after the other. Prints medians with quartiles, of the wall
clock and of the processor, with how many programs wanted one meanwhile (the load of a minute), and
the plan's time over that of the import, and writes bench/results/plan.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DEFAULT = ["+experiment=deepseek_v3_2048"]
TIMED = """
import resource, time
began, used = time.perf_counter(), time.process_time()
{body}
print(
    time.perf_counter() - began,
    time.process_time() - used,
    resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
)
"""
IMPORT = "import app.planner.plan, app.advice.suggest, app.planner.export"
COMPOSE = """
import sys
sys.path.insert(0, {root!r})
from app.cli.options.compose import load_overrides
from app.planner.plan import Plan
run = load_overrides({overrides!r})
"""
WHOLE = """
plan = Plan(run)
for name in ("actions", "graphs", "buffers", "memory", "timeline", "traffic", "advice"):
    getattr(plan, name)
"""

CANDIDATES = """
from itertools import islice, product
from app.advice.moves import with_values
from app.advice.shapes import graph_modes, micro_batches, recompute_ladder, schedules, shapes
from app.advice.trials import Trials
from app.errors import ConfigError
from app.rules import check

def candidates():
    for shape in shapes(run):
        for size, order in product(micro_batches(run, shape), schedules(run, shape.pp)):
            values = shape.values(run) | order | {{"train.micro_batch": size}}
            for mode, kept in product(graph_modes(run), recompute_ladder(run)):
                try:
                    yield check(with_values(run, values | mode | kept))
                except ConfigError:
                    continue

runs = list(islice(candidates(), 0, {count} * {step}, {step}))
assert len(runs) == {count}
"""
LAYOUTS = """
trials = Trials(Plan(run).gpu_memory)
for each in runs:
    trials.memory(each), trials.seconds(each)
"""
COUNT, STEP = 1000, 7  # layouts, and of how many in a row one is taken: no two are neighbours


def main() -> None:
    """Measure in turn, summarise, save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    args, overrides = parser.parse_known_args()
    if args.rounds < 2:
        parser.error("--rounds: quartiles are of two or more")
    compose = COMPOSE.format(root=str(ROOT), overrides=overrides or DEFAULT)
    several = compose + CANDIDATES.format(count=COUNT, step=STEP)
    cases = {"import": ("", IMPORT), "plan": (compose, WHOLE), "layouts": (several, LAYOUTS)}
    measured: dict[str, list[tuple[float, ...]]] = {name: [] for name in cases}
    for _ in range(args.rounds):
        for name, (before, body) in cases.items():
            measured[name].append(run(before + TIMED.format(body=body)))
    result: dict[str, Any] = {name: summary(found) for name, found in measured.items()}
    result["plan"]["over_import"] = round(
        result["plan"]["seconds"] / result["import"]["seconds"], 1
    )
    result["overrides"], result["python"] = overrides or DEFAULT, sys.version.split()[0]
    path = ROOT / "bench" / "results" / "plan.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


def run(code: str) -> tuple[float, ...]:
    """(seconds, those of the processor, largest resident memory in GiB, load) as the program prints
    them.
    """
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    seconds, used, kib = map(float, out.split())
    return seconds, used, kib / 2**20, os.getloadavg()[0]


def summary(found: list[tuple[float, ...]]) -> dict[str, Any]:
    """Medians of the seconds with quartiles, of the load, and the largest memory."""
    seconds, used, memory, load = zip(*found, strict=True)
    quartiles = [round(value, 4) for value in statistics.quantiles(seconds, n=4)[::2]]
    return {
        "seconds": round(statistics.median(seconds), 4),
        "quartiles": quartiles,
        "processor_seconds": round(statistics.median(used), 4),
        "load": round(statistics.median(load), 1),
        "gib": round(max(memory), 3),
    }


if __name__ == "__main__":
    main()
