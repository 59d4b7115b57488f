"""Kills of ranks, supervisors, launchers and nodes of small runs on this CPU, drawn by seeds.

    python -m bench.kills [--kills 1000] [--seed 1] [--fresh] OUT.json

tests/deaths.py says what runs are held to. A seed draws a run and three signals. OUT.json, written
after each seed, counts what was drawn and what came of it, and has every failure. `--fresh` starts
new interpreters instead of processes forked with torch loaded.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from tests.deaths import Alone, draw, endure
from tests.training import corpus_in

HITS = 3  # of a seed


def counted(records: Sequence[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """How many hits there were, by what was drawn and by what came of them."""
    found: dict[str, Counter[str]] = {}
    for record in records:
        number, kind, target, _, phase, *_ = record["hit"].split()
        copies = f"every {record['memory']}" if record["memory"] else "none"
        row = {"kind": f"{number} {kind}", "target": target, "phase": phase, "copies": copies}
        row |= {name: record[name] for name in ("layout", "launch")}
        name = f"outcome of {target}, {'with' if record['memory'] else 'without'} copies"
        for key, value in (row | {name: "; ".join(record["outcome"])}).items():
            found.setdefault(key, Counter())[value] += 1
    return {name: dict(each.most_common()) for name, each in found.items()}


def main() -> int:
    """Hit runs until there were enough hits; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1, help="the first one")
    parser.add_argument("--fresh", action="store_true", help="start new interpreters")
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    records: list[dict[str, Any]] = []
    failures: list[dict[str, object]] = []
    seed = args.seed
    with tempfile.TemporaryDirectory(prefix="kills-") as place:
        alone = Alone(corpus_in(Path(place) / "corpus"), Path(place))
        while len(records) < args.kills:
            began, said = time.monotonic(), io.StringIO()
            try:
                with contextlib.redirect_stdout(said):
                    work = Path(place) / f"seed-{seed}"
                    records += endure(*draw(seed, HITS), alone, work, fresh=args.fresh)
            except Exception:
                trace = traceback.format_exc()
                failures.append({"seed": seed, "error": trace.splitlines()[-1]})
                print(said.getvalue(), trace, sep="\n", flush=True)
            print(f"seed {seed}: {time.monotonic() - began:.0f} s", flush=True)
            facts = {"torch": torch.__version__, "seeds": [args.seed, seed], "fresh": args.fresh}
            facts |= {"hits": len(records), "failures": failures, **counted(records)}
            args.out.write_text(json.dumps(facts, indent=1) + "\n")
            seed += 1
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
