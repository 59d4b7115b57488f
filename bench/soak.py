"""What a long run holds at each tenth of its steps: memory, open files, threads, its folder.

    python -m bench.soak [--steps 10000] OUT.json

Two ranks of the smallest model on this CPU with copies in memory after every step, a checkpoint
after every tenth and a validation after every twentieth. Processes are named by depth and place: 0
is train.py, 1 torchrun, 2 supervisors, 3 ranks. Numbers are medians (tests/soaks.py).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch

from tests.soaks import SETTINGS, growth, soak
from tests.training import corpus_in


def main() -> None:
    """Train, print the growth at each tenth, and write everything."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as place:
        corpus = corpus_in(Path(place) / "corpus")
        seen = soak(corpus, Path(place) / "run", args.steps)
    facts = {"torch": torch.__version__, "settings": SETTINGS, "steps": args.steps}
    tenths = {key: [row.get(key) for row in seen] for key in seen[-1]}
    said = {**facts, "tenths": tenths, "growth": growth(seen)}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(said) + "\n")


if __name__ == "__main__":
    main()
