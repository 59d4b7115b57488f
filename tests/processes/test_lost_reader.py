"""Output without a reader: runs continue, other programs end quietly."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from app.cli import report
from app.cli.processes.output import ends_with_its_reader
from app.engine.files.attempt import Attempt
from app.engine.files.run_folder import newest_checkpoint
from app.engine.report.lasting import lasting_output
from app.engine.run.train import train
from app.planner.plan import Plan
from tests.integration.report import write_run
from tests.training import composed, corpus_in, losses


def forked(work: Callable[[], object], stdout: int) -> tuple[int, str]:
    """Exit code and stderr of a process with this file behind its stdout."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        os.dup2(stdout, 1)
        os.dup2(write, 2)
        code = 1
        try:
            with (
                open(1, "w", closefd=False) as sys.stdout,
                open(2, "w", closefd=False, buffering=1) as sys.stderr,
            ):
                work()
                code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        except BaseException:
            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(code)
    os.close(write)
    with open(read) as file:
        said = file.read()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), said


def pipe_to_nobody() -> int:
    read, write = os.pipe()
    os.close(read)
    return write


def full_disk() -> int:
    return os.open("/dev/full", os.O_WRONLY)


LOST = {"Broken pipe": pipe_to_nobody, "No space left on device": full_disk}


@pytest.mark.every(2)
@pytest.mark.parametrize("why", LOST)
def test_run_survives_lost_stdout_with_one_notice(why: str, tmp_path: Path):
    settings = ("train.steps=3", "checkpoint.interval=3", "log.console=true", "log.interval=1")
    run = composed((*corpus_in(tmp_path / "corpus"), *settings, f"run_dir={tmp_path}/run"), 1)
    code, said = forked(lambda: sys.exit(train(Plan(run), 0, 0, attempt=Attempt())), LOST[why]())
    expected = f"train.py: stdout cannot be written: {why}; the run continues without it\n"
    assert (code, said) == (0, expected)
    assert list(losses(tmp_path / "run")) == [1, 2, 3] and newest_checkpoint(tmp_path / "run")


def test_lines_of_a_terminal_that_is_there_are_written(capfd: pytest.CaptureFixture[str]):
    with lasting_output():
        print("one")
        print("two", file=sys.stderr)
        assert not sys.stdout.isatty() and sys.stdout.encoding == "utf-8"
    assert capfd.readouterr() == ("one\n", "two\n")


def test_other_programs_end_quietly():
    def work() -> None:
        with ends_with_its_reader():
            print("x" * 100_000)

    assert forked(work, pipe_to_nobody()) == (141, "")


def test_a_report_is_written_before_it_is_shown(tmp_path: Path):
    write_run(tmp_path / "run", loss=1.0)

    def work() -> None:
        with ends_with_its_reader():
            report.main([str(tmp_path)])

    code, said = forked(work, pipe_to_nobody())
    assert code in (1, 141) and said == ""  # 1 is rich's
    assert (tmp_path / "report.txt").read_text()
