"""MLflow and Trackio: what they are told, and their local stores read back by the packages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from app.cli.start.launch import check_packages
from app.cli.start.tracker_server import absent_trackers, unreachable
from app.config import Run
from app.engine.files.run_folder import read_metrics
from app.engine.report.beside import tracking
from app.engine.report.mlflow_tracker import ID_TAG, MLflow
from app.engine.report.trackers import NAMES, brief, claim_id
from app.engine.report.trackio_tracker import Trackio
from app.engine.step.records import RollbackReport, ValidationReport
from app.errors import ConfigError
from app.planner.plan import Plan
from app.version import Version
from tests.distributed import run_distributed
from tests.ports import free_port
from tests.training import ROOT, composed, corpus_in, train_rank

Points = dict[str, list[tuple[int, float]]]  # name -> (step, value)


# Stand-ins for the packages' public interfaces.


class Store:
    """Stands in for mlflow and its client: runs by id, each with its tags and points."""

    def __init__(self) -> None:
        self.runs: dict[str, dict[str, Any]] = {}
        self.entities = SimpleNamespace(Metric=lambda *values: values, Param=lambda *pair: pair)
        self.uri: str | None = None
        self.experiment = SimpleNamespace(experiment_id="1")

    def is_tracking_uri_set(self) -> bool:
        return False

    def MlflowClient(self, tracking_uri: str, registry_uri: str) -> Store:
        self.uri = tracking_uri
        return self

    def get_experiment_by_name(self, name: str) -> Any:
        return self.experiment if self.runs else None

    def create_experiment(self, name: str, artifact_location: str) -> str:
        return "1"

    def search_runs(self, experiments: list[str], filter_string: str, max_results: int) -> Any:
        return [
            SimpleNamespace(info=SimpleNamespace(run_id=run_id))
            for run_id, run in self.runs.items()
            if filter_string == f"tags.`{ID_TAG}` = '{run['tags'][ID_TAG]}'"
        ]

    def create_run(self, experiment: str, run_name: str, tags: dict[str, str]) -> Any:
        run_id = f"run {len(self.runs)}"
        self.runs[run_id] = {"tags": tags, "points": [], "params": {}, "files": []}
        return SimpleNamespace(info=SimpleNamespace(run_id=run_id))

    def update_run(self, run_id: str, status: str) -> None:
        self.runs[run_id]["status"] = status

    def set_terminated(self, run_id: str) -> None:
        self.runs[run_id]["status"] = "FINISHED"

    def log_batch(self, run_id: str, metrics: Any = (), params: Any = ()) -> None:
        assert len(params) <= 100, "more than a call takes"
        self.runs[run_id]["points"] += [(name, value, step) for name, value, _, step in metrics]
        self.runs[run_id]["params"] |= dict(params)

    def log_artifact(self, run_id: str, path: Path) -> None:
        self.runs[run_id]["files"].append(path.name)

    def log_text(self, run_id: str, text: str, name: str) -> None:
        self.runs[run_id]["files"].append((name, text))


def run_folder(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("plan.json", "config.yaml"):
        (folder / name).write_text("{}")
    return folder


def test_mlflow_continues_the_run_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = Store()
    monkeypatch.setitem(sys.modules, "mlflow", store)  # type: ignore[arg-type]
    for name, loss in (("one", 3.0), ("two", 2.0), ("one", 1.0)):
        folder = run_folder(tmp_path / "runs" / name)
        run_id = claim_id(folder, "mlflow_id", "MLflow")
        plan = Plan(composed(("log.group=sweep",), None))
        tracker = MLflow(plan, folder, Version.of(), run_id)
        tracker.validation(ValidationReport(4, loss, 64))
        tracker.rollback(RollbackReport(2, rollback_from=5, rollbacks=1))
        tracker.sample(4, "text")
        tracker.close()
        assert not tracker._lost
    assert store.uri == f"sqlite:///{tmp_path}/runs/mlflow/mlflow.db"
    found = [[p[1:] for p in run["points"] if p[0] == "val/loss"] for run in store.runs.values()]
    assert found == [[(3.0, 4), (1.0, 4)], [(2.0, 4)]]
    first = store.runs["run 0"]
    assert ("train/rollback_from", 5.0, 2) in first["points"] and first["status"] == "FINISHED"
    assert first["tags"]["group"] == "sweep" and first["tags"]["layout"] == "dp1"
    assert first["params"]["optim.lr"] == str(composed((), None).optim.lr)
    assert ("sample-00000004.txt", "text") in first["files"] and "plan.json" in first["files"]


def test_trackio_run_is_named_by_folder_and_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    asked: list[dict[str, Any]] = []
    rows: list[tuple[int, dict[str, Any]]] = []

    class Recorded:
        def log(self, row: dict[str, Any], step: int) -> None:
            rows.append((step, row))

        def finish(self) -> None:
            rows.append((-1, {}))

    def init(**options: Any) -> Recorded:
        asked.append(options)
        eval("print('* Created new run')", vars(stand_in))
        return Recorded()

    stand_in = ModuleType("trackio")
    vars(stand_in).update(init=init, Markdown=str)
    for name in ("trackio", "trackio.run", "trackio.utils"):
        monkeypatch.setitem(sys.modules, name, stand_in)
    folder = run_folder(tmp_path / "one")
    run_id = claim_id(folder, "trackio_id", "Trackio")
    for _ in range(2):
        tracker = Trackio(Plan(composed((), None)), folder, Version.of(), run_id)
        tracker.validation(ValidationReport(4, 3.0, 64))
        tracker.sample(4, "some\ntext")
        tracker.close()
    names = {options["name"] for options in asked}
    assert names == {f"one-{run_id}"} and asked[0]["resume"] == "allow"
    assert asked[0]["config"]["optim"]["lr"] == composed((), None).optim.lr
    assert rows[0][1]["val/loss"] == 3.0 and rows[1] == (4, {"sample": "    some\n    text"})
    assert rows[2] == (-1, {}) and capsys.readouterr().out == ""


def test_what_trackio_cannot_write_costs_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    stand_in = ModuleType("trackio")

    def say(*texts: str) -> None:
        for text in texts:
            eval("warnings.warn", vars(stand_in))(text, stacklevel=2)

    failed = "trackio failed to flush metric logs for run 'x': No space. User code will continue."
    run = SimpleNamespace(log=lambda row, step: say("odd", "odd"), finish=lambda: say(failed))
    vars(stand_in).update(init=lambda **options: run, Markdown=str)
    for name in ("trackio", "trackio.run", "trackio.utils"):
        monkeypatch.setitem(sys.modules, name, stand_in)
    tracker = Trackio(Plan(composed((), None)), tmp_path / "one", Version.of(), "1")
    tracker.validation(ValidationReport(4, 3.0, 64))
    tracker.close()
    assert capsys.readouterr().err.splitlines() == [
        "train.py: Trackio: odd",
        'train.py: Trackio has stopped recording (RuntimeError("trackio failed to flush metric '
        "logs for run 'x': No space\")); metrics.jsonl continues",
    ]


def test_long_errors_keep_both_ends_on_one_line():
    told = brief(RuntimeError("request" + "\n x" * 500 + " refused"))
    assert told.startswith("RuntimeError('request") and told.endswith("refused')")
    assert len(told) < 170 and "\n" not in told


class Answers(BaseHTTPRequestHandler):
    """Answers every request with the code that its path begins with."""

    def do_GET(self) -> None:
        assert self.path.endswith("/health"), self.path
        self.send_error(int(self.path.split("/")[1]))

    def log_message(self, *args: Any) -> None:
        pass


def test_mlflow_server_is_asked_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("no_proxy", "*")
    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        for code, told in ((200, None), (401, None), (503, "503 Service Unavailable")):
            uri = f"http://user:word@127.0.0.1:{server.server_port}/{code}/"
            assert unreachable(uri, 60) == told
        server.shutdown()
    place = f"127.0.0.1:{server.server_port}"
    env = {"MLFLOW_TRACKING_URI": f"http://user:word@{place}"}
    run = composed(("log=mlflow",), None)
    assert absent_trackers(run, env, 60) == {"MLflow"}
    told = f"(MLFLOW_TRACKING_URI: {place} does not answer: Connection refused)"
    said = f"train.py: MLflow could not start {told}; metrics.jsonl has all metrics\n"
    assert capsys.readouterr().err == said
    assert absent_trackers(run, {**env, "MLFLOW_HTTP_REQUEST_TIMEOUT": "9"}) == frozenset()
    assert absent_trackers(run, {"MLFLOW_TRACKING_URI": "databricks"}) == frozenset()
    assert absent_trackers(composed((), None), env) == frozenset()
    facts = {"version": Version.of(), "absent": frozenset({"MLflow"}), "stopped": bool}
    with tracking(Plan(run), tmp_path, 0, **facts) as trackers:
        assert not trackers and not list(tmp_path.iterdir())


@pytest.mark.full
@pytest.mark.parametrize("dp", [1, 2])
def test_run_without_its_mlflow_server_ends_at_once(dp: int, tmp_path: Path):
    """MLflow itself would try the server for four minutes."""
    pytest.importorskip("mlflow")
    env = {**os.environ, "MLFLOW_TRACKING_URI": f"http://127.0.0.1:{free_port()}"}
    words = ("+experiment=smoke", "log=mlflow", "train.steps=1", f"parallel.dp={dp}")
    line = [sys.executable, str(ROOT / "train.py"), *words, f"run_dir={tmp_path}/run"]
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0 and done.stderr.count("MLflow could not start") == 1, done.stderr
    assert "does not answer: Connection refused" in done.stderr


@pytest.mark.parametrize("name", ["mlflow", "trackio", "tensorboard"])
def test_missing_tracker_names_its_extra(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("app.cli.start.launch.find_spec", lambda name: None)
    said = rf"package {name} is not installed; pip install 'graphfold\[{name}\]'$"
    with pytest.raises(ConfigError, match=said):
        check_packages(composed((f"log={name}",), None))


# The packages themselves.


def recorded_run(rank: int, run: Run, env: dict[str, str]) -> None:
    os.environ.update(env)
    warnings.simplefilter("default")  # MLflow's store uses what SQLAlchemy deprecates
    train_rank(rank, run, {})


def by_mlflow(folder: Path) -> Points:
    import mlflow

    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{folder}/mlflow/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("graphfold").experiment_id])
    assert run.info.status == "FINISHED" and run.data.params["train.steps"] == "2"
    files = [each.path for each in client.list_artifacts(run.info.run_id)]
    assert files == ["config.yaml", "plan.json", "sample-00000002.txt", "sample-00000004.txt"]
    return {
        name: [(p.step, p.value) for p in client.get_metric_history(run.info.run_id, name)]
        for name in run.data.metrics
    }


READ = """
import json, trackio
from trackio.sqlite_storage import SQLiteStorage
(run,) = trackio.Api().runs("graphfold")
assert run.config["model"]["name"] == "moe_tiny", run.config
print(json.dumps(SQLiteStorage.get_logs("graphfold", run.name)))
"""


def by_trackio(folder: Path) -> Points:
    env = {**os.environ, "TRACKIO_DIR": str(folder / "trackio")}
    told = subprocess.run([sys.executable, "-c", READ], env=env, capture_output=True, check=True)
    found: Points = {}
    rows = json.loads(told.stdout)
    samples = [row for row in rows if "sample" in row]
    assert [row["step"] for row in samples] == [2, 4] and "▶" in samples[0]["sample"]["_value"]
    for row in rows:
        for name in row.keys() - {"step", "timestamp", "sample"}:
            found.setdefault(name, []).append((row["step"], row[name]))
    return found


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("name", "read"), [("mlflow", by_mlflow), ("trackio", by_trackio)])
def test_local_store_has_metrics_of_both_starts(
    name: str, read: Callable[[Path], Points], tmp_path: Path
):
    """With the package itself, which the extra of its name brings along."""
    pytest.importorskip(name)
    env = {"TRACKIO_DIR": str(tmp_path / "trackio"), "MLFLOW_DISABLE_TELEMETRY": "true"}
    corpus = corpus_in(tmp_path / "corpus")
    for steps, resume in ((2, "null"), (4, "auto")):
        settings = (f"train.steps={steps}", f"run_dir={tmp_path}/run", f"resume={resume}",
                    "log.interval=2", "train.sample_tokens=3", f"log.{name}=true",
                    "checkpoint.interval=1")  # fmt: skip
        run_distributed(recorded_run, 1, composed((*corpus, *settings), 1), env)
    found = read(tmp_path)
    rows = read_metrics(tmp_path / "run")
    for key, label in NAMES.items():
        expected = [(r["step"], r[key]) for r in rows if key in r and r["step"] % 2 == 0]
        assert found.get(label, []) == expected, label
    assert [step for step, _ in found["train/loss"]] == [2, 4]
