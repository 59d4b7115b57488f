"""scripts/*.sbatch with stand-ins for SLURM and the container programs: the commands they give
them. tests/slurm runs them on a cluster.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cases import each
from tests.training import ROOT

SCRIPT = ROOT / "scripts/train.sbatch"
SRUN = r"""#!/bin/bash
if [ "$1" = --help ]; then [ -z "$PYXIS" ] || echo "  --container-image=IMAGE"; exit; fi
printf '%s\0' srun "$@" >>"$SAID"; printf '\1' >>"$SAID"
while [ "${1#--}" != "$1" ]; do shift; done
for node in 0 1; do
  SLURM_NODEID=$node SLURMD_NODENAME=n$((node + 1)) SLURM_CPUS_ON_NODE=16 "$@" || exit
done
"""
SCONTROL = """#!/bin/bash
if [ "$2" = hostnames ]; then echo n1; echo n2
elif [ "$2" = job ]; then echo "JobId=78 JobName=x"; echo "   Command=$SUBMITTED"
else echo "Name=$4 NodeAddr=10.0.0.${4#n} x=1"; fi
"""
SAYS = r"""#!/bin/bash
[ "$1" != -c ] || { echo "$PREFIX"; exit; }
printf '%s\0' "$(basename "$0")" "$@" "OMP_NUM_THREADS=$OMP_NUM_THREADS" >>"$SAID"
printf '\1' >>"$SAID"
"""
PROGRAMS = {"srun": SRUN, "scontrol": SCONTROL, "getent": "#!/bin/bash\nexit 2\n"}
PROGRAMS |= dict.fromkeys(("apptainer", "enroot", "python", "mine"), SAYS)


def script(
    folder: Path, *overrides: str, path: Path = SCRIPT, **env: str
) -> tuple[int, list[list[str]], str]:
    """Run the script as a job of two nodes would; returns the exit code, the words of every command
    that a stand-in got, and stderr.
    """
    programs, said = folder / "bin", folder / "said"
    programs.mkdir(exist_ok=True)
    said.write_text("")
    for name, text in PROGRAMS.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    job = {
        "SLURM_JOB_ID": "77",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_GPUS_ON_NODE": "4",
        "SLURM_CPUS_PER_TASK": "16",
        "SLURM_SUBMIT_DIR": str(folder),
        "ENVIRONMENT": "BATCH",
        "SAID": str(said),
        "PYXIS": "",
        "PATH": f"{programs}:/usr/bin:/bin",
    }
    done = subprocess.run(
        ["bash", str(path), *overrides],
        cwd=folder,
        env={**job, **env},
        capture_output=True,
        text=True,
        timeout=60,
    )
    commands = [text.split("\0")[:-1] for text in said.read_text().split("\1")[:-1]]
    return done.returncode, commands, done.stderr


def launched(words: list[str]) -> list[str]:
    """The launcher's part of a command."""
    return words[words.index("app.cli.torchrun") - 2 :]


def test_installed_package_of_the_active_python(tmp_path: Path):
    code, (srun, first, second), err = script(tmp_path, "train.steps=3")
    assert (code, err) == (0, "")
    assert srun[1:5] == ["--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=16"]
    assert first[-1] == "OMP_NUM_THREADS=4"
    assert first[:-1] == [
        *("python", "-m", "app.cli.torchrun", "--nnodes=2", "--nproc-per-node=4"),
        *("--max-restarts=2", "--rdzv-backend=c10d", "--rdzv-id=77"),
        *("--rdzv-endpoint=10.0.0.1:20077", "--rdzv-conf=is_host=1", "--local-addr=10.0.0.1"),
        *("-m", "app.cli.train", "run_dir=runs/slurm-77", "resume=auto", "train.steps=3"),
    ]
    assert "--rdzv-conf=is_host=0" in second and "--local-addr=10.0.0.2" in second
    assert "--rdzv-endpoint=10.0.0.1:20077" in second


def test_conda_and_modules_choose_the_python(tmp_path: Path):
    setup = "module() { loaded=$1; }; module load; export OMP_NUM_THREADS=7 PLACE=$UNSET$loaded"
    code, (_, first, _), _ = script(tmp_path, GRAPHFOLD_SETUP=setup, GRAPHFOLD_PYTHON="mine")
    assert code == 0 and first[0] == "mine" and first[-1] == "OMP_NUM_THREADS=7"
    code, said, err = script(tmp_path, GRAPHFOLD_SETUP="module load nowhere")
    assert code == 2 and said == [] and "train.sbatch: GRAPHFOLD_SETUP ended with 127" in err


def test_checkout_launches_train_py_with_its_venv(tmp_path: Path):
    (tmp_path / "app/cli").mkdir(parents=True)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    for name in ("train.py", "app/cli/train.py"):
        (tmp_path / name).touch()
    (tmp_path / ".venv/bin/python").write_text(SAYS)
    (tmp_path / ".venv/bin/python").chmod(0o755)
    _, (_, first, _), _ = script(tmp_path)
    assert launched(first)[:3] == ["python", "-m", "app.cli.torchrun"]
    assert "train.py" in first and "app.cli.train" not in first
    _, (_, first, _), _ = script(tmp_path, GRAPHFOLD_PYTHON="mine")
    assert first[0] == "mine" and "train.py" in first


def test_another_programs_train_py_is_no_checkout(tmp_path: Path):
    (tmp_path / "train.py").touch()
    _, (_, first, _), _ = script(tmp_path)
    assert "train.py" not in first and "app.cli.train" in first


def test_apptainer_runs_the_image_on_every_node(tmp_path: Path):
    (tmp_path / "it.sif").touch()
    extra = {"GRAPHFOLD_CONTAINER": "it.sif", "GRAPHFOLD_CONTAINER_OPTIONS": "--bind /data"}
    code, (_, first, second), _ = script(tmp_path, PYXIS="1", **extra)
    home = str(tmp_path)
    begin = ["apptainer", "exec", "--bind", home, "--pwd", home, "--nv", "--bind", "/data"]
    assert code == 0 and first[: len(begin)] == begin
    assert first[len(begin)] == second[len(begin)] == f"{home}/it.sif"
    assert launched(first)[:3] == ["python", "-m", "app.cli.torchrun"]
    _, (_, first, _), _ = script(tmp_path, SLURM_GPUS_ON_NODE="0", **extra)
    assert "--nv" not in first and "--nproc-per-node=1" in first


def test_pyxis_gets_the_image_from_srun(tmp_path: Path):
    image = "nvcr.io#me/graphfold:1"
    code, (srun, first, _), _ = script(tmp_path, PYXIS="1", GRAPHFOLD_CONTAINER=image)
    home = str(tmp_path)
    assert code == 0 and f"--container-image={image}" in srun
    assert f"--container-mounts={home}:{home}" in srun and f"--container-workdir={home}" in srun
    assert first[:3] == ["python", "-m", "app.cli.torchrun"]


def test_enroot_gets_the_variables_that_ranks_read(tmp_path: Path):
    (tmp_path / "it.sqsh").touch()
    env = {"GRAPHFOLD_CONTAINER": "it.sqsh", "GRAPHFOLD_RUNTIME": "enroot", "NCCL_IB_HCA": "mlx5"}
    code, (_, first, _), _ = script(tmp_path, OTHER="secret", **env)
    assert code == 0 and first[:5] == [
        "enroot",
        "start",
        "--rw",
        "--mount",
        f"{tmp_path}:{tmp_path}",
    ]
    passed = [first[place + 1] for place, word in enumerate(first) if word == "--env"]
    assert {"SLURM_JOB_ID", "NCCL_IB_HCA", "OMP_NUM_THREADS", "NCCL_DEBUG"} <= set(passed)
    assert "OTHER" not in passed and "PATH" not in passed
    assert first[first.index(f"{tmp_path}/it.sqsh") + 1 :][:2] == ["bash", "-c"]


@each(
    [
        ({"GRAPHFOLD_CONTAINER": "no.sif"}, "no image at GRAPHFOLD_CONTAINER=no.sif"),
        ({"GRAPHFOLD_CONTAINER": "docker://x", "GRAPHFOLD_RUNTIME": "podman"}, "one of apptainer"),
        ({"GRAPHFOLD_PYTHON": "false"}, "false in "),
    ]
)
def test_mistakes_are_said_before_srun(env: dict[str, str], told: str, tmp_path: Path):
    code, said, err = script(tmp_path, **env)
    assert code == 2 and said == [] and err.startswith("train.sbatch: ") and told in err
    assert err.count("\n") == 1


def test_within_salloc_the_current_folder_counts(tmp_path: Path):
    here = tmp_path / "here"
    here.mkdir()
    env = {"SLURM_SUBMIT_DIR": "/", "ENVIRONMENT": "", "SLURM_CPUS_PER_TASK": ""}
    code, (srun, first, _), _ = script(here, SLURM_JOB_CPUS_PER_NODE="24(x2)", **env)
    assert code == 0 and "--cpus-per-task=24" in srun and first[-1] == "OMP_NUM_THREADS=4"


@each(
    [
        ({"SUBMITTED": "{}/the package/sweep.sbatch one.txt"}, ""),
        ({"GRAPHFOLD_SETUP": "echo loaded; export PREFIX='{}'"}, ""),
        ({}, "sweep.sbatch: no train.sbatch in {}/scripts, nor beside sweep.sbatch, nor of mine: "),
    ]
)
def test_sweep_task_finds_train_sbatch(env: dict[str, str], told: str, tmp_path: Path):
    """Beside the script that was submitted, or, once the setup is done, in a folder of Python."""
    (tmp_path / "one.txt").write_text("train.steps=1\noptim.lr=1\n")
    spool = tmp_path / "slurm_script"
    shutil.copy(ROOT / "scripts/sweep.sbatch", spool)
    for name in ("the package", "share/graphfold"):
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
        shutil.copy(SCRIPT, tmp_path / name)
    env = {key: value.format(tmp_path) for key, value in env.items()}
    if "GRAPHFOLD_SETUP" not in env:  # the program is in an image
        env |= {"GRAPHFOLD_CONTAINER": "docker://x", "GRAPHFOLD_RUNTIME": "apptainer"}
    task = {"SLURM_ARRAY_JOB_ID": "77", "SLURM_ARRAY_TASK_ID": "2", "GRAPHFOLD_PYTHON": "mine"}
    code, said, err = script(tmp_path, "one.txt", "a=1", path=spool, **task, **env)
    if told:
        assert code == 2 and said == [] and err.startswith(told.format(tmp_path)), err
        return
    assert code == 0 and launched(said[1])[:3] == ["mine", "-m", "app.cli.torchrun"], err
    words = ["run_dir=sweeps/slurm-77/2", "log.group=slurm-77", "optim.lr=1", "a=1"]
    assert said[1][-5:-1] == words


def test_torchrun_binds_ranks_of_modules_to_itself():
    from torch.distributed.run import parse_args

    from app.cli.torchrun import _bind_ranks

    options = parse_args(["--nproc-per-node=1", "-m", "app.cli.train", "a=1"])
    _bind_ranks(options)
    assert options.no_python and not options.module
    words = [options.training_script, *options.training_script_args]
    assert words[-5:] == [sys.executable, "-u", "-m", "app.cli.train", "a=1"]
    assert words[-6] == str(os.getpid())


@pytest.mark.parametrize("name", ["train.sbatch", "sweep.sbatch", "train_local.sh"])
def test_scripts_are_sound_bash(name: str):
    subprocess.run(["bash", "-n", str(ROOT / "scripts" / name)], check=True)
