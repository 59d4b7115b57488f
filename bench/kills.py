"""Kills of ranks, supervisors, launchers and nodes of small runs on this CPU, drawn by seeds.

    python -m bench.kills [--kills 1000] [--seed 1] [--fresh] OUT.json

tests/deaths.py says what runs are held to. Each seed draws a run and three signals. OUT.json counts
kinds, targets, moments and outcomes, and has every failure; it is written after each seed.
`--fresh` starts new interpreters instead of processes forked with torch loaded.
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
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from tests.deaths import Alone, draw, endure
from tests.training import corpus_in

HITS = 3  # of a seed
PARTS = ("kind", "target", "phase")  # words of a hit


def counted(records: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """How many hits there were, by what was drawn and by what came of them."""
    found: dict[str, Counter[str]] = {}
    for record in records:
        number, kind, target, _, phase, *_ = record["hit"].split()
        copies = f"every {record['memory']}" if record["memory"] else "none"
        outcome = "; ".join(record["outcome"])
        row = {"kind": f"{number} {kind}", "target": target, "phase": phase}
        row |= {"layout": record["layout"], "launch": record["launch"], "copies": copies}
        row |= {f"outcome of {target}, {'with' if record['memory'] else 'without'} copies": outcome}
        for name, value in row.items():
            found.setdefault(name, Counter())[value] += 1
    return {name: dict(each.most_common()) for name, each in found.items()}


def write(out: Path, records: list[dict[str, Any]], failures: list[Any], facts: object) -> None:
    """Write counts, seeds and failures."""
    seeds = sorted({record["seed"] for record in records})
    said = {
        "torch": torch.__version__,
        "hits": len(records),
        "seeds": [seeds[0], seeds[-1]] if seeds else [],
        "options": facts,
        **counted(records),
        "failures": failures,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(said, indent=1) + "\n")


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
    records: list[dict[str, Any]] = []
    failures: list[Any] = []
    facts = {"fresh": args.fresh, "hits_of_a_seed": HITS}
    seed = args.seed
    with tempfile.TemporaryDirectory(prefix="kills-") as place:
        alone = Alone(corpus_in(Path(place) / "corpus"), Path(place))
        while len(records) < args.kills:
            began, said = time.monotonic(), io.StringIO()
            before = len(records)
            try:
                with contextlib.redirect_stdout(said):
                    work = Path(place) / f"seed-{seed}"
                    setup, hits = draw(seed, HITS)
                    for record in endure(setup, hits, alone, work, fresh=args.fresh):
                        records.append({"seed": seed, **record})
            except Exception:
                trace = traceback.format_exc()
                failures.append({"seed": seed, "error": trace.splitlines()[-1]})
                print(said.getvalue(), trace, sep="\n", flush=True)
            seconds = time.monotonic() - began
            print(f"seed {seed}: {len(records) - before} hits, {seconds:.0f} s", flush=True)
            write(args.out, records, failures, facts)
            seed += 1
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
