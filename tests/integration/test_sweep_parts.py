"""The parts of a sweep: what a host has room for, records, what a job begins with, how its end
and its progress are told.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from app.choices import AttentionBackendKind
from app.cli.options.compose import register_schema
from app.cli.run_report.sweep_record import JobState, Sweep, locked
from app.cli.sweeps import combinations as sweep_plan
from app.cli.sweeps.combinations import (
    Combination,
    check_host,
    combinations,
    folder_names,
    host_gpus,
)
from app.cli.sweeps.job_lines import JobLines, progress
from app.cli.sweeps.jobs import outcome
from app.cli.sweeps.submitted import how_it_ended, submit
from app.cli.sweeps.sweep import job_arguments, planned, sweep_name
from app.config import Run
from app.engine.files.run_folder import plain
from app.errors import ConfigError
from app.plan.formatting import GIB
from app.planner.attention import with_attention
from app.planner.plan import Plan
from app.shell import quoted
from tests.config import CONF, load


def found_by(*overrides: str) -> list[Combination]:
    register_schema()
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        parsed = OverridesParser.create().parse_overrides(list(overrides))
        return combinations(
            parsed, lambda chosen: compose("train", chosen, return_hydra_config=True), []
        )


@pytest.mark.full
def test_all_combinations_the_last_key_fastest():
    found = found_by("model=dense_tiny,moe_tiny", "train.seed=7", "train.steps=2,3,2")
    assert [one.swept for one in found] == [
        (f"model={model}", f"train.steps={n}")
        for model in ("dense_tiny", "moe_tiny")
        for n in (2, 3)
    ]
    assert (
        found[2].overrides == ("model=moe_tiny", "train.seed=7", "train.steps=2")
        and found[2].model == "moe_tiny"
    )
    assert [(one.run.model.name, one.run.train.steps, one.run.train.seed) for one in found] == [
        (model, steps, 7) for model in ("dense_tiny", "moe_tiny") for steps in (2, 3)
    ]


def memory_of(run: Run) -> int:
    return Plan(run).busiest.total


def test_too_big_for_a_gpu_is_refused_with_both_sizes():
    run, need = load("train.device=cuda"), memory_of(load())
    check_host(run, [need + 2**20])
    with pytest.raises(
        ConfigError,
        match=rf"too small: a rank needs {need / GIB:.2f} GiB \(python -m app.cli.plan what=memory",
    ):
        check_host(run, [4 * need, need - 2**20])


@pytest.mark.full
def test_the_memory_asked_for_counts_before_that_of_the_gpu():
    small = f"hardware.gpu_memory_gib={memory_of(load()) / GIB / 2}"
    for device in ("cpu", "cuda"):
        with pytest.raises(ConfigError, match="gpu_memory_gib="):
            check_host(load(f"train.device={device}", small), [2**50])
    check_host(load("train.device=cuda", "hardware=h100"), [1])


def test_a_run_on_the_cpu_is_not_held_to_the_gpus():
    check_host(load("train.device=cpu"), [1])
    check_host(load("train.device=cpu"), [])


def test_another_process_asks_for_the_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(sweep_plan, "GPU_DEVICES", (str(tmp_path),))
    monkeypatch.setattr(sweep_plan, "ASK_GPUS", "print(3 * 2**30, 5)")
    assert host_gpus() == (3 * 2**30, 5)
    monkeypatch.setattr(sweep_plan, "ASK_GPUS", "raise SystemExit(1)")
    assert host_gpus() == ()
    monkeypatch.setattr(sweep_plan, "GPU_DEVICES", (str(tmp_path / "none"),))
    monkeypatch.setattr(sweep_plan, "ASK_GPUS", "print(1)")
    assert host_gpus() == ()


def test_ranks_that_have_no_place_here_are_refused_here_only():
    many = load("parallel.dp=8", "train.global_batch=64")
    with pytest.raises(ConfigError, match="this host has room for 4 GPUs"):
        check_host(many, [2**40] * 4)
    check_host(many, None)


# Records.


def sweep_of(folder: Path, *steps: int) -> tuple[Sweep, list[Combination]]:
    found = [combination(f"train.steps={n}") for n in steps]
    return planned(folder, "python train.py -m", found), found


def test_a_record_reads_back(tmp_path: Path):
    sweep, _ = sweep_of(tmp_path / "s", 2, 3)
    sweep = sweep.changed(1, state=JobState.failed, reason="a «reason»", exit_code=-9, seconds=1.5)
    (tmp_path / "s").mkdir()
    sweep.save()
    assert Sweep.load(tmp_path / "s") == sweep and [
        path.name for path in (tmp_path / "s").iterdir()
    ] == ["sweep.json"]
    assert sweep.job_of(["train.steps=3", "run_dir=x"]).number == 1


def combination(*overrides: str, checkpoint: str = "default") -> Combination:
    return Combination(
        overrides,
        overrides,
        "moe_tiny",
        run=load(f"checkpoint={checkpoint}", *overrides),
        reason=None,
    )


def finished_run(run_dir: Path, *overrides: str) -> None:
    """Files of a run that has come to its last step and saves nothing; its start has chosen the
    library of attention.
    """
    run_dir.mkdir(parents=True)
    run = with_attention(load("checkpoint=none", *overrides), AttentionBackendKind.torch)
    (run_dir / "config.yaml").write_text(
        OmegaConf.to_yaml(OmegaConf.create(plain(dataclasses.asdict(run))))
    )
    (run_dir / "metrics.jsonl").write_text(
        json.dumps({"step": run.train.steps, "val_loss": 2.5, "val_tokens": 1}) + "\n"
    )


def test_a_run_whose_files_say_so_is_done(tmp_path: Path):
    """As when the sweep was killed before it could note that."""
    sweep, found = sweep_of(tmp_path, 2, 3)
    sweep.changed(1, state=JobState.running).save()
    finished_run(tmp_path / sweep.jobs[0].folder, "train.steps=2")
    finished_run(tmp_path / sweep.jobs[1].folder, "train.steps=3")
    (tmp_path / sweep.jobs[1].folder / "metrics.jsonl").write_text(
        json.dumps({"step": 2, "val_loss": 2.5}) + "\n"
    )
    again = planned(tmp_path, "", [combination(*one.overrides, checkpoint="none") for one in found])
    assert [job.state for job in again.jobs] == [JobState.done, JobState.waiting]


def test_other_settings_under_the_same_overrides_are_refused(tmp_path: Path):
    """As when a YAML file was edited in between."""
    sweep, found = sweep_of(tmp_path, 2)
    sweep.save()
    finished_run(tmp_path / sweep.jobs[0].folder, "train.steps=2", "optim.lr=0.25")
    with pytest.raises(
        ConfigError, match=r"0_steps-2 was trained with optim.lr=0.25, but it is 0.003 now"
    ):
        planned(tmp_path, "", found)


def test_where_a_job_begins(tmp_path: Path):
    sweep, found = sweep_of(tmp_path / "it's", 2)
    job, run_dir = sweep.jobs[0], tmp_path / "it's" / sweep.jobs[0].folder
    anew = job_arguments(sweep, job, found[0].run)
    ours = ["log.group='it\\'s'"]
    assert anew == ["train.steps=2", f"run_dir={quoted(run_dir)}", "log.console=false", *ours]
    finished_run(run_dir)
    assert job_arguments(sweep, job, found[0].run) == [*anew, "resume=auto"]
    (run_dir / "checkpoints/step-00000001").mkdir(parents=True)
    (run_dir / "checkpoints/latest").write_text("step-00000001")
    own = load("log.group=mine")
    assert job_arguments(sweep, job, own) == [*anew[:3], "resume=auto"]


def test_a_sweep_has_its_folder_alone_and_jobs_inherit_that(tmp_path: Path):
    with (
        locked(tmp_path),
        pytest.raises(ConfigError, match="a sweep is running there"),
        locked(tmp_path),
    ):
        pass
    with locked(tmp_path):
        job = subprocess.Popen(["sleep", "60"], close_fds=False)
    with pytest.raises(ConfigError), locked(tmp_path):
        pass
    job.kill()
    job.wait()
    with locked(tmp_path):
        pass


def test_names_do_not_depend_on_the_order_and_are_plain():
    found = [
        Combination(
            ("a=1",),
            ("data.path=[/tmp/a b/*.txt]", "+experiment=x", "optim.lr=1e-3"),
            "m",
            run=None,
            reason=None,
        )
    ] * 11
    assert (
        sweep_name(found, ["a=1", "b=2"])
        == sweep_name(found, ["b=2", "a=1"])
        != sweep_name(found, ["a=1", "b=3"])
    )
    assert list(folder_names(found))[10] == "10_path-tmpab.txt_experiment-x_lr-1e-3"
    assert list(folder_names(found))[3].startswith("03_")


@pytest.mark.parametrize("value", ["a b", "it's", "a\\b", "a\\'b", "end\\", "x=1,2", "[1]"])
def test_quoted_values_come_back_whole(value: str):
    (override,) = OverridesParser.create().parse_overrides([f"run_dir={quoted(value)}"])
    assert override.value() == value and not override.is_sweep_override()


# What a job's end and its progress look like.


@pytest.mark.parametrize(
    ("log", "code", "state", "reason"),
    [
        ("", 0, JobState.done, None),
        ("ValueError: old\ntrain.py: model.x=1: no\n", 2, JobState.failed, "model.x=1: no"),
        ("graphfold-train: model.x=1: no\n", 2, JobState.failed, "model.x=1: no"),
        (
            "Traceback\n  File\nRuntimeError: boom\n\nUserWarning: later\n",
            1,
            JobState.failed,
            "RuntimeError: boom",
        ),
        (
            "[rank1]: torch.OutOfMemoryError: CUDA out\n"
            "torch.distributed.elastic.errors.ChildFailedError: \n=====\n",
            1,
            JobState.failed,
            "torch.OutOfMemoryError: CUDA out",
        ),
        (
            "RuntimeError: lost\ntorchrun: rank 1 (process 7) was ended by SIGKILL\n",
            137,
            JobState.failed,
            "torchrun: rank 1 (process 7) was ended by SIGKILL",
        ),
        (
            "RuntimeError: boom\ntorchrun: rank 1 (process 7) ended with exit code 1\n",
            1,
            JobState.failed,
            "RuntimeError: boom",
        ),
        ("nothing to see\n", 3, JobState.failed, "exit code 3"),
        ("", -signal.SIGKILL, JobState.failed, "killed by SIGKILL"),
        ("train.py: stopped", 75, JobState.interrupted, None),
        ("", 130, JobState.interrupted, None),
        ("torchrun: ended by SIGTERM before its ranks began\n", 143, JobState.interrupted, None),
    ],
)
def test_outcome(tmp_path: Path, log: str, code: int, state: JobState, reason: str | None):
    (tmp_path / "job.log").write_text(log)
    assert outcome(code, False, tmp_path) == (state, reason)


def test_job_told_to_end_counts_as_interrupted(tmp_path: Path):
    assert (
        outcome(1, True, tmp_path)
        == (JobState.interrupted, None)
        == outcome(-signal.SIGKILL, True, tmp_path)
    )
    assert outcome(0, True, tmp_path) == (JobState.done, None)


def test_progress_is_read_from_the_end_of_the_metrics(tmp_path: Path):
    assert progress(tmp_path) == "starting"
    (tmp_path / "config.yaml").write_text("train: {steps: 1000}\n")
    rows = [
        {"step": n, "loss": 9 - n / 100, "step_ms": 100.0, "tokens_per_s": 51200.0}
        for n in range(1, 401)
    ]
    # one slow step says little about the others
    rows[-1] |= {"step_ms": 250.0, "tokens_per_s": 20480.0}
    whole = (
        "".join(json.dumps(row) + "\n" for row in rows)
        + json.dumps({"step": 400, "val_loss": 5.0})
        + "\n"
    )
    (tmp_path / "metrics.jsonl").write_text(whole + '{"step": 401, "lo')
    assert progress(tmp_path) == "step 400/1000  loss 5.000  51.20 k tokens/s  0:01:00 left"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_terminal_line_is_redrawn_and_stays_at_the_end(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "40")
    lines = JobLines(Terminal())
    lines.begin("[1/2] parallel=dp2")
    lines.redraw(["[1/2] parallel=dp2  starting"])
    lines.redraw(["a text that is longer than the terminal is wide"])
    lines.keep("failed after 0:00:01: a reason that is longer than the terminal is wide")
    drawn = lines.stream.getvalue()
    assert drawn.count("\n") == 1 and drawn.startswith("\r[1/2] parallel=dp2  starting ")
    assert all(len(part) <= 39 for part in drawn.split("\r")[1:-1])
    assert drawn.endswith(
        "\r\x1b[Jfailed after 0:00:01: a reason that is longer than the terminal is wide\n"
    )


# Jobs that another launcher submits.


def submitted(folder: Path, number: int, run_dir: Path, *logs: str) -> Path:
    """Files of submitit about one job, and what each of its tasks has printed, the one that
    ended last in front.
    """
    job = folder / f".submitit/{number}_0"
    job.mkdir(parents=True)
    (job / f"{number}_0_submitted.pkl").write_bytes(
        b"\x80\x04" + f"run_dir={quoted(run_dir)}".encode() + b"\x94."
    )
    for task, text in reversed(list(enumerate(logs))):
        (job / f"{number}_0_{task}_log.err").write_text(text)
        os.utime(job / f"{number}_0_{task}_log.err", ns=(0, 1000 - task))
    return job


BOOM, LOST = "Traceback\nValueError: boom\n", "Traceback\nRuntimeError: Connection closed by peer\n"
BY_SLURM = (
    "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2030-01-01T00:00:00 DUE TO TIME LIMIT ***"
)


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("logs", "state", "reason"),
    [
        (["train.py: model.x=1: no\n", ""], JobState.failed, "model.x=1: no"),
        ([LOST, BOOM], JobState.failed, "ValueError: boom"),
        ([f"{BY_SLURM}\nsrun: error: n1: task 0: Killed\n", LOST], JobState.failed, BY_SLURM),
        ([f"{BY_SLURM}\ntrain.py: model.x=1: no\n"], JobState.failed, "model.x=1: no"),
        (
            ["train.py: stopped by SIGTERM after step 7, saved a\n"],
            JobState.interrupted,
            "stopped by SIGTERM after step 7, saved a",
        ),
        (["nothing to see\n"], JobState.failed, "what the launcher said"),
    ],
)
def test_how_a_submitted_job_ended(tmp_path: Path, logs: list[str], state: JobState, reason: str):
    run_dir = tmp_path / "it's"
    submitted(tmp_path, 2, tmp_path / "it's another", BOOM)
    submitted(tmp_path, 3, run_dir, "train.py: an earlier start\n")
    newest = submitted(tmp_path, 4, run_dir, *logs)
    os.utime(next(newest.glob("*.pkl")), ns=(2**62, 2**62))
    assert how_it_ended(
        tmp_path, run_dir, f"run_dir={quoted(run_dir)}", problem="what the launcher said"
    ) == (state, reason)
    finished_run(run_dir)
    assert how_it_ended(tmp_path, run_dir, f"run_dir={quoted(run_dir)}", problem=None) == (
        JobState.done,
        None,
    )


def test_a_submitted_job_without_a_word(tmp_path: Path):
    state, reason = how_it_ended(tmp_path, tmp_path / "a", "run_dir='a'", problem=None)
    assert (
        state is JobState.failed
        and reason == f"ended before its last step; its output is in {tmp_path}/.submitit"
    )


def refused() -> None:
    """What submitit does when sbatch refuses a job."""
    print("sbatch: error: no such partition", file=sys.stderr)
    raise RuntimeError(
        "sbatch: error: no such partition\nsbatch: error: Batch job submission failed\n"
    )


def test_what_is_not_submitted_is_one_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(
        ConfigError,
        match=r"^hydra/launcher=slurm: no such partition; Batch job submission failed;",
    ):
        submit("slurm", refused, tmp_path, run_dirs=[tmp_path / "a"])
    assert capsys.readouterr().err == ""


def test_what_goes_wrong_later_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    def launch() -> None:
        submitted(tmp_path, 1, tmp_path / "a")
        refused()

    assert (
        submit("slurm", launch, tmp_path, run_dirs=[tmp_path / "a"])
        == "no such partition; Batch job submission failed"
    )
    assert capsys.readouterr().err == "sbatch: error: no such partition\n"
    assert submit("slurm", lambda: None, tmp_path, run_dirs=[]) is None


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ("optim.learning_rate=1e-3,3e-3",),
            "optim.learning_rate=1e-3,3e-3: is optim.lr here; did you mean optim.lr=1e-3,3e-3?",
        ),
        (("model.n_layer=2,3",), "model.n_layer=2,3: is model.num_layers here; did you mean "),
    ],
)
def test_other_names_are_replaced_with_all_their_values(words: tuple[str, ...], told: str):
    with pytest.raises(ConfigError) as refused:
        found_by("model=dense_tiny", *words)
    assert str(refused.value).startswith(told) and str(refused.value).count(",") >= 2


@pytest.mark.parametrize("name", ["file", "file/below", "../proc/x"])
def test_folder_that_cannot_be_made_is_refused(name: str, tmp_path: Path):
    (tmp_path / "file").touch()
    folder = Path("/proc/x") if "proc" in name else tmp_path / name
    why = "No such file or directory" if "proc" in name else "Not a directory"
    with pytest.raises(ConfigError) as refused:
        sweep_of(folder, 2, 3)
        with locked(folder):
            pass
    assert str(refused.value) == f"hydra.sweep.dir={folder}: cannot be used: {why}; choose another"
