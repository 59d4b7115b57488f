"""Planned memory of a step beside measured: the recorded steps of bench/planned_times.py.

    python bench/planned_memory.py

Bytes that torch had handed out at the peak. Rows from before kernels of ours existed, or with
routers that kept tokens in fp32, are compared with the plan of then, where they recorded it, the
others with that of today. Writes bench/results/planned_memory.json.gz and
docs/planned-memory.svg.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from planned_times import (
    BF16_ROUTERS,
    PLAIN_FILES,
    RESULTS,
    ROOT,
    counted_run,
    files,
    hardware_of,
    recorded,
    write_packed,
)

from app.plan.formatting import GIB
from app.planner.plan import Plan

MEASURED = ("peak_gib", "alloc_gib", "memory_peak_gib")  # keys of files of results
TODAY, THEN = "today", "then"


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """A recorded step."""

    file: str
    overrides: tuple[str, ...]
    plan: str  # TODAY, or THEN: as the row recorded it
    measured_gib: float
    planned_gib: float

    @property
    def error(self) -> float:
        """Planned over measured, less 1."""
        return self.planned_gib / self.measured_gib - 1


def rows() -> Iterator[MemoryRow]:
    """All of bench/results that measured memory and whose plan is known."""
    for name, path in files():
        for place, (overrides, found) in enumerate(recorded(path)):
            measured = next((found[key] for key in MEASURED if found.get(key)), None)
            run = counted_run(overrides, found, hardware=hardware_of(name))
            if measured is None or run is None:
                continue
            fp32_routers = run.model.moe and place not in BF16_ROUTERS.get(name, ())
            if name not in PLAIN_FILES and not fp32_routers:
                ranks = [rank.allocated for rank in Plan(run).memory]
                # traced steps are those of the first rank
                planned = ranks[0] if "kinds_ms" in found else max(ranks)
                yield _row(name, overrides, TODAY, measured, planned / GIB)
            elif "planned_gib" in found:
                yield _row(name, overrides, THEN, measured, found["planned_gib"])


def _row(
    file: str, overrides: Sequence[str], plan: str, measured: float, planned: float
) -> MemoryRow:
    sizes = round(measured, 3), round(planned, 3)
    return MemoryRow(file, tuple(overrides), plan, *sizes)


def summary(found: Sequence[MemoryRow]) -> dict[str, float]:
    """Figures of the rows of one plan."""
    wrong = sorted(abs(row.error) for row in found)
    return {
        "rows": len(found),
        "median_error": round(statistics.median(wrong), 4),
        "p90_error": round(wrong[round(0.9 * (len(wrong) - 1))], 4),
        "worst_error": round(wrong[-1], 4),
    }


def main() -> None:
    """Compare, print, save."""
    found = list(rows())
    for row in sorted(found, key=lambda row: row.error):
        sizes = f"{row.measured_gib:8.2f} {row.planned_gib:8.2f} {row.error:+7.2%}"
        print(f"{row.plan:5} {sizes}  {row.file} {' '.join(row.overrides)}")
    plans = {plan: [row for row in found if row.plan == plan] for plan in (TODAY, THEN)}
    figures = {plan: summary(listed) for plan, listed in plans.items()}
    print(json.dumps(figures, indent=1))
    content: dict[str, Any] = {"plans": figures, "rows": [asdict(row) for row in found]}
    write_packed(RESULTS / "planned_memory.json.gz", content)
    _draw(plans)


def _draw(plans: dict[str, list[MemoryRow]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    from app.cli.plan_views.pictures import svg_of

    figure, axes = pyplot.subplots(figsize=(6, 4), constrained_layout=True)
    for (plan, listed), marker in zip(plans.items(), ("o", "^"), strict=True):
        pairs = [(row.measured_gib, 100 * row.error) for row in listed]
        axes.scatter(*zip(*pairs, strict=True), label=f"plan of {plan}", marker=marker, s=18)
    axes.axhline(0, color="0.6", linewidth=0.8)
    axes.set(xscale="log", xlabel="measured, GiB", ylabel="planned over measured, less 1, %")
    axes.set_xticks([5, 10, 20, 50, 100], ["5", "10", "20", "50", "100"])
    axes.set_title("Memory at the peak of a step on H200s and H100s")
    axes.legend()
    (ROOT / "docs/planned-memory.svg").write_text(svg_of(figure, "planned-memory"))


if __name__ == "__main__":
    main()
