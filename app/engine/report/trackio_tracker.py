"""Trackio run of a training run, in Trackio's own folder (TRACKIO_DIR) or on its server."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from app.engine.files.run_folder import plain
from app.engine.report.trackers import Tracker, in_panels, tags
from app.engine.step.records import RollbackReport
from app.errors import warn
from app.plan.formatting import drawable
from app.planner.plan import Plan
from app.version import VERSION, Version

TRACKIO_ID = "trackio_id"  # file in the run folder with the end of its Trackio run's name
TALKERS = ("trackio", "trackio.run", "trackio.utils")  # modules that print to the console
WARNS = "trackio.utils"  # module through whose `warnings` all of Trackio warns


class Trackio(Tracker):
    """Trackio run that a resumed run continues: Trackio finds it by its name, which is the run
    folder's and its id.
    """

    def __init__(self, plan: Plan, run_dir: Path, version: Version, run_id: str) -> None:
        import trackio  # takes seconds, hence only on use, and beside the first steps

        super().__init__("Trackio", plan)
        # Not by redirecting stdout, which belongs to all threads.
        for name in TALKERS:
            vars(import_module(name))["print"] = _say_nothing
        # Trackio warns of what it cannot write, from its own threads, and raises nothing.
        self._failures: list[str] = []
        self._warned: set[str] = set()
        vars(import_module(WARNS))["warnings"] = SimpleNamespace(warn=self._note)
        log = plan.run.log
        settings = plain(dataclasses.asdict(plan.run))
        self._run = trackio.init(
            project=log.project,
            name=f"{drawable(run_dir.name)}-{run_id}",
            group=log.group,
            config={**settings, VERSION: version.record(), "tags": list(tags(plan))},
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        self._markdown = trackio.Markdown

    def _note(self, message: object, *args: Any, **options: Any) -> None:
        """Take the place of `warnings.warn`."""
        text = " ".join(str(message).split())
        if "failed" in text or "Could not flush" in text:
            self._failures.append(text.partition(". User code")[0])
        elif text not in self._warned:
            self._warned.add(text)
            warn(f"Trackio: {text}")

    def _check(self) -> None:
        if self._failures:
            raise RuntimeError(self._failures[0])

    def record(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values of `step`."""
        self._run.log(dict(values), step=step)
        self._check()

    def record_text(self, step: int, text: str) -> None:
        """Log the text as a code block, since Trackio renders Markdown."""
        code = "\n".join(f"    {line}" for line in text.splitlines())
        self._run.log({"sample": self._markdown(code)}, step=step)
        self._check()

    def go_back(self, report: RollbackReport) -> None:
        """Log the rollback; repeated steps are appended after it."""
        self.record(report.step, in_panels(report))

    def finish(self) -> None:
        """End the run, once everything is written."""
        self._run.finish()
        self._check()

    def give_up(self) -> None:
        """No-op: its threads end with the process."""


def _say_nothing(*args: Any, **options: Any) -> None:
    """Take the place of `print`."""
