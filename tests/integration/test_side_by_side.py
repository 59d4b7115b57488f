"""Jobs of a sweep side by side on one host: their places, ends and lines, and Ctrl-C."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hydra.core.utils import JobStatus

from app.cli.options.arguments import Typed
from app.cli.processes.environment import JOBS_AT_ONCE, share_of_threads, threads_of
from app.cli.run_report.sweep_record import Job, Sweep
from app.cli.sweeps import jobs
from app.cli.sweeps.job_lines import JobLines
from app.cli.sweeps.jobs import run_jobs, wait_for_any
from app.cli.sweeps.places import ALONE, VISIBLE, check_share, places
from app.config import SweepConfig
from app.errors import ConfigError
from tests.config import load
from tests.programs import run_forked
from tests.training import wait_for

ROOT = Path(__file__).parent.parent.parent
WAIT_S = 60
# A job that says which GPUs it has, waits until the file go is there, and ends as it is told.
STAND_IN = f"""
import os, pathlib, signal, sys, time
folder, number, how = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3]
signal.signal(signal.SIGTERM, signal.SIG_IGN if how == "deaf" else lambda *_: sys.exit(75))
gpus = os.environ["{VISIBLE}"], os.environ["{JOBS_AT_ONCE}"]
print("job", number, flush=True)
(folder / f"began.{{number}}.part").write_text(" ".join(gpus))
(folder / f"began.{{number}}.part").rename(folder / f"began.{{number}}")
deadline = time.monotonic() + {WAIT_S}
while not (folder / "go").exists() and time.monotonic() < deadline:
    time.sleep(0.005)
if how == "fails":
    raise ValueError("boom")
sys.exit(0 if (folder / "go").exists() else 3)
"""


def recorded(folder: Path, *how: str) -> list[list[str]]:
    """Record a sweep of stand-ins for runs; return their arguments."""
    (folder / "job.py").write_text(STAND_IN)
    arguments = [[str(folder), str(n), each] for n, each in enumerate(how)]
    found = tuple(
        Job(n, f"{n}", tuple(each), swept=(f"x={n}",)) for n, each in enumerate(arguments)
    )
    Sweep(folder, "", "", jobs=found).save()
    return arguments


def run(folder: Path, arguments: Sequence[Sequence[str]], gpus: Sequence[str]) -> list[Any]:
    at = [{VISIBLE: each, JOBS_AT_ONCE: str(len(gpus))} for each in gpus]
    return run_jobs(str(folder / "job.py"), folder, arguments, typed=Typed(), places=at)


def began(folder: Path) -> dict[int, str]:
    """Numbers of the jobs that have begun, with their GPUs and the number of jobs at once."""
    return {int(file.suffix[1:]): file.read_text() for file in folder.glob("began.[0-9]")}


def states(folder: Path) -> list[str]:
    return [job["state"] for job in json.loads((folder / "sweep.json").read_text())["jobs"]]


def when(
    condition: Callable[[], object], act: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Act in the place of the first wait for jobs, once a condition holds."""

    def acting(processes: Sequence[subprocess.Popen[bytes]], seconds: float | None) -> None:
        monkeypatch.setattr(jobs, "wait_for_any", wait_for_any)
        wait_for(condition)
        act()

    monkeypatch.setattr(jobs, "wait_for_any", acting)


def test_jobs_run_side_by_side_on_gpus_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Two wait for each other; the third gets the place of the first that has ended."""
    seen: list[list[str]] = []

    def let_go() -> None:
        seen.append(states(tmp_path))
        (tmp_path / "go").touch()

    when(lambda: len(began(tmp_path)) == 2, let_go, monkeypatch)
    found = run(tmp_path, recorded(tmp_path, "ends", "fails", "ends"), ("4,5", "6,7"))
    assert seen == [["running", "running", "waiting"]] and states(tmp_path)[1] == "failed"
    assert [each.status for each in found] == [
        JobStatus.COMPLETED,
        JobStatus.FAILED,
        found[0].status,
    ]
    gpus = began(tmp_path)
    assert (gpus[0], gpus[1]) == ("4,5 2", "6,7 2") and gpus[2] in (gpus[0], gpus[1])
    told = capsys.readouterr().out.splitlines()
    assert told[:2] == ["[1/3] x=0  started", "[2/3] x=1  started"]
    assert sum("  done in 0:00:" in line for line in told) == 2 and len(told) == 6
    (failed,) = (line for line in told if "failed" in line)
    assert failed.startswith("[2/3] x=1  failed after ") and failed.endswith(": ValueError: boom")
    logs = [(tmp_path / f"{n}/job.log").read_text().splitlines()[0] for n in range(3)]
    assert logs == ["job 0", "job 1", "job 2"]


def interrupted() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("deaf", [False, True])
def test_ctrl_c_ends_all_jobs_and_begins_no_other(
    deaf: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Those that do not heed it are killed by a second one."""
    when(lambda: len(began(tmp_path)) == 2, interrupted, monkeypatch)
    if deaf:
        monkeypatch.setattr(jobs.JobLines, "show", lambda *_: wait_and_raise(monkeypatch))
    arguments = recorded(tmp_path, *["deaf" if deaf else "ends"] * 3)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, arguments, ("0", "1"))
    record = json.loads((tmp_path / "sweep.json").read_text())["jobs"]
    assert [job["state"] for job in record] == ["interrupted", "interrupted", "waiting"]
    codes = [job["exit_code"] for job in record]
    assert codes == ([-signal.SIGKILL] * 2 if deaf else [75, 75]) + [None]
    told = capsys.readouterr().out
    assert told.count("x=0  ending the job; Ctrl-C again kills it\n") == (not deaf)


def wait_and_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the next wait for a process be interrupted, once."""
    wait = subprocess.Popen.wait

    def interrupts(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        monkeypatch.setattr(subprocess.Popen, "wait", wait)
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "wait", interrupts)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def screen(drawn: str) -> list[str]:
    """Rows of a terminal after these characters."""
    rows, row, column = [""], 0, 0
    while drawn:
        if drawn.startswith("\x1b["):
            code = next(n for n, each in enumerate(drawn) if n > 1 and each.isalpha())
            if drawn[code] == "A":
                row -= int(drawn[2:code])
            else:
                assert drawn[2 : code + 1] == "J"
                rows[row:] = [rows[row][:column]]
            drawn = drawn[code + 1 :]
            continue
        if drawn[0] == "\r":
            column = 0
        elif drawn[0] == "\n":
            row, column = row + 1, 0
            rows += [""] * (row == len(rows))
        else:
            rows[row] = rows[row][:column].ljust(column) + drawn[0] + rows[row][column + 1 :]
            column += 1
        drawn = drawn[1:]
    return [each.rstrip() for each in rows]


def test_terminal_shows_a_line_per_job_below_those_that_ended(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("LINES", "4")
    lines = JobLines(Terminal())
    for texts in (["a 1", "b 1", "c 1"], ["a 22", "b 22", "c 2" + "x" * 30]):
        lines.redraw(texts)
    assert screen(lines.stream.getvalue()) == ["a 22", "b 22", ("c 2" + "x" * 30)[:19]]
    lines.keep("b done, with a reason that is long")
    lines.redraw(["a 3", "c 3"])
    lines.redraw(["a 4", "c 4", "d 1", "e 1"])
    shown = screen(lines.stream.getvalue())
    assert shown == ["b done, with a reason that is long", "a 4", "c 4", "… and 2 more jobs"]


# Places.


GPUS = {VISIBLE: "3,GPU-ab, 5,1,0"}


@pytest.mark.parametrize(
    ("share", "gpus", "env", "expected"),
    [
        ((None, None), 4, {}, [{}]),
        ((None, 1), 4, {}, [{}]),
        ((2, None), 5, {}, [("0,1", 2), ("2,3", 2)]),
        ((2, None), 5, GPUS, [("3,GPU-ab", 2), ("5,1", 2)]),
        ((1, 2), 5, GPUS, [("3", 2), ("GPU-ab", 2)]),
        ((5, None), 5, GPUS, [("3,GPU-ab,5,1,0", 1)]),
        ((None, 3), 0, {}, [(None, 3)] * 3),
    ],
)
def test_places_divide_the_gpus(
    share: tuple[int | None, int | None], gpus: int, env: dict[str, str], expected: list[Any]
):
    found = places(SweepConfig(*share), gpus, False, env)
    assert [(each.get(VISIBLE), int(each[JOBS_AT_ONCE])) if each else each for each in found] == (
        expected
    )


ON_CPU = "leave it out; sweep.jobs_at_once=2 runs two jobs side by side on the CPU"
TOO_MANY = {
    (3, None, 2, False): "sweep.gpus_per_job=3: this host has 2 GPUs; did you mean 2?",
    (1, None, 0, False): f"sweep.gpus_per_job=1: this host has no GPU; {ON_CPU}",
    (1, None, 2, True): f"sweep.gpus_per_job=1: these jobs use no GPU; {ON_CPU}",
    (2, 3, 5, False): "sweep.jobs_at_once=3: 5 GPUs have room for 2 jobs of 2; did you mean 2?",
    (
        None,
        2,
        5,
        False,
    ): "sweep.jobs_at_once=2: jobs on GPUs would share them; sweep.gpus_per_job=1 "
    "gives each job its own (5 GPUs here)",
}


@pytest.mark.parametrize("case", TOO_MANY, ids=str)
def test_more_than_the_host_has_is_one_line(case: tuple[int | None, int | None, int, bool]):
    each, most, gpus, on_cpu = case
    with pytest.raises(ConfigError) as error:
        places(SweepConfig(each, most), gpus, on_cpu, {})
    assert str(error.value) == TOO_MANY[case]


def test_job_must_fit_its_share(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    two = ("parallel.dp=2", "sweep.gpus_per_job=2", "sweep.jobs_at_once=4")
    check_share(load(*two), 8)
    with pytest.raises(
        ConfigError, match="per_job=1: a job of 2 ranks needs as many GPUs; did you"
    ):
        check_share(load(*two, "sweep.gpus_per_job=1"), 8)
    check_share(load(*two), 0)
    with pytest.raises(ConfigError, match="=5: of 2 ranks each: this host has room for 8 proc"):
        check_share(load(*two, "sweep.jobs_at_once=5"), 0)


def test_jobs_at_once_share_the_cores(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    assert [threads_of(ranks, {JOBS_AT_ONCE: "3"}) for ranks in (1, 2, 8)] == [4, 2, 1]
    assert threads_of(2, {}) == 6 and share_of_threads({}) == {}
    assert share_of_threads({JOBS_AT_ONCE: "3"}) == {"OMP_NUM_THREADS": "4"}
    assert ALONE == ({},)


# As typed.


def train(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return run_forked(folder, [sys.executable, str(ROOT / "train.py"), *words], tree=True)


MISTAKES = {
    "sweep.gpus_per_job=2": "sweep.gpus_per_job=2: is of sweeps, and this is one run; add -m, or ",
    "-m sweep.jobs_at_once=1,2": "sweep.jobs_at_once=1,2: is for all jobs; give one value",
    "-m sweep.jobs_at_once=0": "sweep.jobs_at_once=0: must be at least 1; nearest that works: 1",
    "-m train.steps=2,3 train.device=cpu sweep.gpus_per_job=1": "sweep.gpus_per_job=1: these jobs ",
    "-m hydra/launcher=submitit_slurm sweep.gpus_per_job=1": "sweep.gpus_per_job=1: applies to "
    "hydra/launcher=torchrun, not to submitit_slurm; leave it out",
}


@pytest.mark.every(3)
@pytest.mark.parametrize("words", MISTAKES)
def test_mistake_in_the_shares_costs_one_line(tmp_path: Path, words: str):
    done = train(tmp_path, *words.split())
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert done.stderr.startswith(f"train.py: {MISTAKES[words]}")
    assert list(tmp_path.iterdir()) == []


def test_sweep_of_one_job_says_so(tmp_path: Path):
    """This one is impossible, which ends it."""
    done = train(tmp_path, "-m", "model.moe.top_k=9")
    first, second, skipped = done.stdout.splitlines()
    assert first.endswith(": 1 job, 1 skipped") and skipped.startswith("[1/1] ")
    assert second == (
        "one job only, as no key has several values, like optim.lr=1e-3,3e-3 (docs/sweeps.md)"
    )


TINY = ("model.num_layers=1", "model.hidden_size=32", "model.moe.ffn_hidden_size=32",
        "train.seq_len=32", "train.micro_batch=2", "train.global_batch=4", "train.eval_interval=0",
        "train.eval_sequences=4", "train.sample_tokens=0", "log=none",
        "data=text", "optim.warmup_steps=1")  # fmt: skip


@pytest.mark.full
def test_sweep_of_cpu_jobs_side_by_side_is_the_same_sweep(tmp_path: Path):
    """Keys of `sweep` change neither its folder nor its jobs: all are done before."""
    files = f"data.path=[{ROOT}/app/plan/*.py]"
    words = ("-m", *TINY, files, "data.cache_dir=cache", "train.steps=2,3", "parallel=single,dp2")
    done = train(tmp_path, *words, "sweep.jobs_at_once=2")
    assert done.returncode == 0 and done.stderr == "", done.stderr
    (folder,) = (tmp_path / "sweeps").iterdir()
    assert states(folder) == ["done"] * 4
    for job in folder.glob("?_*"):
        assert "sweep:\n  gpus_per_job: null\n" in (job / "config.yaml").read_text()
    assert done.stdout.splitlines()[1:3] == [
        f"[{n}/4] train.steps=2 parallel={layout}  started"
        for n, layout in ((1, "single"), (2, "dp2"))
    ]
    again = train(tmp_path, *words)
    assert again.returncode == 0 and ": 4 jobs, 4 done before" in again.stdout


@pytest.mark.full
def test_job_computes_with_its_share_of_the_threads(tmp_path: Path):
    kept = {name: text for name, text in os.environ.items() if name != "OMP_NUM_THREADS"}
    for ranks, device in ((1, "CPU, 1 thread"), (2, "CPU, 2 processes of 1 thread")):
        words = (*TINY[:-3], "log.wandb=false", *TINY[-2:-1], f"data.path=[{ROOT}/app/plan/*.py]")
        done = subprocess.run(
            [sys.executable, str(ROOT / "train.py"), *words, "data.cache_dir=cache",
             "train.steps=2", f"parallel.dp={ranks}"],
            cwd=tmp_path, capture_output=True, text=True, env={**kept, JOBS_AT_ONCE: "999"},
        )  # fmt: skip
        assert f"device  {device}" in done.stdout, done.stdout + done.stderr


@pytest.mark.full
def test_ctrl_c_ends_real_jobs_and_their_ranks(tmp_path: Path):
    files = f"data.path=[{ROOT}/app/plan/*.py]"
    words = ("-m", *TINY, files, "data.cache_dir=cache", "train.steps=5000,6000", "parallel.dp=2")
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), *words, "sweep.jobs_at_once=2",
         "hydra.sweep.dir=s"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    runs = [tmp_path / f"s/{n}_steps-{steps}/metrics.jsonl" for n, steps in enumerate((5000, 6000))]
    wait_for(lambda: all(each.exists() for each in runs) or process.poll() is not None)
    began_at = time.monotonic()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (130, "stopped; the same command resumes\n"), out
    assert states(tmp_path / "s") == ["interrupted"] * 2 and time.monotonic() - began_at < 120
    assert out.count("  interrupted after ") == 2
    left = subprocess.run(["ps", "ax", "-o", "args"], capture_output=True, text=True).stdout
    assert str(tmp_path / "s") not in left
