"""Rows of a report: the result of every run of a folder."""

from __future__ import annotations

from dataclasses import dataclass
from math import isnan
from pathlib import Path

from app.cli.run_report.facts import RunFacts, run_facts, settings
from app.cli.run_report.sweep_record import RECORD, JobState, Sweep
from app.engine.files.run_folder import CONFIG, RUNS
from app.errors import ConfigError, nearest, typed
from app.plan.formatting import count_of, figures
from app.programs import command_name

MOST_KEYS = 5  # by which runs are told apart; of less alike ones the folder's name is shorter
COLUMNS = ("run", "tokens/s", "TFLOP/s", "peak GiB", "loss", "state")


@dataclass(frozen=True, slots=True)
class Row:
    """One run, or a job that never ran."""

    name: str  # name of its folder
    label: str  # the overrides that distinguish it
    state: JobState
    reason: str | None  # why it was skipped or failed
    seconds: float | None  # wall time of its last start
    facts: RunFacts

    @property
    def order(self) -> tuple[bool, float, str]:
        """Return the sort key: finished runs by loss, then the others by name."""
        loss = self.facts.final_loss
        if self.state is not JobState.done or loss is None or isnan(loss):
            return True, 0.0, self.name
        return False, loss, self.name


@dataclass(frozen=True, slots=True)
class Report:
    """Results of a folder of runs."""

    folder: Path
    title: str
    command: str | None  # command that began the sweep
    began: str | None  # when it began, ISO 8601
    rows: tuple[Row, ...]  # best loss first


def read_report(folder: Path) -> Report:
    """Read the results of the folder's runs. Raises ConfigError for a folder without any."""
    sweep = Sweep.load(folder) if folder.is_dir() else None
    rows = _rows_of_sweep(sweep) if sweep else _rows_of_runs(folder)
    if not rows:
        known = [
            str(path)
            for parent in (RUNS, Path("sweeps"))
            for path in (parent, *sorted(parent.glob("*")))
            if _reports(path)
        ]
        rule = "contains no run" if folder.exists() else "does not exist"
        guess = nearest(str(folder), known)
        instead = (
            f"for example {known[0]}" if known else f"{command_name('train')} makes one in {RUNS}"
        )
        advice = None if guess else f"name the folder of a run, of runs or of a sweep: {instead}"
        raise ConfigError("folder", folder, rule, guess=guess, advice=advice)
    command, began = (sweep.command, sweep.began) if sweep else (None, None)
    return Report(
        folder,
        folder.resolve().name,
        command,
        began=began,
        rows=tuple(sorted(rows, key=lambda row: row.order)),
    )


def _reports(folder: Path) -> bool:
    """Return whether a folder has a run, runs or a sweep."""
    return any(folder.glob(CONFIG)) or any(folder.glob(RECORD)) or any(folder.glob(f"*/{CONFIG}"))


def _rows_of_sweep(sweep: Sweep) -> list[Row]:
    rows = []
    for job in sweep.jobs:
        facts = run_facts(sweep.folder / job.folder)
        # the sweep's own process may end before its SLURM jobs, and then records no result of them
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
        label = path.resolve().name
        if 0 < len(differing) <= MOST_KEYS:
            label = " ".join(f"{key}={typed(values.get(key))}" for key in differing)
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


def cells(row: Row) -> tuple[str, ...]:
    """Return a row of the table, one cell per entry of COLUMNS."""
    facts = row.facts
    rate = "" if facts.tokens_per_s is None else figures(facts.tokens_per_s)
    if rate and facts.tokens_per_s_planned is not None:
        rate = f"{rate}, planned {figures(facts.tokens_per_s_planned)}"
    measured = (facts.tflops_per_gpu, facts.memory_peak_gib)
    return (
        row.label,
        rate,
        *("" if value is None else figures(value) for value in measured),
        loss_text(facts),
        standing(row),
    )


def loss_text(facts: RunFacts) -> str:
    """Return the last validation loss, or with * that of the last step; empty without any."""
    star = "*" if facts.val_loss is None else ""
    return "" if facts.final_loss is None else f"{facts.final_loss:.4f}{star}"


def standing(row: Row) -> str:
    """Return a run's state, the step reached if it is not done, the reason, and steps rerun."""
    part = ""
    if row.state is not JobState.done and row.facts.steps:
        part = f" at step {row.facts.step}/{row.facts.steps}"
    again = row.facts.reruns
    part += f", {count_of(again, 'step')} rerun" if again else ""
    return f"{row.state.value}{part}" + (f": {row.reason}" if row.reason else "")
