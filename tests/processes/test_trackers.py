"""Weights & Biases and TensorBoard: what they are told, and a package that is missing."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from app.cli.run_report.sweep_record import Sweep, left_to_sweep
from app.cli.start import launch
from app.cli.sweeps import jobs
from app.cli.sweeps.combinations import check_host
from app.config import Run
from app.engine.files.run_folder import read_metrics
from app.engine.report.beside import Beside
from app.engine.report.sinks import Sink
from app.engine.report.trackers import (
    NAMES,
    PANELS,
    TENSORBOARD,
    TensorBoard,
    Wandb,
    claim_id,
    in_panels,
    tags,
)
from app.engine.step.records import RollbackReport, StepReport, ValidationReport
from app.errors import ConfigError
from app.planner.plan import Plan
from app.version import Version
from tests.distributed import run_distributed
from tests.training import ROOT, composed, corpus_in, train_rank

METRICS = {
    field.name
    for report in (StepReport, ValidationReport, RollbackReport)
    for field in dataclasses.fields(report)
}


def test_every_metric_has_its_panel():
    known = METRICS - {"step", "by_source", "parts"} | {"epochs"}  # of sources, with their labels
    assert sorted(key for keys in PANELS.values() for key in keys) == sorted(known)
    assert list(PANELS) == ["train", "val", "perf", "memory", "moe", "fp8", "graph"]
    report = ValidationReport(3, 2.5, 64, {"a": 1.5, "b": 3.5}, time=7.0)
    by_source = {"val/loss/a": 1.5, "val/loss/b": 3.5}
    assert in_panels(report) == {"val/loss": 2.5, "val/tokens": 64, "perf/time": 7.0, **by_source}


def test_losses_of_later_tokens_have_names():
    """A metric without a panel would end a tracker's recording."""
    numbers = dict.fromkeys(f.name for f in dataclasses.fields(StepReport))
    found = in_panels(StepReport(**numbers | {"parts": {"mtp_loss": {"1": 2.5}}}))
    assert found["train/mtp_loss/1"] == 2.5


def test_names_in_trackers_do_not_stutter():
    some = {key: NAMES[key] for key in ("loss", "moe_load_worst", "memory_peak_gib", "graph_count")}
    assert list(some.values()) == [
        "train/loss",
        "moe/load_worst",
        "memory/peak_gib",
        "graph/count",
    ]
    assert len(set(NAMES.values())) == len(NAMES)
    panels = [name.split("/") for name in NAMES.values()]
    assert not [name for panel, name in panels if panel in name.split("_")], "twice"


def test_the_panels_are_documented():
    page = (ROOT / "docs/metrics.md").read_text()
    rows = re.findall(r"^\| `(\w+)/` \| (.*) \|$", page, re.MULTILINE)
    found = [f"{panel}/{name}" for panel, names in rows for name in re.findall(r"`(\w+)`", names)]
    assert found == list(NAMES.values())


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), ("layout=dp1", "schedule=none", "graphs=none")),
        (
            ("parallel=dp2", "cuda_graph=full_iteration"),
            ("layout=dp2-edp2", "schedule=none", "graphs=full_iteration"),
        ),
        (
            ("parallel.pp=2", "parallel.dp=2", "parallel.ep=2", "cuda_graph=attn"),
            ("layout=dp2-pp2-ep2", "schedule=1f1b", "graphs=attn"),
        ),
        (("cuda_graph=layer",), ("layout=dp1", "schedule=none", "graphs=layer")),
        (
            ("cuda_graph=partial",),
            ("layout=dp1", "schedule=none", "graphs=attn+mlp+moe_router+moe_preprocess"),
        ),
    ],
)
def test_tags_tell_runs_apart(overrides: tuple[str, ...], expected: tuple[str, ...]):
    found = tags(Plan(composed((*overrides, "train.global_batch=32"), None)))
    assert found == expected and all(len(tag) <= 64 for tag in found), "more than W&B takes"


def test_tags_of_the_largest_layout_are_short_enough():
    overrides = "+experiment=deepseek_v3_2048", "parallel.ep=64", "cuda_graph=partial"
    found = tags(Plan(composed(overrides, None)))
    assert found[0] == "layout=dp32-tp2-cp2-pp16-ep64-edp2" and all(len(tag) <= 64 for tag in found)


# TensorBoard.

Events = dict[str, list[tuple[int, Any]]]  # name -> (step, value)


class Writer:
    """Takes what torch's SummaryWriter takes, and writes it into a file."""

    def __init__(self, folder: Path, purge_step: int, flush_secs: int) -> None:
        folder.mkdir(exist_ok=True)
        self.file = folder / "events.jsonl"
        self._write("purged", purge_step, 0)

    def _write(self, *event: Any) -> None:
        with self.file.open("a") as file:
            file.write(json.dumps(event) + "\n")

    def add_scalar(self, name: str, value: float, step: int) -> None:
        assert isinstance(value, float | int)
        self._write(name, value, step)

    def add_text(self, name: str, text: str, step: int) -> None:
        self._write(f"{name}/text_summary", text, step)

    def close(self) -> None:
        self._write("closed", True, 0)


def written(folder: Path) -> Events:
    found = defaultdict(list)
    for line in (folder / "events.jsonl").read_text().splitlines():
        name, value, step = json.loads(line)
        found[name].append((step, value))
    return found


def read_by_tensorboard(folder: Path) -> Events:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    found = {
        name: [(each.step, each.value) for each in events.Scalars(name)]
        for name in events.Tags()["scalars"]
    }
    for name in events.Tags()["tensors"]:
        texts = (
            (each.step, each.tensor_proto.string_val[0].decode()) for each in events.Tensors(name)
        )
        found[name] = list(texts)
    return found


def stand_in() -> None:
    sys.modules["torch.utils.tensorboard"] = SimpleNamespace(SummaryWriter=Writer)


def recorded_run(rank: int, run: Run, prepare: Callable[[], None]) -> None:
    prepare()
    train_rank(rank, run, {})


def check_run(folder: Path, prepare: Callable[[], None], read: Callable[[Path], Events]) -> Events:
    """Train two steps and resume for two more; check and return the recorded events."""
    corpus = corpus_in(folder / "corpus")
    for steps, resume in ((2, "null"), (4, "auto")):
        settings = (f"train.steps={steps}", f"run_dir={folder}/run", f"resume={resume}",
                    "log.interval=2", "train.sample_tokens=3", "log.tensorboard=true",
                    "checkpoint.interval=1")  # fmt: skip
        run_distributed(recorded_run, 1, composed((*corpus, *settings), 1), prepare)
    events = read(folder / "run" / TENSORBOARD)
    for key, name in NAMES.items():
        rows = [row for row in read_metrics(folder / "run") if key in row]
        at_interval = [row for row in rows if row["step"] % 2 == 0]
        expected = [(row["step"], row[key]) for row in at_interval]
        assert [step for step, _ in events.get(name, [])] == [step for step, _ in expected]
        for (_, found), (_, value) in zip(events.get(name, []), expected, strict=True):
            assert found == pytest.approx(value, rel=1e-6)
    assert len(events["train/loss"]) == 2 and events["val/loss"][0][0] == 0
    samples = events["sample/text_summary"]
    assert [step for step, _ in samples] == [2, 4]
    assert all(line.startswith("    ") for _, text in samples for line in text.split("\n"))
    assert "▶" in samples[0][1]
    return events


@pytest.mark.full
def test_tensorboard_receives_all_metrics(tmp_path: Path):
    events = check_run(tmp_path, stand_in, written)
    assert [value for _, value in events["purged"]] == [0, 3] and len(events["closed"]) == 2


def test_tensorboard_reads_written_events(tmp_path: Path):
    """With the package itself, which the extra `test` brings along."""
    pytest.importorskip("tensorboard")
    check_run(tmp_path, lambda: None, read_by_tensorboard)


@pytest.fixture
def tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TensorBoard:
    monkeypatch.setitem(
        sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Writer)
    )
    return TensorBoard(Plan(composed((), None)), tmp_path, from_step=5)


def test_repeated_steps_are_hidden(tracker: TensorBoard, tmp_path: Path):
    tracker.rollback(RollbackReport(3, rollback_from=6, rollbacks=1))
    tracker.close()
    events = written(tmp_path / TENSORBOARD)
    assert [value for _, value in events["purged"]] == [6, 4] and len(events["closed"]) == 2
    assert events["train/rollback_from"] == [(3, 6)]


def test_training_continues_after_tracker_failure(
    tracker: TensorBoard, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    tracker._writer.file = tmp_path / "gone/events.jsonl"
    for step in (1, 2):
        tracker.validation(ValidationReport(step, 2.5, 64))
    tracker.sample(2, "text")
    tracker.close()
    said = capfd.readouterr().err
    assert said.startswith("train.py: TensorBoard has stopped recording (FileNotFoundError(")
    assert said.count("\n") == 1 and "metrics.jsonl continues" in said


def test_missing_package_refused_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "find_spec", lambda name: None)
    run = composed(("log=tensorboard", "train.device=cpu"), None)
    alone = launch.Launch(0, 0, None)
    said = (
        "^log.tensorboard=true: the package tensorboard is not installed; "
        r"pip install 'graphfold\[tensorboard\]'$"
    )
    with pytest.raises(ConfigError, match=said):
        launch.carry_out(run, alone, "train.py", env={})
    with pytest.raises(ConfigError, match=said):
        check_host(run, ())
    check_host(run, None)  # jobs run elsewhere
    launch.check_packages(composed(("log=wandb",), None))
    assert list(tmp_path.iterdir()) == []


# Beside training, and Weights & Biases.


class Recording:
    """Stands in for the package wandb, and for its run."""

    def __init__(
        self,
        step: int = 0,
        fault: str | None = None,
        logged_in: bool = False,
        mode: str = "online",
    ) -> None:
        self.step, self.fault, self.logged_in, self.mode = step, fault, logged_in, mode
        self.rows: list[tuple[int, dict[str, Any]]] = []
        self.asked: dict[str, Any] = {}
        self.login_calls = 0

    def init(self, **options: Any) -> Recording:
        self.asked = options
        self.dir = str(options["dir"] / "files")
        Path(self.dir).mkdir(exist_ok=True)
        return self

    def setup(self) -> SimpleNamespace:
        return SimpleNamespace(settings=SimpleNamespace(mode=self.mode))

    def login(self, prompt: bool) -> bool:
        self.login_calls += 1
        if self.fault is not None:
            raise RuntimeError(self.fault)
        return self.logged_in

    def log(self, row: dict[str, Any], step: int, commit: bool) -> None:
        assert commit and (not self.rows or step > self.rows[-1][0]), "what W&B drops"
        self.rows.append((step, row))

    def define_metric(self, name: str, step_metric: str) -> None:
        assert (name, step_metric) == ("*", "step")

    def Settings(self, **options: Any) -> None:
        pass

    def Html(self, page: str) -> str:
        return page

    def save(self, *args: Any, **options: Any) -> None:
        pass

    def finish(self) -> None:
        self.rows.append((10**9, {"finished": True}))


def wandb_of(
    folder: Path, recording: Recording, monkeypatch: pytest.MonkeyPatch, *overrides: str
) -> Wandb:
    """Return the tracker of a run whose package wandb is `recording`."""
    monkeypatch.setitem(sys.modules, "wandb", recording)  # type: ignore[arg-type]
    folder.mkdir(exist_ok=True)
    (folder / "plan.json").write_text("{}")
    return Wandb(Plan(composed(overrides, None)), folder, Version.of(), claim_id(folder))


def test_wandb_counter_never_falls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    recording = Recording()
    tracker = wandb_of(tmp_path, recording, monkeypatch)
    tracker.validation(ValidationReport(0, 3.0, 64))
    tracker.record(10, {"train/loss": 2.0})
    tracker.validation(ValidationReport(10, 2.5, 64))
    tracker.rollback(RollbackReport(5, rollback_from=12, rollbacks=1))
    tracker.record(10, {"train/loss": 2.1})
    tracker.record(20, {"train/loss": 1.9})
    tracker.sample(20, "text")
    assert [step for step, _ in recording.rows] == [0, 10, 11, 12, 13, 20, 21]
    assert [row["step"] for _, row in recording.rows] == [0, 10, 10, 5, 10, 20, 20]


def test_resumed_folder_continues_its_wandb_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    first, second, other = Recording(), Recording(step=31), Recording()
    wandb_of(tmp_path / "run", first, monkeypatch)
    resumed = wandb_of(tmp_path / "run", second, monkeypatch)
    wandb_of(tmp_path / "other", other, monkeypatch)
    assert first.asked["id"] == second.asked["id"] != other.asked["id"]
    assert first.asked["resume"] == "allow" and first.asked["mode"] == "offline"
    resumed.record(30, {"train/loss": 2.0})
    assert second.rows[0][0] == 31, "the server's counter goes on"


@pytest.mark.parametrize(
    ("asked", "logged_in", "mode"),
    [("auto", False, "offline"), ("auto", True, None), ("online", True, "online"),
     ("offline", True, "offline")],
)  # fmt: skip
def test_wandb_is_online_where_somebody_is_logged_in(
    asked: str,
    logged_in: bool,
    mode: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    recording = Recording(logged_in=logged_in)
    wandb_of(tmp_path, recording, monkeypatch, f"log.wandb_mode={asked}")
    assert recording.asked["mode"] == mode
    assert recording.login_calls == (asked != "offline")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("fault", "told"), [(None, "nobody is logged in (`wandb login`)"), ("no route", "no route")]
)
def test_wandb_online_without_login_is_offline(
    fault: str | None,
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    recording = Recording(fault=fault)
    wandb_of(tmp_path, recording, monkeypatch, "log.wandb_mode=online")
    assert recording.login_calls == 1 and recording.asked["mode"] == "offline"
    said = f"train.py: log.wandb_mode=online: {told}; recording offline, "
    assert capsys.readouterr().err == f"{said}`wandb sync` uploads it later\n"


@pytest.mark.parametrize(("asked", "mode"), [("auto", None), ("online", "offline")])
def test_wandb_that_is_set_to_offline_asks_for_no_login(
    asked: str,
    mode: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    recording = Recording(logged_in=True, mode="offline")
    wandb_of(tmp_path, recording, monkeypatch, f"log.wandb_mode={asked}")
    assert recording.login_calls == 0 and recording.asked["mode"] == mode
    told = capsys.readouterr().err
    assert ("W&B itself is set to offline (WANDB_MODE" in told) == (asked == "online")


def test_training_does_not_wait_for_a_slow_tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    started = threading.Event()
    recording = Recording()

    def slow() -> Sink:
        assert started.wait(60)
        return wandb_of(tmp_path, recording, monkeypatch)

    tracker = Beside("Weights & Biases", slow)
    for step in (1, 2, 3):  # before it has started
        tracker.validation(ValidationReport(step, 2.5, 64))
    assert not recording.rows
    started.set()
    tracker.sample(3, "text")
    tracker.close()
    assert [row.get("step") for _, row in recording.rows] == [1, 2, 3, 3, None]
    assert recording.rows[-1][1] == {"finished": True}


def test_tracker_is_made_behind_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made, recording = threading.Event(), Recording()

    def make() -> Sink:
        made.set()
        return wandb_of(tmp_path, recording, monkeypatch)

    tracker = Beside("Weights & Biases", make)
    tracker.validation(ValidationReport(0, 2.5, 64))
    assert not made.wait(0.2)
    zeros = dict.fromkeys(("aux_loss", "z_loss", "lr", "weight_decay", "grad_norm"), 0.0)
    tracker.step(StepReport(**zeros, loss=2.0, skipped=0, step=1))
    assert made.wait(60)
    tracker.close()
    assert recording.rows[0][0] == 0 and recording.rows[-1][1] == {"finished": True}


def test_tracker_that_cannot_start_costs_one_warning(capsys: pytest.CaptureFixture[str]):
    def broken() -> Sink:
        raise RuntimeError("no service")

    tracker = Beside("Weights & Biases", broken)
    tracker.validation(ValidationReport(1, 2.5, 64))
    tracker.close()
    said = "train.py: Weights & Biases could not start (RuntimeError('no service')); "
    assert capsys.readouterr().err == f"{said}metrics.jsonl has all metrics\n"


# Sweeps in Weights & Biases.


def test_sweep_sets_log_group_unless_given():
    assert left_to_sweep(OmegaConf.create({"group": None}), "s") == {"group": "s"}
    assert left_to_sweep(composed(("log.group=mine",), None).log, "s") == {}


def test_jobs_of_other_sweepers_are_of_their_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    started: list[list[str]] = []
    monkeypatch.setattr(
        jobs, "run_jobs", lambda script, folder, overrides, **_: started.extend(overrides)
    )
    log = OmegaConf.create({"group": None})
    trials = (["optim.lr=1"], ["sweep.jobs_at_once=2", "optim.lr=2"])  # no key of a job
    jobs.run_trials("train.py", tmp_path / "s", trials, typed=None, fixed=(), log=log)
    assert [line[-2:] for line in started] == [["log.console=false", "log.group='s'"]] * 2
    assert [line[0] for line in started] == ["optim.lr=1", "optim.lr=2"]
    on_record = Sweep.load(tmp_path / "s").jobs
    assert all(
        tuple(line[: len(job.overrides)]) == job.overrides
        for line, job in zip(started, on_record, strict=True)
    )


def test_submitted_jobs_of_other_sweepers_are_of_their_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    hydra = SimpleNamespace(
        sweep=SimpleNamespace(dir=str(tmp_path / "s")), job=SimpleNamespace(num=7)
    )
    monkeypatch.setattr(launch, "_in_sweep", lambda: True)
    monkeypatch.setattr(launch, "HydraConfig", SimpleNamespace(get=lambda: hydra))
    config = OmegaConf.create({"run_dir": None, "log": {"group": None}})
    with_sweep_run_dir = launch.with_sweep_run_dir(config)
    assert with_sweep_run_dir.run_dir == str(tmp_path / "s/7")
    assert with_sweep_run_dir.log == {"group": "s"}
    given = OmegaConf.create({"run_dir": "x", "log": {"group": None}})
    assert launch.with_sweep_run_dir(given).log.group is None, "our sweeper has said all"
