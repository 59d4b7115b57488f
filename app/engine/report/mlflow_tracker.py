"""MLflow run of a training run: metrics by step, configuration as parameters, files and texts.

Without MLFLOW_TRACKING_URI everything is local, in one store for all runs beside the run folder:

runs/mlflow/mlflow.db       runs, parameters and metrics (SQLite)
runs/mlflow/artifacts/…     plan.json, config.yaml and samples of each run
"""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from app.engine.files.run_folder import CONFIG, PLAN, plain
from app.engine.report.trackers import Tracker, in_panels, tags
from app.engine.step.records import RollbackReport
from app.plan.formatting import drawable
from app.planner.plan import Plan
from app.version import Version

MLFLOW_ID = "mlflow_id"  # file in the run folder with the id of its MLflow run
ID_TAG = "graphfold.id"  # tag of an MLflow run with that id: MLflow chooses its own run ids
STORE, DATABASE, ARTIFACTS = "mlflow", "mlflow.db", "artifacts"  # beside the run folder
BATCH = 100  # most parameters of one call
VALUE = 6000  # most characters of a parameter


class MLflow(Tracker):
    """MLflow run that a resumed run continues, found by the id recorded in the run folder."""

    def __init__(self, plan: Plan, run_dir: Path, version: Version, run_id: str) -> None:
        import mlflow  # takes seconds, hence only on use, and beside the first steps

        super().__init__("MLflow", plan)
        logging.getLogger("mlflow").setLevel(logging.WARNING)  # it announces a new database
        self._entities = mlflow.entities
        log = plan.run.log
        store = run_dir.resolve().parent / STORE
        if mlflow.is_tracking_uri_set():
            self._client = mlflow.MlflowClient()
        else:
            store.mkdir(exist_ok=True)
            uri = f"sqlite:///{store / DATABASE}"
            self._client = mlflow.MlflowClient(tracking_uri=uri, registry_uri=uri)
        local = None if mlflow.is_tracking_uri_set() else (store / ARTIFACTS).as_uri()
        experiment = self._experiment(log.project, local)
        self._run = self._found(experiment, run_id)
        if self._run is None:
            known = {ID_TAG: run_id, "mlflow.source.git.commit": version.commit or ""}
            of_run = dict(tag.split("=", 1) for tag in tags(plan))
            group = {"group": log.group} if log.group else {}
            made = self._client.create_run(
                experiment, run_name=drawable(run_dir.name), tags={**known, **of_run, **group}
            )
            self._run = made.info.run_id
            self._log_parameters(plain(dataclasses.asdict(plan.run)))
        self._client.update_run(self._run, status="RUNNING")
        for name in (PLAN, CONFIG):  # a resumed run may have other settings; parameters are fixed
            self._client.log_artifact(self._run, run_dir / name)

    def _experiment(self, name: str, artifacts: str | None) -> str:
        """Return the id of the experiment; another run may make it at the same time."""
        found = self._client.get_experiment_by_name(name)
        if found is None:
            try:
                return str(self._client.create_experiment(name, artifact_location=artifacts))
            except Exception:
                found = self._client.get_experiment_by_name(name)
                if found is None:
                    raise
        return str(found.experiment_id)

    def _found(self, experiment: str, run_id: str) -> str | None:
        asked = f"tags.`{ID_TAG}` = '{run_id}'"
        runs = self._client.search_runs([experiment], filter_string=asked, max_results=1)
        return str(runs[0].info.run_id) if runs else None

    def _log_parameters(self, settings: Mapping[str, Any]) -> None:
        found = [self._entities.Param(key, text[:VALUE]) for key, text in _texts(settings)]
        for first in range(0, len(found), BATCH):
            self._client.log_batch(self._run, params=found[first : first + BATCH])

    def record(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values of `step` in one call."""
        now = int(time.time() * 1e3)
        metrics = [
            self._entities.Metric(name, float(value), now, step) for name, value in values.items()
        ]
        self._client.log_batch(self._run, metrics=metrics)

    def record_text(self, step: int, text: str) -> None:
        """Log the text as a file of its own."""
        self._client.log_text(self._run, text, f"sample-{step:08}.txt")

    def go_back(self, report: RollbackReport) -> None:
        """Log the rollback; repeated steps are appended with their later times."""
        self.record(report.step, in_panels(report))

    def finish(self) -> None:
        """End the run."""
        self._client.set_terminated(self._run)

    def give_up(self) -> None:
        """No-op: nothing of it keeps running."""


def _texts(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield nested settings as (dotted key, text)."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _texts(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value if isinstance(value, str) else json.dumps(value)
