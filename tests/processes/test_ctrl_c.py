"""Ctrl-C: a run saves and ends with 130, pressed again it ends at once; before its steps a line."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from app.cli.processes import ctrl_c
from app.cli.processes.launcher import Launch
from app.cli.start import launch
from app.cli.start.launch import mistakes_in_one_line
from app.engine.files import signals
from app.engine.files.attempt import Attempt
from app.engine.files.run_folder import newest_checkpoint
from app.engine.files.signals import StopRequest, ctrl_c_held_back
from app.engine.report.sinks import Console
from app.engine.run.train import train
from app.engine.step.records import StepReport
from app.planner.plan import Plan
from tests.forks import Process
from tests.processes.stop import exit_code, launched
from tests.programs import Forked
from tests.training import ROOT, composed, corpus_in, losses


def test_a_run_saves_and_resumes(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    settings = (
        "train.steps=9",
        "checkpoint.interval=100",
        "log.console=true",
        f"run_dir={tmp_path}/run",
    )
    run = composed((*corpus_in(tmp_path / "corpus"), *settings), 1)

    def work() -> None:
        tell = Console.step

        def step(console: Console, report: StepReport) -> None:
            tell(console, report)
            if report.step == 3:
                os.kill(os.getpid(), signal.SIGINT)

        Console.step = step
        os._exit(train(Plan(run), 0, 0, attempt=Attempt()))

    process = Process(target=work)
    process.start()
    process.join(60)
    saved = tmp_path / "run/checkpoints/step-00000004"
    assert process.exitcode == 130 and newest_checkpoint(tmp_path / "run") == saved
    assert list(losses(tmp_path / "run"))[-1] == 4
    line = f"train.py: stopped by Ctrl-C after step 4, saved {saved}; to continue: python train.py"
    assert capfd.readouterr().err == f"{line} resume={tmp_path}/run\n"


def pressed_twice(apart: float) -> int:
    request = StopRequest()
    with request.listening():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(apart)
        os.kill(os.getpid(), signal.SIGINT)
        return 0


def test_second_ctrl_c_ends_at_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(signals, "PRESS_S", 0.2)
    assert exit_code(lambda: pressed_twice(apart=0.0)) == 0, "one that was passed on"
    assert exit_code(lambda: pressed_twice(apart=0.3)) == 130


def test_whoever_listened_before_is_not_interrupted_afterwards():
    request = StopRequest()
    with request.listening():
        os.kill(os.getpid(), signal.SIGINT)
    request.hand_on()
    assert request.signal is signal.SIGINT


@pytest.mark.full
def test_torchrun_passes_it_on(tmp_path: Path):
    ends = ["0:sleep", "1:sleep"]
    twice_at_once = [signal.SIGINT, signal.SIGINT]
    code, said, began = launched(tmp_path, "--standalone", ends=ends, send=twice_at_once)
    assert (code, said, began) == (130, "", ["began-0-0", "began-1-0"])


def test_second_ctrl_c_ends_ranks_that_ignore_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("app.cli.torchrun.PRESS_S", 0.1)
    twice, options = [signal.SIGINT, signal.SIGINT], ("--standalone", "--max-restarts=2")
    code, said, _ = launched(tmp_path, *options, ends=["0:deaf", "1:deaf"], send=twice)
    assert (code, said) == (130, "")


SLOW = "import pathlib, time; pathlib.Path('importing').touch(); time.sleep(60)"


@pytest.mark.parametrize("program", ["train.py", "app.cli.train", "app.cli.plan", "app.cli.report"])
def test_during_imports_it_costs_a_line(tmp_path: Path, program: str):
    """One of the imports takes long."""
    for module in ("hydra", "omegaconf", "yaml"):
        (tmp_path / f"{module}.py").write_text(SLOW)
    line = [str(ROOT / program)] if program == "train.py" else ["-m", program]
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    process = subprocess.Popen(
        [sys.executable, *line], cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True
    )
    while not (tmp_path / "importing").exists():
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=300)[1]
    name = {"app.cli.plan": "plan", "app.cli.report": "report"}.get(program, "train.py")
    assert (process.returncode, said) == (130, f"\n{name}: stopped\n")


class Composing(Forked):
    """A program that gets Ctrl-C where a library takes the exception for one of its own."""

    def prepare(self) -> None:
        """Have a key looked up in the way of OmegaConf's, which loses what is raised in between."""

        def interrupted(*given: object, **named: object) -> None:
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt:
                raise AttributeError("Key 'train' not in 'Run'") from None

        launch.load_run = interrupted


def test_while_composing_it_costs_a_line(tmp_path: Path):
    with (tmp_path / "said").open("wb") as said:
        line = [sys.executable, str(ROOT / "train.py"), f"run_dir={tmp_path}/run"]
        code = Composing(line, cwd=tmp_path, stdout=said.fileno(), stderr=said.fileno()).wait(60)
    assert (code, (tmp_path / "said").read_text()) == (130, "\ntrain.py: stopped\n")
    assert not (tmp_path / "run").exists()


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("presses", "grace_s", "ends_with"), [(1, 0.2, 130), (1, 60.0, 3), (2, 60.0, 130)]
)
def test_one_that_is_lost_ends_the_start_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    presses: int,
    grace_s: float,
    ends_with: int,
):
    monkeypatch.setattr(ctrl_c, "GRACE_S", grace_s)

    def work() -> int:
        ctrl_c.interrupt_then_end("train.py: stopped")
        for _ in range(presses):
            with suppress(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
                raise AssertionError("is raised")
        time.sleep(1.0)
        return 3

    assert exit_code(work) == ends_with
    assert capfd.readouterr().err == "\ntrain.py: stopped\n" * (ends_with == 130)


def test_held_back_it_comes_at_the_end():
    came: list[str] = []

    @ctrl_c_held_back()
    def work() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        came.append("work is done")

    before = signal.signal(signal.SIGINT, lambda number, frame: came.append("Ctrl-C"))
    try:
        work()
        os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    assert came == ["work is done", "Ctrl-C", "Ctrl-C"]


def test_line_before_the_steps_has_the_whole_command(capsys: pytest.CaptureFixture[str]):
    by_hand = Launch(0, 0, None, command="graphfold-train")
    with pytest.raises(SystemExit), mistakes_in_one_line(by_hand, ["run_dir='a b'", "optim.lr=1"]):
        raise KeyboardInterrupt
    said = "stopped; to continue from the newest checkpoint, or begin without one: "
    command = shlex.join(["graphfold-train", "run_dir='a b'", "optim.lr=1", "resume=auto"])
    assert capsys.readouterr().err == f"\ntrain.py: {said}{command}\n"
