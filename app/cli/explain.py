"""Explain a run's steps beside its plan: `python -m app.cli.plan explain RUN`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from app.cli.options.arguments import Typed
from app.cli.options.compose import load_typed
from app.cli.options.continued import words_for_plain
from app.cli.options.messages import readable_errors
from app.cli.plan_views.explained import print_explained
from app.config import Run
from app.engine.files.checked import fields, map_of, number, text
from app.engine.files.run_folder import (
    CONFIG,
    METRICS,
    PLAN,
    TAKEN,
    read_config,
    read_metrics,
)
from app.engine.files.trace_sums import read_trace
from app.errors import ConfigError
from app.own_files import read_regular
from app.plan.formatting import figures
from app.planner.explain import Explained, Facts, explain, profile_fits
from app.planner.measured import Measurements, TraceSums, settling
from app.planner.plan import Plan
from app.programs import command_name

EXPLAIN = "explain"  # first word of the command line
AGREED = 0.005  # share by which plan.json and a plan of this version may differ unmentioned


def main(arguments: Sequence[str]) -> int:
    """Explain the run of the folder named; return the exit code. Exits with 2 for a mistake."""
    with readable_errors("plan", speak=True):
        words = [word for word in arguments if word != "--json"]
        if len(words) != 1 or words[0].startswith("-"):
            rule = "must be one run folder, and --json if wanted"
            advice = f"for example {command_name('plan')} {EXPLAIN} runs/<name>"
            raise ConfigError("arguments", " ".join(words), rule, advice=advice)
        folder = Path(words[0])
        plan = Plan(saved_run(folder))
        trace = read_trace(folder)
        found = measurements(folder, plan, trace)
        facts, planned_then = read_plan(folder)
        told = explain(plan, found, facts, trace)
        notes = [*plan_notes(plan, facts, planned_then)]
        if "--json" in arguments:
            print(json.dumps(as_json(told, found, notes)))
        else:
            print_explained(told, found, notes, trace=trace, stream=sys.stdout)
    return 0


def saved_run(folder: Path) -> Run:
    """Return the checked run of a folder's config.yaml. Raises ConfigError."""
    try:
        read_config(folder / CONFIG)
    except FileNotFoundError:
        rule = f"is no run folder: it has no {CONFIG}"
        advice = "give the folder that training printed"
        raise ConfigError("run", folder, rule, advice=advice) from None
    named = Typed.parse(["--config-path", str(folder.resolve()), "--config-name", CONFIG])
    # as for a run of its own, but on as many processes
    words = [
        word
        for word in words_for_plain(named, sweeps=False)
        if not word.startswith("parallel.world_size=")
    ]
    return load_typed(Typed(tuple(words), config_path=named.config_path, config_name=CONFIG))


def measurements(folder: Path, plan: Plan, trace: TraceSums | None) -> Measurements:
    """Return the means of a folder's metrics.jsonl. Raises ConfigError."""
    found = Measurements.of(read_metrics(folder), plan.run, trace)
    if found is None:
        rule = f"{METRICS} has no step after the first {settling(plan.run)}, which are not compared"
        raise ConfigError("run", folder, rule, advice="let the run take more steps")
    return found


def read_plan(folder: Path) -> tuple[Facts, float | None]:
    """Return the facts and the planned seconds of a step that plan.json has, if any."""
    try:
        planned = json.loads(read_regular(folder / PLAN))
        seconds = planned["schedule"]["estimate"]["seconds"]
        number(0)("seconds", seconds)
        taken = planned.get(TAKEN) or {}
        fields({}, device=text, slow_paths=map_of(text))(TAKEN, taken)
        return Facts(**taken), seconds
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return Facts(), None  # no plan.json, or one of another version


def plan_notes(plan: Plan, facts: Facts, planned_then: float | None) -> Iterator[str]:
    """Yield what the planned time lacks, a line each."""
    if plan.profile is None:
        where = "a CPU, which plans have no speeds of" if not facts.on_gpu else "this GPU"
        measures = f": {command_name('calibrate')} measures it" if facts.on_gpu else ""
        yield (
            f"planned without measured speeds (hardware.profile), by a GPU's data sheet, and the "
            f"run was on {where}{measures}"
        )
    elif facts.device and not profile_fits(plan.profile, facts.device):
        yield f"planned by speeds of {plan.profile.gpu}, and the run was on {facts.device}"
    if planned_then and abs(plan.step_seconds / planned_then - 1) > AGREED:
        yield (
            f"{PLAN} has {figures(1e3 * planned_then)} ms, as planned by the version that trained"
        )


def as_json(told: Explained, found: Measurements, notes: Sequence[str]) -> dict[str, Any]:
    """Return the explanation as plain values, ms."""
    return {
        "steps": {"first": found.first, "last": found.last, "number": found.steps},
        "planned": told.planned,
        "measured": told.measured,
        "causes": [asdict(cause) for cause in told.causes],
        "notes": list(notes),
    }
