"""The package as `pip install .` leaves it: its files, and its commands far from any checkout."""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path
from zipfile import ZipFile

import pytest

from app.cli import commands
from app.cli.run_report.sweep_record import Sweep
from tests.cases import chosen
from tests.integration.installed import build_wheel, install, normal
from tests.integration.spoken import CHECKOUTS, PAGE
from tests.programs import run_forked
from tests.structure import imported

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TINY = (
    "model=dense_tiny",
    "log=none",
    "checkpoint=none",
    "data=text",
    "data.path=[text.txt]",
    "train.steps=2",
    "train.seq_len=32",
    "train.eval_sequences=2",
    "train.sample_tokens=0",
    "train.device=cpu",
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def programs(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(wheel, tmp_path_factory.mktemp("installed"))


def called(programs: Path, folder: Path, name: str, *arguments: str) -> str:
    """What a command prints that is called from `folder` and goes well."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [programs / name, *arguments], cwd=folder, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return done.stdout


def test_a_wheel_holds_all_that_a_run_needs(wheel: Path):
    names = set(ZipFile(wheel).namelist())
    code = {
        str(path.relative_to(ROOT))
        for folder in ("app", "graphfold", "hydra_plugins")
        for path in (ROOT / folder).rglob("*.py")
    }
    conf = {f"app/{path.relative_to(ROOT)}" for path in (ROOT / "conf").rglob("*.yaml")}
    rest = {name for name in names if ".dist-info/" not in name}
    docs = {f"app/{path.relative_to(ROOT)}" for path in (ROOT / "docs").rglob("*.[ms][dv]*")}
    typed = {"app/py.typed", "graphfold/py.typed"}
    jobs = {name for name in rest if ".data/data/share/graphfold/" in name}
    assert {Path(name).name for name in jobs} == {"train.sbatch", "sweep.sbatch"}
    assert rest - jobs == code | conf | docs | typed | {"app/cli/options/other_names.txt"}
    assert "app/docs/planning.md" in docs
    assert any(name.endswith("licenses/LICENSE") for name in names)


@pytest.mark.full
def test_a_wheel_of_a_checkout_names_its_commit(tmp_path: Path):
    wheel = build_wheel(tmp_path, commit=True)
    record = json.loads(ZipFile(wheel).read("app/commit.json"))
    assert re.fullmatch("[0-9a-f]{40}", record["commit"]) and record["dirty"] is False


def test_wheel_metadata_name_every_extra(wheel: Path):
    with ZipFile(wheel) as archive:
        (name,) = [each for each in archive.namelist() if each.endswith(".dist-info/METADATA")]
        lines = archive.read(name).decode().splitlines()
    extras = PROJECT["optional-dependencies"]
    assert {line.split()[1] for line in lines if line.startswith("Provides-Extra: ")} == {*extras}
    (gpu,) = [line for line in lines if line.endswith('extra == "gpu"')]
    assert gpu == 'Requires-Dist: transformer-engine[pytorch]>=2.20; extra == "gpu"'


def test_the_commands_follow_one_pattern():
    """graphfold-<name> is <name> in app/cli/commands.py, which runs app/cli/<name>.py."""
    modules = {
        name
        for name, value in vars(commands).items()
        if inspect.isfunction(value) and value.__module__ == commands.__name__ and name[0] != "_"
    }
    assert all((ROOT / "app" / "cli" / f"{name}.py").is_file() for name in modules)
    assert {"train", "plan", "report"} <= modules
    assert PROJECT["scripts"] == {
        f"graphfold-{name}": f"app.cli.commands:{name}" for name in modules
    }


@pytest.mark.full
def test_what_is_imported_is_what_is_asked_for():
    """Every dependency is imported by the program, and all that it imports is one, but for what
    torch brings itself.
    """
    owners = packages_distributions()
    folders = ("app", "graphfold", "hydra_plugins")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    trees = [ast.parse(path.read_text()) for path in files]
    names = {
        name.split(".")[0] for tree in trees for name in imported(ast.walk(tree))
    } - sys.stdlib_module_names
    found = {normal(owners[name][0]) for name in names - {*folders, "triton"} if name in owners}

    def packages(asked: list[str]) -> set[str]:
        return {normal(re.split("[<>=;\\[ ]", each)[0]) for each in asked}

    needed = packages(PROJECT["dependencies"])
    extras = {
        each for extra in PROJECT["optional-dependencies"].values() for each in packages(extra)
    }
    assert needed <= found and found - needed <= extras


@pytest.mark.full
@pytest.mark.parametrize("name", chosen(PROJECT["scripts"], ["graphfold-train"]))
def test_installed_commands_explain_themselves(programs: Path, tmp_path: Path, name: str):
    said = called(programs, tmp_path, name, "--help")
    assert "Graphfold" in said and ("experiment: " in said) == (name == "graphfold-train")
    assert f"Usage:  {name} " in said and not CHECKOUTS.search(said)
    pages = [Path(word) for word in PAGE.findall(said)]
    assert all(page.is_file() and page.is_relative_to(programs.parent) for page in pages)
    assert pages or name not in ("graphfold-train", "graphfold-plan", "graphfold-calibrate")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "words", "told"),
    [
        ("train", ["--zzz"], "option=--zzz: there is no such option; graphfold-train --help"),
        ("train", ["-sc"], 'type eval "$(graphfold-train -sc install=bash)"'),
        ("tokenizer", ["--otu=a"], "graphfold-tokenizer --help; did you mean --out?"),
        ("report", [], "for example graphfold-report sweeps/<name>"),
    ],
)
def test_installed_commands_advise_each_other(
    programs: Path, tmp_path: Path, name: str, words: list[str], told: str
):
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    line = [programs / f"graphfold-{name}", *words]
    done = subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith(f"graphfold-{name}: ")
    assert done.stderr.endswith(f"{told}\n") and done.stderr.count("\n") == 1


@pytest.mark.full
def test_an_installed_program_of_the_name_app(programs: Path, tmp_path: Path):
    (tmp_path / "app.py").write_text("import graphfold; print(graphfold.plan.__name__)")
    assert called(programs, tmp_path, "python", "app.py") == "plan\n"


@pytest.mark.full
def test_an_installed_plan(programs: Path, tmp_path: Path):
    said = called(programs, tmp_path, "graphfold-plan", "what=groups", "+experiment=small")
    assert "parameters" in said and list(tmp_path.iterdir()) == []


def test_an_installed_package_plans(programs: Path, tmp_path: Path):
    code = "import graphfold; print(repr(graphfold.plan(['+experiment=small'])))"
    said = called(programs, tmp_path, "python", "-c", code)
    assert said.startswith("<Plan of small on 1 ranks: ") and list(tmp_path.iterdir()) == []


@pytest.mark.full
def test_an_installed_command_completes_what_is_typed(programs: Path, tmp_path: Path):
    rule = called(programs, tmp_path, "graphfold-train", "-sc", "install=bash")
    assert re.search(
        r"complete -o nospace -o default -F hydra_bash_completion graphfold-train$", rule
    )
    shell = (
        f"export PATH={programs}:$PATH COMP_LINE='graphfold-train schedule=z' COMP_POINT=26; "
        "graphfold-train -sc query=bash"
    )
    done = subprocess.run(
        ["bash", "-c", shell], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["schedule=zero_bubble_h1", "schedule=zero_bubble_v"]


@pytest.mark.full
def test_options_in_the_place_of_ours(programs: Path, tmp_path: Path):
    """A path begins at the current folder, or in a checkout at its train.py."""
    shutil.copytree(ROOT / "conf", tmp_path / "mine")
    text = (ROOT / "conf/train.yaml").read_text()
    (tmp_path / "mine/train.yaml").write_text(text.replace("steps: null", "steps: 77"))
    asked = ("--cfg", "job", "--package", "train", "model=dense_tiny", "--config-path")
    assert "\nsteps: 77\n" in called(programs, tmp_path, "graphfold-train", *asked, "mine")
    line = [sys.executable, str(ROOT / "train.py"), *asked, "conf"]
    done = run_forked(tmp_path, line)
    assert done.stderr == "" and "\nsteps: null\n" in done.stdout


@pytest.mark.full
def test_installed_commands_train_sweep_and_report(programs: Path, tmp_path: Path):
    """Ranks and the jobs of a sweep are further processes; what they write lies in the current
    folder.
    """
    (tmp_path / "text.txt").write_text("All that a run needs is a little text.\n" * 500)
    # a program's own folder is no place to import from
    for trap in ("app", "plan", "report", "torch"):
        (tmp_path / f"{trap}.py").write_text("raise SystemExit('imported from the current folder')")
    called(programs, tmp_path, "graphfold-train", *TINY, "run_dir=runs/two", "parallel.dp=2")
    assert (tmp_path / "runs" / "two" / "ended.json").exists()
    called(
        programs,
        tmp_path,
        "graphfold-train",
        "-m",
        *TINY,
        "parallel=dp2",
        "hydra.sweep.dir=sweeps/two",
    )
    sweep = Sweep.load(tmp_path / "sweeps" / "two")
    assert sweep is not None and [job.state.value for job in sweep.jobs] == ["done"]
    assert sweep.command.startswith("graphfold-train -m ")
    assert "done" in called(programs, tmp_path, "graphfold-report", "sweeps/two")
    (tmp_path / "app.py").unlink()  # Python itself imports from the folder of a user's program
    (tmp_path / "torch.py").unlink()
    words = [*TINY, "run_dir=runs/three", "parallel.dp=2", "optim.lr=1e15"]
    code = f"""import graphfold
try: graphfold.train({[*words, "train.steps=20", "train.on_bad_step=stop"]})
except graphfold.RunError as error: print(error.code, error.folder)"""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    line = [programs / "python", "-c", code]
    done = subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split()[-2:] == ["65", str(tmp_path / "runs/three")]
