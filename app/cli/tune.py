"""Find the fastest layout of a run by plans and measurements: `python -m app.cli.tune`.

Exit codes: 0; 1 if nothing fits; 2 for a mistake of the user, reported in one line; 130 after
Ctrl-C, from which the same command continues.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from app.cli.processes.ctrl_c import interrupt_again, stop_quietly

if __name__ == "__main__":
    stop_quietly("tune")  # before the imports, which take a second

from rich.console import Console
from rich.text import Text

from app.advice.combinations import MOST, PlannedCombination, front, plan_combinations
from app.advice.trials import Trials
from app.choices import Device
from app.cli.options.advice import Asked
from app.cli.options.arguments import PLACES, Typed, without_places
from app.cli.options.compose import load_typed
from app.cli.options.messages import readable_errors
from app.cli.options.unknown import no_such_flag
from app.cli.plan_views.rows import heading, new_table
from app.cli.processes.output import exit_by, table_width
from app.cli.start.launch import CPU_RANKS_PER_CORE, gpus_here
from app.cli.tuning.choose import next_combinations
from app.cli.tuning.measuring import Bench
from app.cli.tuning.records import RECORD, Measurement, State
from app.cli.tuning.written import EXPERIMENT, experiment_text
from app.config import Run
from app.errors import ConfigError, say
from app.own_files import write_whole
from app.plan.formatting import count_of, figures, gib
from app.plan.parts.fp8 import RECIPES
from app.planner.attention import planned_attention, with_attention
from app.planner.plan import Plan
from app.programs import command_name, with_names
from app.shell import shell_line
from app.telling import telling
from app.version import Version

OWN = ("budget=", "out=", "name=", "fp8=")
FLAGS = ("--help", "-h")
UNITS = {"s": 1, "m": 60, "h": 3600}
BUDGET = "10m"
TOGETHER = 4  # combinations measured by one start of the ranks
ROWS = 10  # of a table
INTERRUPTED = 130
HELP = """\
== Graphfold: find the fastest layout by plans and measurements ==
Usage:  python -m app.cli.tune [budget=10m] [out=FOLDER] [name=NAME] [fp8=yes] [override …]

  budget=TIME   time for measurements: 90s, 10m, 2h; 0: plan only
  out=FOLDER    folder for measured.jsonl, the picture front.png and the experiment; default:
                tune/<model>-<digest of the overrides>, so that the same command continues
  name=NAME     name of the experiment; default: tuned
  fp8=yes       FP8 recipes may be chosen too; without it the run's own precision stays
  override      any override of train.py, such as +experiment=… and parallel.world_size=…
  --config-dir FOLDER  options of your own beside conf/; --config-path and --config-name as in Hydra

Plans up to 1,000 combinations of layout, schedule, microbatch, recomputation, graphs and
dispatcher, measures those that may be fastest, and writes the fastest as an experiment.

Exit code: 0; 1 if nothing fits; 2 for a mistake; 130 after Ctrl-C: the same command continues.
How it searches: docs/planning.md"""


@dataclass(frozen=True, slots=True)
class TuneRequest:
    """The command line."""

    typed: Typed  # overrides and flags that describe the run
    budget_s: float
    name: str  # of the experiment
    fp8: bool  # FP8 recipes may be chosen
    out: Path | None  # None: a folder named by the overrides

    def folder(self, run: Run) -> Path:
        """Return the folder of the search."""
        if self.out is not None:
            return self.out
        words = "\n".join(sorted([*self.typed.words, f"fp8={self.fp8}"]))
        digest = hashlib.sha256(words.encode()).hexdigest()[:8]
        return Path("tune") / f"{run.model.name}-{digest}"


def parse(arguments: Sequence[str]) -> TuneRequest:
    """Separate this command's own options from overrides. Raises ConfigError."""
    if error := no_such_flag(arguments, (*FLAGS, *PLACES)):
        raise error
    words, places = without_places(arguments)
    own = dict(word.split("=", 1) for word in words if word.startswith(OWN))
    overrides = [word for word in words if not word.startswith(OWN)]
    name = own.get("name", "tuned")
    if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
        rule = "must consist of letters, digits, _ and -, to be typed as +experiment=NAME"
        raise ConfigError("name", name, rule, nearest="tuned")
    if (fp8 := own.get("fp8", "no")) not in ("yes", "no"):
        raise ConfigError("fp8", fp8, "must be yes or no", nearest="yes")
    budget = _seconds(own.get("budget", BUDGET))
    out = Path(own["out"]) if own.get("out") else None
    return TuneRequest(Typed.parse([*places, *overrides]), budget, name, fp8 == "yes", out)


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)
    if not found or not (found[2] or float(found[1]) == 0):
        raise ConfigError("budget", text, "must be a time like 90s, 10m or 2h", nearest=BUDGET)
    return float(found[1]) * UNITS[found[2] or "s"]


def main(arguments: Sequence[str]) -> int:
    """Plan, measure, write; return the exit code."""
    if {"--help", "-h"} & set(arguments):
        print(with_names(HELP))
        return 0
    with readable_errors("tune", speak=True, asked=lambda: _asked(arguments)):
        asked = parse(arguments)
        run = planned_attention(load_typed(asked.typed))
        folder = asked.folder(run)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError("out", folder, f"cannot be used: {error.strerror}") from error
        interrupt_again()
        try:
            return Search(asked, run, folder).work()
        except KeyboardInterrupt:
            say(f"stopped; to continue: {_command(arguments)}", sys.stderr)
            return INTERRUPTED


def _asked(arguments: Sequence[str]) -> Asked:
    return Asked(parse(arguments).typed, load_typed)


def _command(arguments: Sequence[str]) -> str:
    return f"{command_name('tune')} {shell_line(arguments)}"


class Search:
    """A search: planned combinations, and those measured so far."""

    def __init__(self, asked: TuneRequest, run: Run, folder: Path) -> None:
        self.asked, self.run, self.folder = asked, run, folder
        self.trials = Trials(Plan(run).gpu_memory)
        self.console = Console(width=table_width(sys.stdout, 140), markup=False, highlight=False)
        self.found: dict[str, Measurement] = {}
        self.combinations: list[PlannedCombination] = []

    @property
    def times(self) -> dict[str, float]:
        """Measurement milliseconds of a step, by key."""
        return {key: each.step_ms for key, each in self.found.items() if each.step_ms is not None}

    def work(self) -> int:
        """Plan, measure, write; return the exit code."""
        recipes = tuple(RECIPES) if self.asked.fp8 else ()
        with telling("planning combinations", self._planned, stream=sys.stderr):
            self.combinations = plan_combinations(self.run, self.trials, recipes)
        if not any(each.fits for each in self.combinations):
            print("No combination fits these GPUs: use more GPUs, or GPUs with more memory.")
            return 1
        self._show_front()
        self._measure()
        self._write()
        return 0

    def _planned(self) -> str:
        return f"{self.trials.timed} planned"

    def _measure(self) -> None:
        """Measure what may be fastest, until nothing is likely to be faster or time is over."""
        where = "GPU" if gpus_here(self.run) else "CPU"
        head = (*sorted(self.asked.typed.words), where, Version.of().short)
        record = self.folder / RECORD
        bench = Bench(self.asked.typed, self.run.world_size, self.folder, record=record, head=head)
        lacks = self._lacks()
        if self.asked.budget_s == 0 or lacks:
            print(f"nothing is measured: {lacks or 'budget=0'}")
            if record.exists():
                try:
                    self._take_over(bench)
                except ConfigError as error:  # those of another host, or of another version
                    print(f"{record} is not taken over: {error.rule}")
            return
        self._take_over(bench)
        end = time.monotonic() + self.asked.budget_s
        while (left := end - time.monotonic()) > 0:
            following = self._next()
            if not following:
                print("no other combination is likely to be faster")
                return
            bench.measure(following, self._tell, most_s=max(left, 60.0))
        print("the time for measurements is over")

    def _take_over(self, bench: Bench) -> None:
        """Take what was measured before. Raises ConfigError."""
        self.found = bench.measured()
        if self.found:
            print(f"taken over: {count_of(len(self.found), 'measurement')} of {bench.record}")

    def _next(self) -> list[PlannedCombination]:
        """Return the next combinations: the typed run is the first of all."""
        own = self.combinations[0]
        first = [own] if own.fits and own.key not in self.found else []
        failed = [key for key, each in self.found.items() if each.step_ms is None]
        others = next_combinations(
            self.combinations[1:] if first else self.combinations,
            self.times,
            failed,
            count=TOGETHER - len(first),
        )
        return [*first, *others]

    def _lacks(self) -> str | None:
        """Return why this host cannot measure the run; None if it can."""
        world, gpus = self.run.world_size, gpus_here(self.run)
        if gpus >= world:
            return None
        most = CPU_RANKS_PER_CORE * (os.cpu_count() or 1)
        if not gpus and world <= most and self.run.train.device is not Device.cuda:
            return None
        return f"this host has {gpus} GPUs, and the run needs {world}"

    def _tell(self, found: Measurement) -> None:
        self.found[found.key] = found
        if found.state is State.measured:
            text = f"{found.step_ms:,.1f} ms"
            if found.peak_gib is not None:
                text += f", {found.peak_gib:.2f} GiB"
        else:
            text = f"{found.state.value}: {found.reason}"
        say(f"[{len(self.found)}] {found.key}  {text}", sys.stdout)

    def _show_front(self) -> None:
        fitting = sum(each.fits for each in self.combinations)
        most = " (the most that are planned)" if len(self.combinations) >= MOST else ""
        remark = f"{len(self.combinations)} combinations{most}, {fitting} fit; those that no other"
        heading(self.console, "Front", f"{remark} beats in both time and memory")
        table = new_table(">ms", ">GiB", "overrides")
        for each in front(self.combinations)[:ROWS]:
            table.add_row(figures(each.seconds * 1e3), gib(each.memory), Text(each.key))
        self.console.print(table)
        if self.run.hardware.profile is None:
            told = "Times are planned by a GPU's data sheet (hardware.profile is null)"
            print(f"{told}: they rank combinations on such a GPU, not on this host.")

    def _write(self) -> None:
        """Write picture and experiment, and print the fastest. Raises ConfigError."""
        from app.cli.tuning.picture import save_front  # matplotlib is slow to load

        times = self.times
        fitting = [each for each in self.combinations if each.fits]
        timed = sorted((e for e in fitting if e.key in times), key=lambda e: times[e.key])
        ranked = timed or sorted(fitting, key=lambda each: each.seconds)
        best, own = ranked[0], self.combinations[0]
        self._show(ranked)
        how = f"measured {times[best.key]:,.1f} ms per step" if timed else "not measured"
        about = [f"{how}, planned {figures(best.seconds * 1e3)} ms and {gib(best.memory)} GiB."]
        if own is best and timed:
            about.append(f"The run as typed is the fastest of {len(timed)} measured ones.")
        elif own.key in times:
            gain = times[own.key] / times[best.key]
            about.append(f"The run as typed takes {gain:.2f} times as long.")
        about.append(f"Written by {command_name('tune')} {shell_line(self.asked.typed.words)}")
        text = experiment_text(best, self.combinations, times, typed=self.asked.typed, about=about)
        place = Path(self.asked.typed.config_dir or self.folder)
        path = place / EXPERIMENT / f"{self.asked.name}.yaml"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, text)
            pictures = save_front(self.combinations, times, self.trials.limit, self.folder)
        except OSError as error:
            raise ConfigError("out", self.folder, f"cannot be written: {error.strerror}") from error
        words = ["--config-dir", str(place), f"+experiment={self.asked.name}"]
        self._check(Typed.parse(words), best)
        print(f"written: {', '.join(map(str, [path, *pictures]))}")
        print(f"train: {command_name('train')} {shell_line(words)}")

    def _check(self, typed: Typed, best: PlannedCombination) -> None:
        """Raise ConfigError unless the written experiment is the combination."""
        written = planned_attention(load_typed(typed))
        if with_attention(written, best.run.train.attention_backend) != best.run:
            rule = "does not give the chosen run"
            advice = f"type its overrides: {' '.join(best.overrides)}"
            raise ConfigError("name", self.asked.name, rule, advice=advice)

    def _show(self, ranked: Sequence[PlannedCombination]) -> None:
        heading(self.console, "Fastest", "measured" if self.times else "planned")
        table = new_table(">measured ms", ">planned ms", ">planned GiB", "overrides")
        for each in ranked[:ROWS]:
            time_ms = self.times.get(each.key)
            shown = "" if time_ms is None else figures(time_ms)
            planned = figures(each.seconds * 1e3)
            table.add_row(shown, planned, gib(each.memory), Text(each.key))
        self.console.print(table)


if __name__ == "__main__":
    exit_by(main)
