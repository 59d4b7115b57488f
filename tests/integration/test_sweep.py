"""Sweeps as a user starts them: six runs with failed and impossible ones, going on, Ctrl-C,
mistakes.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from omegaconf import OmegaConf

from app.engine.files.checkpoints import newest_checkpoint
from tests.cases import chosen
from tests.programs import run_forked
from tests.training import wait_for
from tests.wandb_file import told

ROOT = Path(__file__).parent.parent.parent
TINY = (
    "model.num_layers=1",
    "model.hidden_size=32",
    "model.moe.ffn_hidden_size=32",
    "train.seq_len=32",
    "train.micro_batch=2",
    "train.global_batch=4",
    "train.eval_interval=2",
    "train.eval_sequences=4",
    "train.sample_tokens=0",
    "optim.warmup_steps=1",
    "log=none",
    "checkpoint.interval=2",
)
VOCABULARIES = "model.vocab_size=264,200,-8"


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """A small corpus, so that these runs prepare nothing large."""
    folder = tmp_path_factory.mktemp("corpus")
    for number, file in enumerate(sorted((ROOT / "app/plan").glob("*.py"))):
        (folder / f"{number}.txt").write_text(file.read_text())
    return ("data=text", f"data.path=[{folder}/*.txt]", f"data.cache_dir={folder}/cache")


def command(*overrides: str) -> list[str]:
    return [sys.executable, str(ROOT / "train.py"), "-m", *overrides]


def run(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    """A sweep whose processes, also those of its jobs, are forked."""
    return run_forked(folder, command(*overrides), tree=True)


def states(folder: Path) -> list[str]:
    return [job["state"] for job in json.loads((folder / "sweep.json").read_text())["jobs"]]


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


class Done(NamedTuple):
    """A sweep of three jobs for each layout: one that trains, one that fails, an impossible one."""

    folder: Path
    layouts: tuple[str, ...]
    ended: subprocess.CompletedProcess[str]


@pytest.fixture(scope="module", params=chosen(["dp2", "single,dp2"], ["dp2"]))
def swept(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    corpus: tuple[str, ...],
) -> Done:
    folder = tmp_path_factory.mktemp("swept")
    words = (f"parallel={request.param}", VOCABULARIES)
    done = run(folder, *corpus, *TINY, "train.steps=3", *words)
    (sweep,) = (folder / "sweeps").iterdir()
    return Done(sweep, tuple(request.param.split(",")), done)


def test_a_sweep_of_jobs_that_train_and_fail(swept: Done):
    folder, layouts, done = swept
    assert done.returncode == 1 and done.stderr == "", done.stderr  # one or two have failed
    assert re.fullmatch(r"moe_tiny-[0-9a-f]{8}", folder.name)
    assert states(folder) == ["done", "failed", "skipped"] * len(layouts)
    jobs = json.loads((folder / "sweep.json").read_text())["jobs"]
    parts = [[f"parallel={layout}"] if len(layouts) > 1 else [] for layout in layouts]
    assert [job["swept"] for job in jobs] == [
        [*part, f"model.vocab_size={size}"] for part in parts for size in (264, 200, -8)
    ]
    assert {job["reason"] for job in jobs if job["state"] == "done"} == {None}
    for failed, skipped in [(1, 2), (4, 5)][: len(layouts)]:
        assert jobs[failed]["reason"].startswith(
            "model.vocab_size=200: data.tokenizer=bytes has 257 ids"
        )
        assert (jobs[failed]["exit_code"], jobs[skipped]["exit_code"]) == (2, None)
        assert jobs[skipped]["reason"].startswith("model.vocab_size=-8: must be at least 1")
        assert not (folder / jobs[skipped]["folder"]).exists()


def test_what_is_told(swept: Done):
    """What is skipped first, with the reason; then a line when a job begins and one when it
    ends.
    """
    lines, layouts = swept.ended.stdout.splitlines(), swept.layouts
    jobs, few = 3 * len(layouts), len(layouts)
    assert lines[0].endswith(f": {jobs} jobs, {few} skipped")
    skipped, told = lines[1 : 1 + few], lines[1 + few : 1 + 5 * few]
    assert [line[:5] for line in skipped] == [f"[{number}/{jobs}]" for number in (3, 6)[:few]]
    assert all("skipped: model.vocab_size=-8" in line for line in skipped)
    told = [re.sub(r"\d:\d\d:\d\d", "T", line) for line in told]
    part = f"parallel={layouts[0]} " if few > 1 else ""
    assert told[0] == f"[1/{jobs}] {part}model.vocab_size=264  started"
    assert re.fullmatch(
        rf"\[1/{jobs}\] {part}model.vocab_size=264  done in T, loss \d\.\d{{4}}", told[1]
    )
    assert told[3].startswith(
        f"[2/{jobs}] {part}model.vocab_size=200  failed after T: model.vocab_size=200: "
        "data.tokenizer"
    )
    numbers = (1, 1, 2, 2, 4, 4, 5, 5)[: 4 * few]
    assert [line[:5] for line in told] == [f"[{number}/{jobs}]" for number in numbers]
    assert lines[-1].startswith("written: ")


def test_every_job_is_a_run_in_a_folder_of_its_own(swept: Done):
    folder = swept.folder
    names = {"0_vocab_size-264": 2}
    if len(swept.layouts) > 1:
        names = {"0_parallel-single_vocab_size-264": None, "3_parallel-dp2_vocab_size-264": 2}
    for name, ranks in names.items():
        config = OmegaConf.load(folder / name / "config.yaml")
        assert (config.parallel.world_size, config.model.vocab_size) == (ranks, 264)
        assert config.log.group == folder.name
        assert (config.log.console, config.resume) == (False, None)
        assert [row["step"] for row in metrics(folder / name) if "loss" in row] == [1, 2, 3]
        assert newest_checkpoint(folder / name) is not None and (folder / name / "job.log").exists()
    losses = [[row["loss"] for row in metrics(folder / name) if "loss" in row] for name in names]
    assert losses[0] == pytest.approx(losses[-1], rel=1e-4)


@pytest.mark.full
def test_started_again_only_what_is_not_done_runs(swept: Done, corpus: tuple[str, ...]):
    """The same overrides in another order are the same sweep."""
    folder, layouts, _ = swept
    jobs, few = 3 * len(layouts), len(layouts)
    kept = {path: path.stat().st_mtime_ns for path in folder.glob("*/metrics.jsonl")}
    words = (VOCABULARIES, f"parallel={','.join(layouts)}")
    again = run(folder.parent.parent, *words, *TINY, "train.steps=3", *corpus)
    told = f": {jobs} jobs, {few} skipped, {few} done before"
    assert again.returncode == 1 and told in again.stdout
    began = [line[:5] for line in again.stdout.splitlines() if "started" in line]
    assert began == [f"[{number}/{jobs}]" for number in (2, 5)[:few]]
    assert {
        path: path.stat().st_mtime_ns for path in folder.glob("*/metrics.jsonl")
    } == kept and len(kept) == few
    assert states(folder) == ["done", "failed", "skipped"] * few


@pytest.mark.full
def test_two_sweeps_do_not_share_a_folder(swept: Done, corpus: tuple[str, ...], tmp_path: Path):
    before = (swept.folder / "sweep.json").read_text()
    other = run(tmp_path, *corpus, *TINY, "train.steps=4,5", f"hydra.sweep.dir={swept.folder}")
    assert (
        other.returncode == 2
        and "contains another sweep (python train.py -m " in other.stderr
        and other.stderr.count("\n") == 1
    )
    (tmp_path / "notes.txt").write_text("mine")
    other = run(tmp_path, *corpus, *TINY, "train.steps=4,5", "hydra.sweep.dir=.")
    assert (other.returncode, other.stderr) == (
        2,
        "train.py: hydra.sweep.dir=.: has files but no sweep; choose a new folder\n",
    )
    assert (swept.folder / "sweep.json").read_text() == before and [
        path.name for path in tmp_path.iterdir()
    ] == ["notes.txt"]


@pytest.mark.full
@pytest.mark.parametrize("closed", [False, True], ids=["Ctrl-C", "a closed terminal"])
def test_ctrl_c_keeps_what_finished_and_the_same_command_resumes(
    closed: bool, corpus: tuple[str, ...], tmp_path: Path
):
    """The second of three is interrupted after its first checkpoint; started again, it goes on
    from there.
    """
    overrides = (
        *corpus,
        *TINY,
        "train.steps=2,40,3",
        "train.eval_interval=0",
        "log.wandb=true",
        "hydra.sweep.dir=s",
    )
    process = subprocess.Popen(
        command(*overrides),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heeds_hangup,
    )
    wait_for(
        lambda: (
            newest_checkpoint(tmp_path / "s/1_steps-40") is not None or process.poll() is not None
        )
    )
    (job,) = children(process.pid)
    os.kill(job, signal.SIGSTOP)  # so that it does not end meanwhile
    processes = [job, *descendants(job)]
    second = run(tmp_path, *overrides)
    assert second.returncode == 2 and "hydra.sweep.dir=s: a sweep is running there" in second.stderr
    assert process.stdout is not None and process.stderr is not None
    said = "stopped; the same command resumes\n"
    if closed:
        process.stdout.close()
        lost = "stdout cannot be written: Broken pipe; the run continues without it"
        said = f"train.py: {lost}\n{said}"
    process.send_signal(signal.SIGHUP if closed else signal.SIGINT)
    os.kill(job, signal.SIGCONT)
    if not closed:
        assert "steps=40  interrupted after" in process.stdout.read()
    err = process.stderr.read()
    process.stdout.close()
    process.stderr.close()
    assert (process.wait(60), err) == (130, said), err
    assert states(tmp_path / "s") == ["done", "interrupted", "waiting"]
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in processes))
    reached = metrics(tmp_path / "s/1_steps-40")[-1]["step"]
    again = run(tmp_path, *overrides)
    assert again.returncode == 0 and states(tmp_path / "s") == ["done"] * 3, again.stdout
    steps = [row["step"] for row in metrics(tmp_path / "s/1_steps-40") if "loss" in row]
    assert (
        steps == list(range(1, 41))
        and OmegaConf.load(tmp_path / "s/1_steps-40/config.yaml").resume == "auto"
    )
    assert 2 <= reached < 40
    runs = [told(tmp_path / "s" / name, "run")[0] for name in ("0_steps-2", "2_steps-3")]
    assert [each.run_group for each in runs] == ["s"] * 2


def heeds_hangup() -> None:
    """Whatever `nohup` in front of the tests says, which a sweep would follow."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def children(pid: int) -> list[int]:
    """Processes that a process has started and that have not ended."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def descendants(pid: int) -> Iterator[int]:
    """Processes that a process has started, directly or not."""
    for child in children(pid):
        yield child
        yield from descendants(child)


MISTAKES = {
    "hydra/launcher=torchrum train.steps=2,3": "hydra/launcher=torchrum: the options are basic, ",
    "hydra/launcher=basic train.steps=2,3": "hydra/launcher=basic: would train all jobs in this "
    "one process",
    "model.num_layer=2,4": "model.num_layer=2,4: there is no such key; did you mean "
    "model.num_layers=2,4?",
    "+model.moe.topk=2,4": "model.moe.topk=2: there is no such key; did you mean model.moe.top_k?",
    "model=moe_tiny,moe_tinny": "model=moe_tinny: the options are ",
    "train.steps=2,abc": "train.steps=abc: must be a whole number, like 700",
    "train.steps=interval(2,4)": "train.steps=interval(2,4): a grid sweep takes lists of values ",
    "run_dir=here train.steps=2,3": "run_dir=here: each job of a sweep has a folder of its own",
    "model=dense_tiny,moe_tiny model.moe.top_k=1,2": "model.moe.top_k=1: needs model.moe, "
    "which is null here",
}


NOTHING = "train.py: nothing to train: every combination was skipped\n"
NOTHING_TO_TRAIN = {
    "parallel.ep=3,5": "parallel.ep=5: must divide model.moe.num_experts=8",
    "hardware.gpu_memory_gib=0.1,0.25": "hardware.gpu_memory_gib=0.2: too small: a rank needs ",
    "train.global_batch=1024 train.micro_batch=1 "
    "parallel.dp=512,1024": "parallel.dp=1024: this host has room for ",
}


@pytest.mark.every(9)
@pytest.mark.parametrize("overrides", MISTAKES)
def test_a_mistake_costs_one_line_and_leaves_nothing(tmp_path: Path, overrides: str):
    done = run(tmp_path, *overrides.split())
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr.startswith(f"train.py: {MISTAKES[overrides]}") and done.stderr.count("\n") == 1
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.full
@pytest.mark.parametrize("overrides", NOTHING_TO_TRAIN)
def test_nothing_to_train_is_an_error(tmp_path: Path, overrides: str):
    done = run(tmp_path, *overrides.split())
    assert (done.returncode, done.stderr) == (1, NOTHING)
    expect_all_skipped(done.stdout, overrides)
    assert list(tmp_path.iterdir()) == []


def expect_all_skipped(printed: str, overrides: str) -> None:
    said = rf"^\[2/2\] \S+  skipped: {re.escape(NOTHING_TO_TRAIN[overrides])}"
    assert re.search(said, printed, re.MULTILINE), printed


def test_a_sweep_is_not_one_of_several_ranks(tmp_path: Path):
    master = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    env = {**os.environ, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", **master}
    done = subprocess.run(
        command("train.steps=2,3"), cwd=tmp_path, capture_output=True, text=True, env=env
    )
    assert (done.returncode, done.stdout) == (2, "") and list(tmp_path.iterdir()) == []
    assert done.stderr.startswith(
        "train.py: --multirun=rank 0: one of 2 ranks, but a sweep starts the ranks of each job; "
    )


@pytest.mark.full
def test_the_parent_does_without_torch(tmp_path: Path):
    """With nothing to train, which is an error."""
    line = [sys.executable, "-X", "importtime", *command("parallel.ep=3,5")[1:]]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True)
    loaded = {found.split("|")[-1].strip() for found in done.stderr.splitlines()}
    assert done.returncode == 1 and NOTHING in done.stderr
    expect_all_skipped(done.stdout, "parallel.ep=3,5")
    assert list(tmp_path.iterdir()) == []
    assert "app.cli.sweeps.combinations" in loaded and "torch" not in loaded
