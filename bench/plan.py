"""How long planning takes: importing `app.plan`, and the whole plan of a 675 B model on 2,048
ranks.

    python bench/plan.py [--rounds 5] [overrides …]

Every round runs in fresh processes, one after the other. Prints medians with quartiles, and the
plan's time over that of the import, and writes bench/results/plan.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DEFAULT = ["+experiment=deepseek_v3_2048"]
TIMED = """
import resource, time
began = time.perf_counter()
{body}
print(time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
IMPORT = "import app.plan.plan, app.advice.suggest, app.plan.export"
COMPOSE = """
import sys
sys.path.insert(0, {root!r})
from app.cli.options.compose import load_overrides
from app.plan.plan import Plan
run = load_overrides({overrides!r})
"""
WHOLE = """
plan = Plan(run)
for name in ("actions", "graphs", "buffers", "memory", "timeline", "traffic", "advice"):
    getattr(plan, name)
"""


def main() -> None:
    """Measure in turn, summarise, save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    args, overrides = parser.parse_known_args()
    compose = COMPOSE.format(root=str(ROOT), overrides=overrides or DEFAULT)
    cases = {"import": ("", IMPORT), "plan": (compose, WHOLE)}
    measured: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
    for _ in range(args.rounds):
        for name, (before, body) in cases.items():
            measured[name].append(run(before + TIMED.format(body=body)))
    result = {name: summary(found) for name, found in measured.items()}
    result["plan"]["over_import"] = round(
        result["plan"]["seconds"] / result["import"]["seconds"], 1
    )
    result["overrides"], result["python"] = overrides or DEFAULT, sys.version.split()[0]
    path = ROOT / "bench" / "results" / "plan.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


def run(code: str) -> tuple[float, float]:
    """(seconds, largest resident memory in GiB) as the program prints them."""
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    seconds, kib = out.split()
    return float(seconds), float(kib) / 2**20


def summary(found: list[tuple[float, float]]) -> dict[str, Any]:
    """Median and quartiles of the seconds, and the largest memory."""
    seconds = [pair[0] for pair in found]
    quartiles = [round(value, 4) for value in statistics.quantiles(seconds, n=4)[::2]]
    most = round(max(pair[1] for pair in found), 3)
    return {"seconds": round(statistics.median(seconds), 4), "quartiles": quartiles, "gib": most}


if __name__ == "__main__":
    main()
