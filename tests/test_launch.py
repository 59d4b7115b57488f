"""Values that a process takes from the environment of torchrun or SLURM, and the scripts."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from app.cli.processes.environment import torch_settings
from app.cli.processes.home import PACKAGE
from app.cli.processes.launcher import STARTED_AS, Launch, started_as
from app.cli.start.launch import carry_out, submitted_job_ends_quietly
from app.cli.start.ranks import start_ranks, wait_for_ranks
from app.engine.files.signals import stop_signals
from app.errors import ConfigError
from app.shell import shell_word
from tests.programs import run_forked
from tests.training import composed, wait_for

ROOT = Path(__file__).parent.parent
BY_HAND = Launch(0, 0, None, one_host=True)
SCRIPTS = sorted(path for path in (ROOT / "scripts").iterdir() if path.suffix in (".sh", ".sbatch"))
TORCHRUN = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "29500",
}
TASK = {
    "SLURM_JOB_ID": "12345",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
}


def ask(*command: str) -> str:
    """scontrol of a cluster whose names do not resolve."""
    answers = {
        "hostnames": "n1.nowhere.invalid\nn2.nowhere.invalid\n",
        "node": "NodeName=n1 NodeAddr=127.0.0.9 Port=17001\n",
    }
    return answers[command[2]]


def test_by_hand():
    assert Launch.from_environment({}) == BY_HAND


def test_torchrun():
    assert Launch.from_environment(TORCHRUN) == Launch(3, 1, 4, master=("n1", 29500))
    agent = Launch.from_environment(TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert agent == Launch(3, 1, 4, master=("n1", 29500), agent_store=True)
    one = Launch.from_environment(TORCHRUN | {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"})
    assert one.master == ("n1", 29500), "a restarted rank without others looks into the store too"


def test_tasks_of_slurm_meet_at_the_first_node():
    job = TASK | {"SLURM_RESTART_COUNT": "2", "SUBMITIT_EXECUTOR": "slurm"}
    assert Launch.from_environment(job, ask) == Launch(
        3, 1, 4, master=("127.0.0.9", 22345), requeues=2, submitted=True
    )
    assert Launch.from_environment(TASK, ask).launched and not Launch.from_environment({}).launched
    assert Launch.from_environment(TASK | {"MASTER_PORT": "4000"}, ask).master == (
        "127.0.0.9",
        4000,
    )
    resolves = Launch.from_environment(TASK, lambda *command: "localhost\nother\n")
    assert resolves.master == ("localhost", 22345)


def test_tasks_of_slurm_meet_at_master_addr_where_it_is_set():
    def no_scontrol(*command: str) -> str:
        return subprocess.run(["scontrol-is-missing"], capture_output=True, text=True).stdout

    found = Launch.from_environment(TASK | {"MASTER_ADDR": "n1"}, no_scontrol)
    assert found.master == ("n1", 22345)
    fails = subprocess.CalledProcessError(1, "scontrol", stderr="slurm_load_node error")
    for answer, why in (
        (no_scontrol, "No such file or directory"),
        (lambda *command: raised(fails), "slurm_load_node error"),
        (lambda *command: "", "its answer names none"),
        (lambda *command: "n1.nowhere.invalid\n", "its answer names none"),
    ):
        with pytest.raises(ConfigError) as refused:
            Launch.from_environment(TASK, answer)
        assert str(refused.value) == (
            "MASTER_ADDR=: is not set, and scontrol cannot tell the first of the nodes n[1-2] "
            f"here: {why}; set it to the host of rank 0 before srun"
        )


def raised(error: Exception) -> str:
    raise error


def test_torchrun_within_slurm_is_torchrun():
    assert Launch.from_environment(TASK | TORCHRUN, ask) == Launch(3, 1, 4, master=("n1", 29500))


def test_what_slurm_started_alone_may_start_ranks_itself():
    assert Launch.from_environment(TASK | {"SLURM_NTASKS": "1"}, ask).world_size is None, (
        "a single task"
    )
    batch_script = {name: value for name, value in TASK.items() if name != "SLURM_STEP_ID"}
    assert Launch.from_environment(batch_script, ask).world_size is None


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"RANK": "x"}, "RANK=x: must be a whole number"),
        (
            {"RANK": "5"},
            "RANK=5: must be from 0 to 3: WORLD_SIZE is 4",
        ),
        ({"RANK": "-1"}, "RANK=-1: must be from 0 to 3"),
        ({"LOCAL_RANK": "4"}, "LOCAL_RANK=4: must be from 0 to 3"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE=: must be a whole number"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT=99999: must be 1 to 65535"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT=http: must be a whole number"),
        (
            {"MASTER_ADDR": ""},
            "MASTER_ADDR=: is not set, but RANK and WORLD_SIZE are",
        ),
        ({"SLURM_RESTART_COUNT": "no"}, "SLURM_RESTART_COUNT=no: must be a whole number"),
    ],
)
def test_an_environment_that_cannot_be_true(changed: dict[str, str], said: str):
    with pytest.raises(ConfigError) as refused:
        Launch.from_environment(TORCHRUN | changed)
    assert str(refused.value).startswith(said)


def test_torch_settings_spin_for_a_moment():
    assert torch_settings({})["GOMP_SPINCOUNT"] == "2000"
    for chosen in ({"OMP_WAIT_POLICY": "passive"}, {"GOMP_SPINCOUNT": "7"}):
        assert "GOMP_SPINCOUNT" not in torch_settings(chosen)


@pytest.fixture
def same_handlers() -> Iterator[None]:
    """Give signals the handlers back that they had: what starts ranks ends soon after them."""
    before = {number: signal.getsignal(number) for number in stop_signals()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("same_handlers")
def test_ranks_and_their_launcher_take_the_threads_policy(monkeypatch: pytest.MonkeyPatch):
    """Variables that `carry_out` sets are there when torch is loaded, and are passed on."""
    from app.engine.run import train

    run, env = composed(["log=none"], 1), dict[str, str]()
    monkeypatch.setattr(train, "train", lambda *_, **__: int(env["GOMP_SPINCOUNT"]))
    alone = Launch(0, 0, 1, one_host=True)
    assert carry_out(run, alone, "train.py", env=env) == 2_000
    started: list[dict[str, str]] = []
    process = SimpleNamespace(wait=lambda: 0)
    take = lambda *_, env: started.append(env) or process  # noqa: E731
    monkeypatch.setattr(subprocess, "Popen", take)
    assert start_ranks(2, "train.py", [], env=env) == 0
    assert started[0]["GOMP_SPINCOUNT"] == "2000"


def test_such_an_environment_costs_one_line(tmp_path: Path):
    line = [sys.executable, str(ROOT / "train.py")]
    done = run_forked(tmp_path, line, env={**os.environ, **TORCHRUN, "RANK": "x"})
    said = "train.py: RANK=x: must be a whole number; torchrun and srun set it\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)


def test_ranks_of_one_host_keep_to_its_loopback():
    assert set(BY_HAND.network()) == {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"}
    assert (
        Launch.from_environment(TORCHRUN | {"LOCAL_WORLD_SIZE": "4"}).network() == BY_HAND.network()
    )
    assert Launch.from_environment(TORCHRUN | {"LOCAL_WORLD_SIZE": "2"}).network() == {}
    step = Launch.from_environment(TASK | {"SLURM_STEP_NUM_NODES": "1"}, ask)
    assert step.network() == BY_HAND.network() and step.master == ("127.0.0.1", 22345)
    assert Launch.from_environment(TASK | {"SLURM_STEP_NUM_NODES": "2"}, ask).network() == {}


# A port that another program has, for each way to start ranks by which a user can choose one.


@pytest.fixture
def taken() -> Iterator[int]:
    """A port at which another program listens."""
    with socket.create_server(("", 0)) as program:
        yield program.getsockname()[1]


@pytest.mark.every(2)
@pytest.mark.parametrize(
    "started",
    [
        {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"},
        TASK | {"SLURM_NTASKS": "2", "SLURM_PROCID": "0"},
    ],
    ids=["by hand", "by srun"],
)
def test_a_port_taken_costs_ranks_that_others_started_one_line(
    tmp_path: Path, taken: int, started: dict[str, str]
):
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho localhost\n")
    (tmp_path / "scontrol").chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "MASTER_PORT": str(taken), **started}
    command = [sys.executable, str(ROOT / "train.py"), "run_dir=run"]
    done = run_forked(tmp_path, command, env)
    rule = "another program on this host uses this port; choose a free one"
    said = f"train.py: MASTER_PORT={taken}: {rule}\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said) and not (
        tmp_path / "run"
    ).exists()


@pytest.mark.full
def test_self_started_ranks_meet_at_a_free_port(tmp_path: Path, taken: int):
    """Whatever the environment says: `python train.py parallel.dp=2` is not asked for a port."""
    (tmp_path / "ranks.py").write_text(
        "import os; open(os.environ['RANK'], 'w').write(os.environ['MASTER_PORT'])"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)} | dict.fromkeys(
        ("MASTER_PORT", "PET_MASTER_PORT"), str(taken)
    )
    assert Launch.from_environment(env) == BY_HAND
    start = (
        "import os, sys; from app.cli.start.ranks import start_ranks; "
        "sys.exit(start_ranks(2, 'ranks.py', [], os.environ))"
    )
    done = subprocess.run(
        [sys.executable, "-c", start], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "0").read_text() == (tmp_path / "1").read_text() != str(taken)


STARTS_RANKS = """
import os, pathlib, signal, sys
from app.cli.start.ranks import start_ranks
signal.signal(signal.SIGUSR2, lambda number, frame: pathlib.Path("requeued").touch())
sys.exit(start_ranks(2, "ranks.py", [], os.environ))
"""
STOPPED_RANK = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGUSR2, lambda number, frame: sys.exit(75))
pathlib.Path(os.environ["RANK"]).touch()
time.sleep(60)
"""


@pytest.mark.full
def test_ranks_stop_before_submitit_hears_of_its_signal(tmp_path: Path):
    """Its handler puts the job back into the queue, and ends it, where one process starts the
    ranks.
    """
    (tmp_path / "ranks.py").write_text(STOPPED_RANK)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", STARTS_RANKS], cwd=tmp_path, env=env)
    wait_for(lambda: (tmp_path / "0").exists() and (tmp_path / "1").exists())
    assert not (tmp_path / "requeued").exists()
    process.send_signal(signal.SIGUSR2)
    assert process.wait(60) == 75 and (tmp_path / "requeued").exists()


@pytest.mark.usefixtures("same_handlers")
@pytest.mark.parametrize(("code", "hears"), [(75, True), (140, True), (-12, True), (1, False)])
def test_submitit_hears_of_its_signal_also_before_ranks_began(code: int, hears: bool):
    heard: list[int] = []
    signal.signal(signal.SIGUSR2, lambda number, frame: heard.append(number))

    def told() -> int:
        signal.raise_signal(signal.SIGUSR2)
        return code

    process: Any = SimpleNamespace(wait=told, send_signal=lambda number: None)
    assert wait_for_ranks(process) == (code if code > 0 else 140)
    assert heard == [signal.SIGUSR2] * hears


def test_a_submitted_job_ends_where_a_program_fails(capsys: pytest.CaptureFixture[str]):
    job, program = Launch(0, 0, None, submitted=True), Launch(0, 0, None)
    for error in (SystemExit(2), SystemExit(75), ValueError("said in the log")):
        with submitted_job_ends_quietly(job):
            raise error
        with pytest.raises(type(error)), submitted_job_ends_quietly(program):
            raise error
    assert capsys.readouterr().err.count("ValueError: said in the log") == 1
    with pytest.raises(SystemExit), submitted_job_ends_quietly(job):
        raise SystemExit(-1)  # submitit's own: the job is back in the queue, and not over


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_explain_themselves(script: Path):
    for option in ("--help", "-h"):
        done = subprocess.run([str(script), option], capture_output=True, text=True, cwd="/")
        assert (done.returncode, done.stderr) == (0, "")
        assert f"scripts/{script.name}" in done.stdout and "#" not in done.stdout.splitlines()[0]
        assert "set -e" not in done.stdout and "SBATCH" not in done.stdout


@pytest.mark.parametrize(
    "script", [path for path in SCRIPTS if path.suffix == ".sbatch"], ids=lambda path: path.name
)
def test_batch_scripts_outside_of_a_job(script: Path, tmp_path: Path):
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SLURM_")}
    for name in ("bash", "dirname"):
        (tmp_path / name).symlink_to(Path("/bin") / name)
    done = subprocess.run(
        [str(script)], capture_output=True, text=True, env=environment | {"PATH": str(tmp_path)}
    )
    assert done.returncode == 2 and done.stderr.startswith(
        f"{script.name}: no SLURM on this machine: sbatch is missing; "
    )
    (tmp_path / "sbatch").symlink_to("/bin/true")
    done = subprocess.run(
        [str(script)], capture_output=True, text=True, env=environment | {"PATH": str(tmp_path)}
    )
    assert (
        done.returncode == 2
        and ", not a command: sbatch " in done.stderr
        and done.stderr.count("\n") == 1
    )


@pytest.mark.parametrize(
    ("program", "command"),
    [
        ("train.py", "python train.py"),
        ("a b/train.py", "python 'a b/train.py'"),
        ("/usr/bin/graphfold-train", "graphfold-train"),
        (str(PACKAGE / "cli/train.py"), "python train.py"),
    ],
)
def test_command_is_told_as_it_was_typed(program: str, command: str):
    assert started_as(program) == command


def test_command_of_ranks_is_that_of_their_parent(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.argv", ["train.py"])
    assert Launch.from_environment({}).command == "python train.py"
    assert Launch.from_environment({STARTED_AS: "graphfold-train"}).command == "graphfold-train"
    several = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "n1", "MASTER_PORT": "29500"}
    assert Launch.from_environment(several).command == "with the same launcher: python train.py"


@pytest.mark.parametrize(
    "value",
    ["runs/a", "a b", "a=b", "\u00fc", "a$b", "a${b}", "\\${b}", "007", "true", "it's", 'q"x',
     "x\\", "[a]", "a\nb", "-x", "#x", "`x`", "a!b"],
)  # fmt: skip
def test_typed_words_come_back_from_shell_and_hydra(value: str):
    said = subprocess.run(
        ["bash", "-c", f"printf %s {shell_word('run_dir', value)}"], capture_output=True, text=True
    ).stdout
    parsed = OverridesParser.create().parse_override(said).value()
    assert OmegaConf.create({"x": parsed}).x == value
