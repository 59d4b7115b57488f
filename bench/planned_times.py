"""Planned seconds of a step beside measured ones: every recorded whole step at hidden ≥ 1024.

    python bench/planned_times.py [--half fitted|aside|all] [--profile HARDWARE.yaml]

Rows are those of bench/results in 16-bit elements on H200s. A hash of a row's overrides, which no
measurement changes, sets half of them aside: constants of the profile that no piece gives were
fitted to the others alone. What was recorded after that is set aside whole (RECORDED_SINCE). Rows
from before kernels of ours existed are planned with the measured speeds of the plain torch
operations that ran then (PLAIN). Writes bench/results/planned_times.json.gz and
docs/planned-times.svg; with another profile than that of hardware=h200, nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import hashlib
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import yaml

from app.cli.options.compose import load_overrides
from app.config import HardwareProfile, Run
from app.config.renamed import removed, with_new_names
from app.plan.cost.flops import flops_per_token
from app.plan.cost.times import stage_times
from app.planner.plan import Plan

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
HIDDEN = 1024
DIFFERS = 1.08  # times as long: pairs of steps whose order counts

# rows whose kernels were plain torch operations, and their speeds (bench/results/pieces_*.json)
PLAIN_FILES = (
    "layouts.jsonl",
    "pipeline.jsonl",
    "small_h200.json",
    "small_h200_deterministic.json",
    "smallmoe_h200.json",
    "smallmoe_h200_ep2.json",
)
ADDED = {"sums_gb_s": 1870.0}  # weights' gradients were stored and then added to their sums
PLAIN: dict[str, Any] = {
    "activation_gb_s": (1067.0, 1065.0),
    "heads_gb_s": (264.0, 224.0),
    "norm_gb_s": (2955.0, 1733.0),
    "loss_gb_s": (198.0, 328.0),
    "rows_gb_s": (455.0, 300.0),
    "launch_us": 34.0,
    **ADDED,
}
# rows whose weight gradients were added to their sums by kernels of their own
ADDED_ROWS = {"step_profile.jsonl": range(6), "compare_smallmoe_before.json": range(99)}
OF_H100 = "h100_steps.jsonl"  # rows of another GPU; of all others, an H200
# files whose rows have kernels of today, but for those of norms' weights in some
TODAY = dict.fromkeys(
    (
        *("two_gpus_captured.jsonl", "one_gpu_captured.jsonl"),
        *("recompute.jsonl", "two_gpus_small.jsonl"),
        *("step_profile_small.jsonl", "compare_small_again.json", "compare_small_of_4.json"),
        *("compare_dense_pp2.json", "compare_moe_ep2.json", "compare_moe_pp2.json"),
        *("attention_steps.jsonl", "fp8_own_steps.jsonl", "two_gpus_long.jsonl", OF_H100),
        *("foretold_first.jsonl", "foretold.jsonl", "moments.jsonl", "microbatches.jsonl"),
        *("offload.jsonl", "long_sequences.jsonl", "linear_attention.jsonl", "mtp.jsonl"),
    ),
    range(99),
)
# rows whose update was one kernel; of the others torch's, and a copy behind it
ONE_UPDATE = {
    "step_profile.jsonl": range(8, 99),
    "fp8_steps.jsonl": range(99),
    "two_gpus_levers.jsonl": range(99),
    "two_gpus_steps.jsonl": range(99),
    **TODAY,
}
# rows whose routers multiplied bf16 tokens and weights; those of the others, in fp32
BF16_ROUTERS = {"two_gpus_steps.jsonl": range(5, 99), **TODAY}
FP32_ROUTER: dict[str, Any] = {"router_tflops": 39.81}
# recorded when all constants were fitted
FITTED_SINCE = ("foretold_first.jsonl",)  # foretold (bench/foretold.py), then fitted to
RECORDED_SINCE = ("two_gpus_levers.jsonl", "two_gpus_steps.jsonl", *TODAY)
UPDATE: dict[str, Any] = {"optimizer_gb_s": 3150.0}
LEFT_OUT = ("precision=fp32",)
# rows whose host or GPU had other work meanwhile: their memory counts
NOT_ALONE = {"offload.jsonl": range(3), "linear_attention.jsonl": range(99)}


@dataclass(frozen=True, slots=True)
class Row:
    """A recorded step."""

    file: str
    place: int  # in the file
    overrides: tuple[str, ...]
    measured: float  # seconds
    load: float | None  # of the busiest rank's experts, where it was recorded

    @property
    def aside(self) -> bool:
        """Whether it was set aside before anything was fitted."""
        if self.file in FITTED_SINCE or self.file in RECORDED_SINCE:
            return self.file not in FITTED_SINCE
        digest = hashlib.sha256(" ".join(sorted(self.overrides)).encode()).digest()
        return bool(digest[0] % 2)

    def is_of(self, gpu: str) -> bool:
        """Whether it was recorded on this GPU."""
        return gpu.lower().startswith(hardware_of(self.file))

    @property
    def name(self) -> str:
        """Its overrides without what all have."""
        return " ".join(self.overrides)


def rows() -> Iterator[Row]:
    """All of bench/results."""
    for name, path in files():
        for place, (overrides, found) in enumerate(recorded(path)):
            run = counted_run(overrides, found, hardware=hardware_of(name))
            if run is not None and place not in NOT_ALONE.get(name, ()):
                seconds, load = _seconds(found, run), _load(found, run)
                yield Row(name, place, tuple(overrides), seconds, load)


def files() -> Iterator[tuple[str, Path]]:
    """Name without .gz, and path, of all files of results."""
    paths = (path for kind in ("*.json", "*.jsonl", "*.jsonl.gz") for path in RESULTS.glob(kind))
    yield from sorted((path.name.removesuffix(".gz"), path) for path in paths)


def write_packed(path: Path, content: object) -> None:
    """Write JSON, packed, equal bytes for equal content."""
    path.write_bytes(gzip.compress(json.dumps(content).encode(), mtime=0))


def hardware_of(file: str) -> str:
    """The option of `hardware` that a file's rows are of."""
    return "h100" if file == OF_H100 else "h200"


def counted_run(overrides: Sequence[str], found: dict[str, Any], *, hardware: str) -> Run | None:
    """The run of a recorded step; None: it is left out."""
    kept = tuple(word for word in overrides if not word.startswith(("train.steps", "hot=")))
    run = planned_run(kept, hardware)
    if run is None or found.get("delay"):
        return None
    return None if run.model.hidden_size < HIDDEN or set(LEFT_OUT) & set(kept) else run


def recorded(path: Path) -> Iterator[tuple[list[str], dict[str, Any]]]:
    """(overrides, what was measured) of every step of a file of results."""
    packed = path.suffix == ".gz"
    text = gzip.decompress(path.read_bytes()).decode() if packed else path.read_text()
    if ".jsonl" in path.suffixes:
        listed = [json.loads(line) for line in text.splitlines()]
        steps = ("step_ms", "tflops_per_gpu")
        yield from ((row["overrides"], row) for row in listed if _has(row, steps))
        return
    content = json.loads(text)
    if not isinstance(content, dict):
        return
    if _has(content, ("step_ms",)):
        yield content["overrides"], content
    for setting in content.get("settings", ()):
        if not isinstance(setting, dict):  # of a benchmark that is no comparison
            continue
        times = [row for row in setting["rounds"] if row.get("step_ms")]
        if setting["who"] == "ours" and times:
            step = statistics.median(row["step_ms"] for row in times)
            found = {"step_ms": step, "alloc_gib": times[0]["alloc_gib"]}
            yield times[0]["details"]["overrides"], found


def _has(row: dict[str, Any], keys: Sequence[str]) -> bool:
    return "overrides" in row and any(key in row for key in keys)


def _seconds(found: dict[str, Any], run: Run) -> float:
    if "step_ms" in found:
        return float(found["step_ms"]) / 1e3
    tokens = run.train.global_batch * run.train.seq_len
    flops = tokens * flops_per_token(run.model, run.train.seq_len)
    return flops / (run.world_size * float(found["tflops_per_gpu"]) * 1e12)


def _load(found: dict[str, Any], run: Run) -> float | None:
    """As it was recorded, unless clones have evened it out since."""
    if run.model.moe is None or run.model.moe.echo.spares:
        return None
    load: float | None = found.get("rank_load")
    return load


def planned_run(overrides: Sequence[str], hardware: str) -> Run | None:
    """The run of a row with a profile; None: not a training step's overrides, or of a removed
    key.
    """
    renamed = [word.replace("=h200_small", "=small") for word in overrides]
    if not any(word.startswith("+experiment=") for word in renamed):
        return None
    if any(removed(word.partition("=")[0]) for word in renamed):
        return None
    typed = [*(word for word in renamed if word != "hardware=h200"), f"hardware={hardware}"]
    values = dict(word.removeprefix("parallel.").split("=", 1) for word in renamed)
    tp, cp, pp, dp, ep = (int(values.get(axis, 1)) for axis in ("tp", "cp", "pp", "dp", "ep"))
    experts = pp * ep * int(values.get("etp", tp))
    if ep > 1 and experts > tp * cp * pp * dp:
        typed.append(f"parallel.world_size={experts}")
    return load_overrides(typed)


def planned(row: Row, given: HardwareProfile | None = None) -> float:
    """Seconds that the plan says; `given`: None: by the profile of its GPU."""
    kept = [word for word in row.overrides if not word.startswith(("train.steps", "hot="))]
    run = planned_run(kept, hardware_of(row.file))
    assert run is not None and run.hardware.profile is not None
    profile = _of_then(row, given or run.hardware.profile)
    plan = Plan(
        dataclasses.replace(run, hardware=dataclasses.replace(run.hardware, profile=profile))
    )
    if row.load is not None:
        times = stage_times(
            plan.run,
            plan.stages.in_order,
            plan.layout,
            profile,
            pipeline=plan.stages.pipeline,
            load=row.load,
        )
        plan.__dict__["stage_times"] = tuple(times)
    return plan.step_seconds


def _of_then(row: Row, profile: HardwareProfile) -> HardwareProfile:
    """What ran when a row was recorded."""
    changed: dict[str, Any] = {}
    if row.file in PLAIN_FILES:
        changed = dict(PLAIN)
    elif row.place in ADDED_ROWS.get(row.file, ()):
        changed = dict(ADDED)
    if row.place not in ONE_UPDATE.get(row.file, ()):
        changed |= UPDATE
    if row.place not in BF16_ROUTERS.get(row.file, ()):
        changed |= FP32_ROUTER
    return dataclasses.replace(profile, **changed)


def errors(found: Sequence[tuple[Row, float]]) -> list[float]:
    """Planned over measured, less 1, without signs, sorted."""
    return sorted(abs(seconds / row.measured - 1) for row, seconds in found)


def order(found: Sequence[tuple[Row, float]]) -> tuple[int, int]:
    """Of all pairs that differ by more than 8 %: in the right order, and how many there are."""
    right = count = 0
    for (one, first), (other, second) in combinations(found, 2):
        ratio = one.measured / other.measured
        if max(ratio, 1 / ratio) > DIFFERS:
            count += 1
            right += (first > second) == (one.measured > other.measured)
    return right, count


def summary(found: Sequence[tuple[Row, float]]) -> dict[str, float]:
    """Figures of one half."""
    wrong = errors(found)
    right, pairs = order(found)
    return {
        "rows": len(found),
        "median_error": round(statistics.median(wrong), 4),
        "p90_error": round(wrong[min(len(wrong) - 1, round(0.9 * (len(wrong) - 1)))], 4),
        "pairs": pairs,
        "pairs_in_order": round(right / pairs, 4),
    }


def main() -> None:
    """Compare, print, save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--half", choices=("fitted", "aside", "all"), default="all")
    parser.add_argument(
        "--profile", type=Path, help="an option of hardware, as calibrate writes it"
    )
    args = parser.parse_args()
    given = None
    if args.profile is not None:
        option, _ = with_new_names(
            yaml.safe_load(args.profile.read_text()), "hardware", saved=False
        )
        given = HardwareProfile(**option["profile"])
    wanted = {"fitted": (False,), "aside": (True,), "all": (False, True)}[args.half]
    compared = (row for row in rows() if given is None or row.is_of(given.gpu))
    found = [(row, planned(row, given)) for row in compared if row.aside in wanted]
    for row, seconds in sorted(found, key=lambda pair: pair[1] / pair[0].measured):
        half = "aside " if row.aside else "fitted"
        print(
            f"{half} {row.measured * 1e3:8.1f} {seconds * 1e3:8.1f} "
            f"{seconds / row.measured - 1:+7.1%}  {row.file}:{row.place} {row.name}"
        )
    halves = {
        name: summary([pair for pair in found if pair[0].aside is side])
        for name, side in (("fitted", False), ("aside", True))
        if side in wanted and any(row.aside is side for row, _ in found)
    }
    print(json.dumps(halves, indent=1))
    if args.half == "all" and given is None:
        save(found, halves)


def save(found: Sequence[tuple[Row, float]], halves: dict[str, dict[str, float]]) -> None:
    """The file and the picture."""
    written = [
        {
            "file": row.file,
            "overrides": row.overrides,
            "half": "aside" if row.aside else "fitted",
            "measured_ms": round(row.measured * 1e3, 2),
            "planned_ms": round(seconds * 1e3, 2),
        }
        for row, seconds in found
    ]
    content = {"halves": halves, "rows": written}
    write_packed(RESULTS / "planned_times.json.gz", content)
    _draw(found)


def _draw(found: Sequence[tuple[Row, float]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    from app.cli.plan_views.pictures import svg_of

    figure, axes = pyplot.subplots(figsize=(6, 5), constrained_layout=True)
    for aside, label, marker in ((False, "fitted", "o"), (True, "set aside", "^")):
        half = [(row.measured, seconds) for row, seconds in found if row.aside is aside]
        axes.scatter(*zip(*half, strict=True), label=label, marker=marker, s=18)
    ends = [0.1, 3.0]
    axes.plot(ends, ends, color="0.6", linewidth=0.8)
    for factor in (0.9, 1.1):
        axes.plot(ends, [factor * end for end in ends], color="0.8", linewidth=0.8, linestyle=":")
    axes.set(xscale="log", yscale="log", xlabel="measured, s", ylabel="planned, s")
    axes.set_title("A step on H200s and H100s, planned and measured;\ndotted: 10 % off")
    shown = [0.1, 0.2, 0.5, 1, 2, 3]
    for set_ticks in (axes.set_xticks, axes.set_yticks):
        set_ticks(shown, [f"{seconds:g}" for seconds in shown])
    axes.legend()
    (ROOT / "docs/planned-times.svg").write_text(svg_of(figure, "planned-times"))


if __name__ == "__main__":
    main()
