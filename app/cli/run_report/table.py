"""The rows of a report: what every run of a folder has come to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from math import isnan
from pathlib import Path
from typing import Any

from app.cli.run_report.facts import RunFacts, run_facts, settings
from app.cli.sweeps.record import JobState, Sweep
from app.engine.run.run_folder import CONFIG, RUNS
from app.errors import ConfigError, nearest
from app.plan.formatting import count_of, figures

COLUMNS = ("run", "tokens/s", "TFLOP/s", "peak GiB", "loss", "fp8", "overflow", "underflow",
           "state")  # fmt: skip
# columns that are left out where no run has anything in them, and what a legend says of them
OPTIONAL = {
    "fp8": "fp8: recipe of products in FP8.",
    "overflow": "Overflow: matrices in FP8 with clipped entries, the largest share of "
    "inputs, weights or gradients at a log line.",
    "underflow": "Underflow: entries that FP8 have made zero, the largest share of "
    "inputs, weights or gradients at a log line.",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One run, or one that never was."""

    name: str  # of its folder
    label: str  # the overrides that set it apart
    state: JobState
    reason: str | None  # why it was skipped or failed
    seconds: float | None  # wall time of its last start
    facts: RunFacts

    @property
    def order(self) -> tuple[bool, float, str]:
        """Finished runs by loss, then the others by name."""
        loss = self.facts.final_loss
        if self.state is not JobState.done or loss is None or isnan(loss):
            return True, 0.0, self.name
        return False, loss, self.name


@dataclass(frozen=True, slots=True)
class Report:
    """A folder of runs."""

    folder: Path
    title: str
    command: str | None  # that began the sweep
    began: str | None  # when, ISO 8601
    rows: tuple[Row, ...]  # best loss first


def read_report(folder: Path) -> Report:
    """What the folder's runs have come to. Raises ConfigError for a folder without any."""
    sweep = Sweep.load(folder) if folder.is_dir() else None
    rows = _rows_of_sweep(sweep) if sweep else _rows_of_runs(folder)
    if not rows:
        known = [
            str(path)
            for parent in (RUNS, Path("sweeps"))
            for path in (parent, *parent.glob("*"))
            if path.is_dir()
        ]
        rule = "holds no run" if folder.exists() else "does not exist"
        raise ConfigError("folder", folder, rule, guess=nearest(str(folder), known))
    command, began = (sweep.command, sweep.began) if sweep else (None, None)
    return Report(
        folder,
        folder.resolve().name,
        command,
        began=began,
        rows=tuple(sorted(rows, key=lambda row: row.order)),
    )


def _rows_of_sweep(sweep: Sweep) -> list[Row]:
    rows = []
    for job in sweep.jobs:
        facts = run_facts(sweep.folder / job.folder)
        # Jobs that another launcher submitted may end after the sweep's own process has.
        ended = facts.finished and job.exit_code is None
        state, reason = (JobState.done, None) if ended else (job.state, job.reason)
        rows.append(
            Row(job.folder, job.label, state, reason=reason, seconds=job.seconds, facts=facts)
        )
    return rows


def _rows_of_runs(folder: Path) -> list[Row]:
    found = [folder]
    if not (folder / CONFIG).exists():
        found = sorted(path.parent for path in folder.glob(f"*/{CONFIG}"))
    asked = {path: settings(path) for path in found}
    differing = sorted(
        {
            key
            for values in asked.values()
            for key in values
            if len({str(v.get(key)) for v in asked.values()}) > 1
        }
    )
    rows = []
    for path, values in asked.items():
        facts = run_facts(path)
        label = (
            " ".join(f"{key}={_typed(values.get(key))}" for key in differing) or path.resolve().name
        )
        rows.append(
            Row(
                path.name,
                label,
                JobState.done if facts.finished else JobState.unfinished,
                reason=None,
                seconds=None,
                facts=facts,
            )
        )
    return rows


def _typed(value: Any) -> str:
    """A value as one would type it."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case list():
            return f"[{','.join(map(_typed, value))}]"
        case _:
            return str(value)


def heads_and_cells(rows: Sequence[Row]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Names of the columns, those of OPTIONAL only where some run has anything there, and the rows
    of the table under them.
    """
    lines = [cells(row) for row in rows]
    columns = zip(COLUMNS, zip(*lines, strict=True), strict=True)
    kept = [name not in OPTIONAL or any(texts) for name, texts in columns]
    return tuple(compress(COLUMNS, kept)), [tuple(compress(line, kept)) for line in lines]


def cells(row: Row) -> tuple[str, ...]:
    """A row of the table, under COLUMNS."""
    facts = row.facts
    star = "*" if facts.val_loss is None else ""
    loss = "" if facts.final_loss is None else f"{facts.final_loss:.4f}{star}"
    rate = "" if facts.tokens_per_s is None else figures(facts.tokens_per_s)
    if rate and facts.tokens_per_s_planned is not None:
        rate = f"{rate}, planned {figures(facts.tokens_per_s_planned)}"
    measured = (facts.tflops_per_gpu, facts.memory_peak_gib)
    told = "precision.fp8.recipe=" in row.label
    recipe = "" if told or facts.fp8_recipe is None else facts.fp8_recipe
    lost = (facts.fp8_overflow, facts.fp8_underflow)
    return (
        row.label,
        rate,
        *("" if value is None else figures(value) for value in measured),
        loss,
        recipe,
        *("" if share is None else f"{figures(100 * share)} %" for share in lost),
        standing(row),
    )


def standing(row: Row) -> str:
    """The state of a run, how far it came if not to its end, why, and steps taken again."""
    part = ""
    if row.state is not JobState.done and row.facts.steps:
        part = f" at step {row.facts.step}/{row.facts.steps}"
    again = row.facts.reruns
    part += f", {count_of(again, 'step')} taken again" if again else ""
    return f"{row.state.value}{part}" + (f": {row.reason}" if row.reason else "")
