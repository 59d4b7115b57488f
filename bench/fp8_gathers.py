"""What gathering updated parameters in FP8 could save at most, by the plan.

    python bench/fp8_gathers.py [--gpus 2 8 16 64] [--sequences 8 1] [overrides …]

Parameters are gathered in their own type, and quantised by each rank. Gathered in FP8 the
matrices that are read so would take one byte per element in place of two. A row per number of GPUs
and of sequences per GPU and step: GB that a rank sends, ms of it that the forward does not hide, of
a step of so many ms; what half of that would save for the share that is in FP8, without what
it costs (the largest entry of a matrix that ranks have parts of, and copies along columns).
"""

from __future__ import annotations

import argparse
import json

from app.cli.options.compose import load_overrides
from app.plan.model.fp8 import fp8_weights
from app.planner.export import plan_json
from app.planner.plan import Plan

FIXED = ("hardware=h200", "train.micro_batch=1", "train.seq_len=4096", "precision=bf16",
         "cuda_graph=full_iteration")  # fmt: skip
CHOSEN = ("model=llama3_8b", "precision.fp8.recipe=delayed", "precision.fp8.include=[linear,head]")


def row(gpus: int, sequences: int, overrides: list[str]) -> str:
    """A line of the table."""
    batch = [f"parallel.dp={gpus}", f"train.global_batch={gpus * sequences}"]
    plan = Plan(load_overrides([*FIXED, *CHOSEN, *overrides, *batch], gpus))
    shown = json.loads(json.dumps(plan_json(plan)))
    exposed = shown["schedule"]["time"]["gathering of parameters"]
    step = shown["schedule"]["estimate"]["seconds"]
    numel = sum(c.dense.numel for chunks in plan.buffers for c in chunks if c.dense is not None)
    fp8 = plan.run.precision.fp8
    in_8 = sum(
        named.weight.numel
        for stages in plan.stages.stages
        for stage in stages
        for named in fp8_weights(plan.run.model, fp8, stage)
    )
    saved = exposed * in_8 / numel / 2
    sent = 2 * numel * (gpus - 1) / gpus / 1e9
    return (
        f"| {gpus} | {sequences} | {sent:.1f} | {1e3 * exposed:.0f} | {1e3 * step:.0f} | "
        f"{1e3 * saved:.0f} | {saved / step:.1%} |"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=int, nargs="+", default=[2, 8, 16, 64])
    parser.add_argument("--sequences", type=int, nargs="+", default=[8, 1], help="per GPU and step")
    args, overrides = parser.parse_known_args()
    print("| GPUs | sequences each | sent, GB | exposed, ms | step, ms | saved at most, ms | |")
    print("|---|---|---|---|---|---|---|")
    for sequences in args.sequences:
        for gpus in args.gpus:
            print(row(gpus, sequences, overrides), flush=True)


if __name__ == "__main__":
    main()
