"""Being told to stop, dying and going on: no token is lost or seen twice, and the numbers are
those of a run left alone.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from app.config import Run
from app.engine.files import attempt as attempts
from app.engine.files import signals
from app.engine.files.attempt import Attempt
from app.engine.files.checkpoints import complete_checkpoints, newest_checkpoint
from app.engine.files.run_folder import FolderLock, create_run_folder, read_metrics
from app.engine.files.signals import STOPPED, StopRequest
from app.engine.run import trainer
from app.engine.start.start import find_start
from app.engine.watchdog.watchdog import EXIT_STUCK
from app.errors import ConfigError
from tests.distributed import run_distributed
from tests.processes.stop import exit_code, launched
from tests.training import (
    LONG,
    ROOT,
    Seen,
    composed,
    corpus_in,
    losses,
    train_rank,
    untimed,
    wait_for,
)

LAYOUTS = {"single": (1, ()), "dp2": (2, ("parallel.dp=2",)), "ep2": (2, ("parallel.ep=2",))}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    return corpus_in(tmp_path_factory.mktemp("corpus"))


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("layout", "told_at"), [("dp2", {1: 5}), ("single", {0: 3}), ("ep2", {0: 7, 1: 7})]
)
def test_no_token_is_lost_or_repeated(
    corpus: tuple[str, ...], tmp_path: Path, layout: str, told_at: dict[int, int]
):
    """Step 5 is one with a validation, which the resumed run makes up for; in ep2 both ranks are
    told at once.
    """
    world_size, overrides = LAYOUTS[layout]
    stop = next(iter(told_at.values()))

    def ranks(folder: str, resume: str, told_at: dict[int, int]) -> list[tuple[bool, Seen]]:
        settings = (
            *corpus,
            *overrides,
            "train.steps=12",
            f"run_dir={tmp_path}/{folder}",
            f"resume={resume}",
        )
        return run_distributed(train_rank, world_size, composed(settings, world_size), told_at)

    whole = ranks("whole", "null", {})
    stopped, resumed = ranks("part", "null", told_at), ranks("part", "auto", {})
    assert [finished for finished, _ in (*whole, *stopped, *resumed)] == (
        [True] * world_size + [False] * world_size + [True] * world_size
    )
    assert [len(seen) for _, seen in stopped] == [stop] * world_size, "the ranks agree on the step"
    assert [seen for _, seen in whole] == [
        before + after for (_, before), (_, after) in zip(stopped, resumed, strict=True)
    ]
    rows = sorted(untimed(tmp_path / "part"), key=lambda row: (row["step"], "val_loss" in row))
    assert rows == untimed(tmp_path / "whole")
    assert len({str(tokens) for _, seen in whole for step in seen for tokens in step}) == 24, (
        "every microbatch is another"
    )


def test_a_stop_without_checkpoints_saves_nothing(
    corpus: tuple[str, ...], tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    run = composed(
        (*corpus, "checkpoint.interval=0", "train.steps=9", f"run_dir={tmp_path}/run"), 1
    )
    assert run_distributed(train_rank, 1, run, {0: 2})[0][0] is False
    said = capfd.readouterr().err
    assert (
        said
        == "train.py: stopped by SIGTERM after step 2; nothing was saved (checkpoint.interval=0)\n"
    )
    assert not (tmp_path / "run/checkpoints").exists()


def test_stop_in_last_step_ends_normally(corpus: tuple[str, ...], tmp_path: Path):
    run = composed((*corpus, "train.steps=2", f"run_dir={tmp_path}/run"), 1)
    assert run_distributed(train_rank, 1, run, {0: 2})[0][0] is True
    assert [row["step"] for row in read_metrics(tmp_path / "run") if "val_loss" in row] == [0, 2]


def told_after_its_last_step(rank: int, run: Run) -> None:
    """Train, and get SIGTERM when all is saved and nobody listens any more."""
    trainer.note_end = lambda folder, step: os.kill(os.getpid(), signal.SIGTERM)
    train_rank(rank, run, {})


@pytest.mark.full
def test_a_run_that_lacks_only_its_end_resumes_to_it(corpus: tuple[str, ...], tmp_path: Path):
    settings = (*corpus, "train.steps=2", f"run_dir={tmp_path}/run", "resume=auto")
    run = composed(settings, 1)
    with pytest.raises(AssertionError, match="died without a word"):
        run_distributed(told_after_its_last_step, 1, run)
    left = untimed(tmp_path / "run")
    assert [row["step"] for row in left if "val_loss" in row] == [0, 2]
    assert run_distributed(train_rank, 1, run, {}) == [(True, [])]
    assert untimed(tmp_path / "run") == left, "nothing is recorded twice"
    with pytest.raises(ConfigError, match="has already taken 2"):
        find_start(run)
    longer = composed((*settings, "train.steps=3"), 1)
    with pytest.raises(AssertionError, match="died without a word"):
        run_distributed(told_after_its_last_step, 1, longer)
    assert find_start(longer).manifest["step"] == 3, "the end before is not this one's"


def hold_folder(rank: int, run: Run) -> str:
    """Start a run in a folder in which another process trains."""
    try:
        train_rank(rank, run, {})
    except ConfigError as error:
        return str(error)
    return "trained"


def test_two_runs_in_one_folder(corpus: tuple[str, ...], tmp_path: Path):
    run = composed((*corpus, "train.steps=2", f"run_dir={tmp_path}/run", "resume=auto"), 1)
    with FolderLock() as lock:
        lock.take(create_run_folder(run, tmp_path / "run"))
        (said,) = run_distributed(hold_folder, 1, run)
    assert said.startswith(
        f"run_dir={tmp_path}/run: another run is writing there; choose another folder"
    )
    assert run_distributed(hold_folder, 1, run) == ["trained"], "and not for longer than it trains"


@pytest.mark.full
def test_an_attempt_before_this_one_is_continued(corpus: tuple[str, ...], tmp_path: Path):
    """Whatever the run was given; and where that attempt had saved nothing, it starts as that
    one did.
    """
    earlier, other = tmp_path / "earlier", tmp_path / "other"
    for folder, steps in ((earlier, 4), (other, 2)):
        settings = (*corpus, "checkpoint.interval=2", f"train.steps={steps}", f"run_dir={folder}")
        run_distributed(train_rank, 1, composed(settings, 1), {})
    again = composed((*corpus, "train.steps=4", f"resume={other}"), 1)
    start = find_start(again, earlier)
    assert (start.run_dir, start.checkpoint) == (earlier, earlier / "checkpoints/step-00000004"), (
        "also after its last step"
    )
    with pytest.raises(ConfigError, match="has already taken 4"):
        find_start(composed((*corpus, "train.steps=4", f"run_dir={earlier}", "resume=auto"), 1))
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "config.yaml").touch()
    assert find_start(again, empty).checkpoint == other / "checkpoints/step-00000002"
    in_empty, in_new = (replace(again, run_dir=str(place)) for place in (empty, tmp_path / "new"))
    assert Attempt(requeues=1).earlier(in_empty) == empty
    assert Attempt(requeues=1).earlier(in_new) is None
    assert Attempt().earlier(in_empty) is None


def test_ranks_meet_apart_from_the_dead(monkeypatch: pytest.MonkeyPatch):
    """In a store where ranks of an earlier attempt have announced themselves, and rank 0 has
    answered them.
    """
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    attempt = Attempt(master=("127.0.0.1", server.port), store_stays=True)
    left = dist.PrefixStore(attempts.PREFIX, server)
    for rank in (1, 2):
        left.set(f"here/{rank}", f"of the dead {rank}")
        left.set(f"of the dead {rank}", "a part that nobody reads")
    with ThreadPoolExecutor(3) as ranks:
        for _ in range(2):
            stores = list(ranks.map(lambda rank: attempt.meeting_store(rank, 3), range(3)))
            assert not stores[2].check(["word"]), "neither is the attempt before seen"
            stores[0].set("word", "given")
            assert [store.get("word") for store in stores] == [b"given"] * 3
    monkeypatch.setattr(attempts, "TIMEOUT", datetime.timedelta(seconds=0.1))
    with pytest.raises(TimeoutError, match=r"ranks \[1, 2\] have not come"):
        attempt.meeting_store(0, 3)


# What one process does with signals.


def told_twice(apart: float) -> int | None:
    request = StopRequest()
    with request.listening():
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(apart)
        os.kill(os.getpid(), signal.SIGTERM)
        return 0 if request.signal is signal.SIGUSR1 else 1


def test_second_signal_ends_at_once_unless_repeated(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(signals, "REPEAT_S", 0.2)
    assert exit_code(lambda: told_twice(apart=0.0)) == 0
    assert exit_code(lambda: told_twice(apart=0.3)) == STOPPED == 75


def hung_up(ignored: bool) -> int | None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    request = StopRequest()
    with request.listening():
        os.kill(os.getpid(), signal.SIGHUP)
        return 1 if request.signal is None else 2


def test_a_lost_terminal_ends_a_run_unless_it_is_not_to_be_heard():
    assert exit_code(lambda: hung_up(ignored=False)) == 2
    assert exit_code(lambda: hung_up(ignored=True)) == 1, "as nohup has it"


def test_outside_the_steps_a_signal_ends_the_process():
    def work() -> int | None:
        with StopRequest().listening():
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        return 0

    assert exit_code(work) == -signal.SIGTERM


def test_previous_signal_handler_is_called_afterwards():
    heard = []
    before = {
        number: signal.signal(number, lambda number, frame: heard.append(number))
        for number in signals.STOP_SIGNALS
    }
    try:
        request = StopRequest()
        with request.listening():
            os.kill(os.getpid(), signal.SIGUSR2)
        assert heard == []
        request.hand_on()
        assert heard == [signal.SIGUSR2]
        assert "stopped by SIGUSR2 after step 7, saved x/checkpoints/y" in request.farewell(
            7, Path("x/checkpoints/y"), command=""
        )
        untold = StopRequest()
        with untold.listening():
            pass
        untold.hand_on()
        assert heard == [signal.SIGUSR2] and "a signal to another rank" in untold.farewell(
            7, None, command=""
        )
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# torchrun with exit codes, around a script that ends as it is told to.


@pytest.mark.every(3)
@pytest.mark.parametrize("code", [75, 2, 130])
def test_explained_exit_codes_are_not_restarted(tmp_path: Path, code: int):
    found = launched(tmp_path, "--standalone", "--max-restarts=2", ends=[f"0:{code}", f"1:{code}"])
    assert found == (code, "", ["began-0-0", "began-1-0"])


def test_dead_ranks_are_restarted_and_named(tmp_path: Path):
    code, said, began = launched(
        tmp_path, "--standalone", "--max-restarts=1", ends=["1/0:-9", "1/1:7", "0:sleep"]
    )
    assert code == 7 and began == ["began-0-0", "began-0-1", "began-1-0", "began-1-1"]
    first, second = said.splitlines()
    assert first.startswith("torchrun: rank 1 (process ") and first.endswith(
        "was ended by SIGKILL; starting the ranks again"
    )
    assert second.startswith("torchrun: rank 1 (process ") and second.endswith(
        "ended with exit code 7"
    )


@pytest.mark.every(3)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_signals_reach_the_ranks_which_have_time(tmp_path: Path, number: int):
    ends = ["0:sleep", "1:sleep"]
    assert launched(tmp_path, "--standalone", "--max-restarts=2", ends=ends, send=[number])[:2] == (
        75,
        "",
    )


@pytest.mark.every(2)
@pytest.mark.parametrize("first", ["sleep", "idle"])
def test_signal_outside_of_steps_counts_as_stopped(tmp_path: Path, first: str):
    """One rank has saved and gets the signal late; the other still has the time it needs."""
    ends = [f"0:{first}", "1:idle"]
    code, said, began = launched(
        tmp_path, "--standalone", "--max-restarts=2", ends=ends, send=[signal.SIGUSR1]
    )
    assert (code, began) == (75, ["began-0-0", "began-1-0"])
    assert (
        said == ""
        if first == "sleep"
        else said.endswith("was ended by SIGUSR1\n") and said.count("\n") == 1
    )


@pytest.mark.parametrize(
    "how",
    [
        "--master-port={port}",
        "--rdzv-backend=c10d --rdzv-conf=is_host=1 --rdzv-endpoint=127.0.0.1:{port}",
    ],
)
def test_a_port_that_is_taken(tmp_path: Path, how: str):
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        code, said, began = launched(tmp_path, "--nnodes=1", *how.format(port=port).split())
    assert (code, began) == (2, [])
    assert (
        said == f"torchrun: 127.0.0.1:{port}: another program has this port; choose another one, "
        "or --standalone on one host\n"
    )


# Whole programs.


@pytest.fixture(scope="module")
def undisturbed(
    corpus: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> dict[int, float]:
    """step -> loss of two ranks that share the experts."""
    folder = tmp_path_factory.mktemp("undisturbed")
    run_distributed(train_rank, 2, composed((*corpus, *LONG, f"run_dir={folder}/run"), 2), {})
    return losses(folder / "run")


def test_stop_during_restart_is_not_lost(tmp_path: Path):
    """It comes when one has died and torchrun waits for the other's end."""
    ends, twice = ["1/0:-9", "0/0:slow"], [signal.SIGUSR1, signal.SIGUSR1]
    code, said, began = launched(
        tmp_path, "--standalone", "--max-restarts=2", ends=ends, send=twice
    )
    assert (code, began) == (128 + signal.SIGKILL, ["began-0-0", "began-1-0"])
    assert said.count("\n") == 1 and said.endswith("was ended by SIGKILL\n")


def started(folder: Path, *command: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, *command], cwd=folder, env=environment, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.full
def test_stopped_ranks_resume_where_they_were(
    corpus: tuple[str, ...], tmp_path: Path, undisturbed: dict[int, float]
):
    """`python train.py` that starts two ranks: SIGUSR1 to the starter, exit code 75, one line."""
    process = started(
        tmp_path, str(ROOT / "train.py"), *corpus, *LONG, "parallel.dp=2", "run_dir=run"
    )
    wait_for(lambda: newest_checkpoint(tmp_path / "run") is not None)
    process.send_signal(signal.SIGUSR1)
    _, said = process.communicate(timeout=120)
    saved = complete_checkpoints(tmp_path / "run/checkpoints")[-1]
    step = int(saved.name.removeprefix("step-"))
    assert process.returncode == 75 and list(losses(tmp_path / "run"))[-1] == step
    assert said == (
        f"train.py: stopped by SIGUSR1 after step {step}, saved run/checkpoints/{saved.name}; "
        f"to continue: python {ROOT}/train.py resume=run\n"
    )
    settings = (*corpus, *LONG, f"run_dir={tmp_path}/run", "resume=auto")
    run_distributed(train_rank, 2, composed(settings, 2), {})
    assert losses(tmp_path / "run") == undisturbed


@pytest.mark.full
def test_a_killed_rank_costs_no_step(
    corpus: tuple[str, ...], tmp_path: Path, undisturbed: dict[int, float]
):
    """`torchrun --max-restarts=2` as torch has it, in a folder where another run has the newest
    checkpoint.
    """
    other = tmp_path / "runs/other/checkpoints/step-00000999"
    other.mkdir(parents=True)
    (other.parent / "latest").write_text(other.name)
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=2")
    process = started(tmp_path, *launcher, str(ROOT / "train.py"), *corpus, *LONG)
    ours = lambda: [path for path in (tmp_path / "runs").iterdir() if path.name != "other"]  # noqa: E731
    wait_for(lambda: any(newest_checkpoint(path) for path in ours()))
    ranks = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(ranks[-1]), signal.SIGKILL)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    (folder,) = ours()
    assert losses(folder) == undisturbed
    assert json.loads((folder / "plan.json").read_text())


@pytest.mark.full
def test_a_run_in_which_a_rank_stops_ends(corpus: tuple[str, ...], tmp_path: Path):
    """`python train.py` that starts two ranks: 124, and the other says for whom it waits."""
    timeout_s, long = 3, ("parallel.dp=2", "train.steps=100000", "train.eval_interval=0")
    settings = (*corpus, *long, "run_dir=run", f"schedule.timeout_s={timeout_s}")
    process, run_dir = started(tmp_path, str(ROOT / "train.py"), *settings), tmp_path / "run"
    wait_for(lambda: (run_dir / "metrics.jsonl").exists() and len(read_metrics(run_dir)) > 2)
    launcher = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0]
    ranks = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    os.kill(int(ranks[0]), signal.SIGSTOP)
    since = time.monotonic()
    _, said = process.communicate(timeout=120)
    assert process.returncode == EXIT_STUCK and time.monotonic() - since < 1.5 * timeout_s + 20, (
        said
    )
    *warnings, first, second = said.splitlines()
    assert all(line.startswith("rank 1 has waited ") for line in warnings), said
    stuck = r"rank 1 is stuck in \w+ \d+ of \w+ \(.*\) for 3 s \(schedule.timeout_s=3\)"
    assert re.match(rf"{stuck}; rank 0 has ", first), said
    assert re.fullmatch(r"torchrun: rank 1 \(process \d+\) ended with exit code 124", second)
