"""The choice of `app.cli.tune` against all measurements of a space of combinations.

    python bench/tune_space.py --out FOLDER [--count 24] [--steps 10] [overrides …]

Plans the combinations of the run, takes `--count` of them spread over the order of planned times,
measures every one (an interrupted measurement continues), and replays the search on these times:
it sees a time only once it has asked for it. Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from app.advice.combinations import PlannedCombination, plan_combinations
from app.advice.trials import Trials
from app.cli.options.arguments import Typed
from app.cli.options.compose import load_typed
from app.cli.tune import TOGETHER
from app.cli.tuning.choose import next_combinations
from app.cli.tuning.measuring import Bench
from app.cli.tuning.records import RECORD
from app.planner.plan import Plan


def main() -> None:
    """Measure a space, replay the search, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=24, help="combinations of the space")
    parser.add_argument("--steps", type=int, default=10, help="timed steps of each")
    args, overrides = parser.parse_known_args()
    typed = Typed.parse(overrides)
    run = load_typed(typed)
    space = spread(plan_combinations(run, Trials(Plan(run).gpu_memory)), args.count)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    head = (*overrides, device, f"{args.steps} steps")
    bench = Bench(typed, run.world_size, args.out, args.out / RECORD, head, steps=args.steps)
    there = bench.measured()
    bench.measure(
        [each for each in space if each.key not in there],
        lambda found: print(found.line(), end="", flush=True),
    )
    rows = bench.measured()
    times = {key: row.step_ms for key, row in rows.items() if row.step_ms is not None}
    failed = [key for key, row in rows.items() if row.step_ms is None]
    print(json.dumps({"overrides": overrides, "device": device, "torch": torch.__version__,
                      "space": len(space), "failed": len(failed),
                      **replayed(space, times, failed)}))  # fmt: skip


def spread(combinations: Sequence[PlannedCombination], count: int) -> list[PlannedCombination]:
    """Return the typed run and others that fit, spread evenly over the order of planned times."""
    own, *others = (each for each in combinations if each.fits)
    step = max(1.0, len(others) / (count - 1))
    return [own, *(others[int(n * step)] for n in range(min(count - 1, len(others))))]


def replayed(
    space: Sequence[PlannedCombination], times: Mapping[str, float], failed: Sequence[str]
) -> dict[str, Any]:
    """Replay the search on recorded times, and compare its choice with the fastest."""
    own = space[0].key
    seen = {own: times[own]} if own in times else {}
    unusable = set[str]()
    while following := next_combinations(space, seen, sorted(unusable), count=TOGETHER):
        for each in following:
            if each.key in times:
                seen[each.key] = times[each.key]
            else:
                assert each.key in failed, "every combination of the space has a row"
                unusable.add(each.key)
    best, chosen = min(times, key=times.__getitem__), min(seen, key=seen.__getitem__)
    return {
        "measured_by_search": len(seen) + len(unusable),
        "best": best,
        "best_ms": times[best],
        "chosen": chosen,
        "chosen_ms": times[chosen],
        "behind": round(times[chosen] / times[best] - 1, 4),
        "slowest_ms": max(times.values()),
        "fastest_planned_ms": next(
            times[each.key]
            for each in sorted(space, key=lambda each: each.seconds)
            if each.key in times
        ),
    }


if __name__ == "__main__":
    main()
