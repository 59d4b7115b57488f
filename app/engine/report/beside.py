"""Run an experiment tracker in a thread of its own, beside training.

Weights & Biases takes seconds to import and to start its service, and a slow disk or network may
hold up any of its calls; training waits for neither.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from queue import SimpleQueue

from app.engine.report.at_work import THREAD
from app.engine.report.mlflow_tracker import MLFLOW_ID, MLflow
from app.engine.report.sinks import Sink
from app.engine.report.trackers import WANDB_ID, TensorBoard, Wandb, brief, claim_id
from app.engine.report.trackio_tracker import TRACKIO_ID, Trackio
from app.engine.step.records import RollbackReport, StepReport, ValidationReport
from app.errors import warn, writing
from app.planner.plan import Plan
from app.telling import telling
from app.version import Version

Call = Callable[[Sink], None]
STOPPED_S = 20.0  # seconds that a run stopped by a signal waits for a tracker to finish


class Beside:
    """Sink that is made, called in order and closed by one thread; `close` waits for it.

    It is made once the first step is done, which loading a package would delay. A failure to start
    costs one warning and everything that was to be recorded.
    """

    def __init__(self, name: str, make: Callable[[], Sink]) -> None:
        self.name = name
        self._make = make
        self._calls: SimpleQueue[Call | None] = SimpleQueue()
        self._begun = threading.Event()
        # daemon: a process that ends at once, as by a second Ctrl-C, does not wait
        self._thread = threading.Thread(target=self._work, daemon=True, name=THREAD)
        self._thread.start()

    def _work(self) -> None:
        self._begun.wait()
        try:
            sink = self._make()
        except Exception as error:
            warn(f"{self.name} could not start ({brief(error)}); metrics.jsonl has all metrics")
            return
        while (call := self._calls.get()) is not None:
            call(sink)
        sink.close()

    def step(self, report: StepReport) -> None:
        """Queue the report."""
        self._calls.put(lambda sink: sink.step(report))
        self._begun.set()

    def validation(self, report: ValidationReport) -> None:
        """Queue the report."""
        self._calls.put(lambda sink: sink.validation(report))

    def rollback(self, report: RollbackReport) -> None:
        """Queue the report."""
        self._calls.put(lambda sink: sink.rollback(report))

    def note(self, text: str) -> None:
        """No-op: notes are for the console."""

    def sample(self, step: int, text: str) -> None:
        """Queue the text."""
        self._calls.put(lambda sink: sink.sample(step, text))

    def close(self, within_s: float | None = None) -> None:
        """Wait until everything is recorded and the tracker has finished, or for `within_s` seconds
        with a warning after them; None: without a bound.
        """
        self._calls.put(None)
        self._begun.set()
        self._thread.join(within_s)
        if self._thread.is_alive():
            late = f"has not finished {within_s:g} s after the run was stopped"
            warn(f"{self.name} {late}; metrics.jsonl has all metrics")


@contextmanager
def tracking(
    plan: Plan,
    run_dir: Path,
    from_step: int,
    *,
    version: Version,
    absent: frozenset[str],
    stopped: Callable[[], bool],
) -> Iterator[Sequence[Sink]]:
    """Start the experiment trackers of a run, without those that are `absent`, and wait after the
    block until they have finished; at most STOPPED_S seconds each if the run was `stopped` by a
    signal, whose sender may not wait longer.

    Raises ConfigError if the run folder cannot be written.
    """
    log = plan.run.log
    trackers: list[Beside] = []
    made: tuple[tuple[bool, str, str, type[Wandb | MLflow | Trackio]], ...] = (
        (log.wandb, "Weights & Biases", WANDB_ID, Wandb),
        (log.mlflow, "MLflow", MLFLOW_ID, MLflow),
        (log.trackio, "Trackio", TRACKIO_ID, Trackio),
    )
    for asked, name, id_file, kind in made:
        if asked and name not in absent:
            with writing(run_dir):
                run_id = claim_id(run_dir, id_file, name)
            trackers.append(Beside(name, partial(kind, plan, run_dir, version, run_id)))
    if log.tensorboard:
        trackers.append(Beside("TensorBoard", lambda: TensorBoard(plan, run_dir, from_step)))
    try:
        yield trackers
    finally:
        for each in trackers:
            with telling(f"finishing {each.name}", aloud=log.console):
                each.close(STOPPED_S if stopped() else None)
