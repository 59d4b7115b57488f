"""Names of programs and pages in what users read: as installed, and as in a checkout."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from app import programs
from app.cli import commands
from app.cli.options import unknown
from app.cli.options.arguments import Typed
from app.cli.processes.launcher import STARTED_AS, Launch, take_name
from app.errors import ConfigError, warn
from app.version import Version
from tests.cases import each
from tests.integration.spoken import CHECKOUTS, PAGE
from tests.programs import run_forked

ROOT = Path(__file__).parents[2]
PACKAGES = ("app", "graphfold", "hydra_plugins")
HELPS = [name for name in programs.COMMANDS if name != "train"]
WORDS = ("train.py", "app.cli.", "docs/")  # in a text: names that depend on the reader
# Texts of a checkout that are no message, or that `with_names` sees before they are printed.
BESIDE = {
    ("app/cli/commands.py", "app.cli."),  # a module
    ("app/cli/measure.py", "torchrun --standalone --nproc-per-node N -m app.cli.calibrate"),
    ("app/cli/processes/launcher.py", "train.py"),  # a file
    ("app/cli/start/hosted.py", "train.py"),  # a file
    ("app/cli/start/ranks.py", "app.cli.torchrun"),  # a module
}


@pytest.fixture
def by_command(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["/usr/bin/graphfold-plan"])


@pytest.mark.parametrize("installed", [True, False])
def test_help_names_what_its_reader_can_type(
    installed: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    for name in HELPS:
        monkeypatch.setattr(sys, "argv", [f"bin/graphfold-{name}" if installed else "plan.py"])
        module = import_module(f"app.cli.{name}")
        ranks = [0] if name in ("generate", "chat", "evaluate", "calibrate", "doctor") else []
        assert module.main(["--help"], *ranks) == 0
        said = capsys.readouterr().out
        assert (f"Usage:  graphfold-{name} " in said) == installed, name
        assert (f"Usage:  python -m app.cli.{name} " in said) != installed, name
        assert bool(CHECKOUTS.search(said)) != installed, (name, CHECKOUTS.search(said))
        assert max(map(len, said.replace(str(ROOT), "").splitlines())) <= 100, name
        pages = [Path(word) for word in PAGE.findall(said)]
        assert all(page.is_absolute() == installed for page in pages), pages
        assert all((ROOT / page).is_file() for page in pages), pages


def test_every_command_tells_its_version(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(commands, "stop_quietly", lambda program: None)
    for name in HELPS:
        monkeypatch.setattr(sys, "argv", [f"graphfold-{name}", "--version"])
        with pytest.raises(SystemExit) as end:
            vars(commands)[name]()
        assert not end.value.code, name
        assert capsys.readouterr().out == f"graphfold {Version.of().short}\n", name


def test_help_of_training_likewise(tmp_path: Path):
    """Started by the script that pip writes, which differs from train.py in its name alone."""
    script = tmp_path / "graphfold-train"
    script.write_text((ROOT / "train.py").read_text())
    said = run_forked(tmp_path, [sys.executable, str(script), "--help"]).stdout
    assert "Usage:  graphfold-train [group" in said and not CHECKOUTS.search(said)
    assert "torchrun --nproc-per-node N -m app.cli.train [...]" in said
    assert f"a file {ROOT}/conf/<group>" in said and f"{ROOT}/docs/sweeps.md" in said
    told = run_forked(tmp_path, [sys.executable, str(script), "train.nothing=1", "--"]).stderr
    assert told == (
        "graphfold-train: train.nothing=1: there is no such key; graphfold-train --cfg all prints "
        "the keys\n"
    )


def texts(source: str) -> Iterator[str]:
    """String constants of a module, with those of f-strings, but for docstrings and HELP."""
    nodes = [*ast.walk(ast.parse(source))]
    left_out = [
        node.body[0].value
        for node in nodes
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef)
        and isinstance(node.body[0], ast.Expr)
    ]
    left_out += [
        part
        for node in nodes
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "HELP"
        for part in ast.walk(node)
    ]
    ignored = {id(node) for node in left_out}
    for node in nodes:
        if isinstance(node, ast.Constant) and id(node) not in ignored:
            yield str(node.value)


def test_no_other_text_of_the_program_names_a_checkout():
    """Messages take names from app/programs.py, help goes through `with_names`."""
    paths = [path for name in PACKAGES for path in (ROOT / name).rglob("*.py")]
    sources = {str(path.relative_to(ROOT)): path.read_text() for path in paths}
    del sources["app/programs.py"]
    found = {
        (path, text)
        for path, source in sources.items()
        if any(word in source for word in WORDS)  # parsing all takes seconds
        for text in texts(source)
        if any(word in text for word in WORDS)
    }
    assert found == BESIDE
    pages = re.findall(r"\bpage\([\"'](.*?)[\"']\)", "".join(sources.values()))
    assert len(pages) >= 5 and all((ROOT / "docs" / page).is_file() for page in pages)


@each(
    [
        ("python train.py -m x", "graphfold-train -m x"),
        ("in train.py, or python -m app.cli.plan.", "in graphfold-train, or graphfold-plan."),
        (
            "torchrun --nproc-per-node 2 train.py a",
            "torchrun --nproc-per-node 2 -m app.cli.train a",
        ),
        ("python -m app.cli.torchrun a", "python -m app.cli.torchrun a"),
        ("read docs/moe.md, docs/*.md", f"read {ROOT}/docs/moe.md, docs/*.md"),
    ]
)
def test_names_in_a_constant_text(text: str, told: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["train.py"])
    assert programs.with_names(text) == text
    monkeypatch.setattr(sys, "argv", ["/usr/bin/graphfold-plan"])
    assert programs.with_names(text) == told


@pytest.mark.usefixtures("by_command")
def test_messages_name_the_commands(capsys: pytest.CaptureFixture[str]):
    warn("no", "plan")
    warn("no")
    assert capsys.readouterr().err == "graphfold-plan: no\ngraphfold-train: no\n"
    assert programs.speaker("torchrun") == "torchrun"
    found = unknown.no_such_key("do_train", "true")
    assert str(found) == "do_train=true: there is no such key: graphfold-train trains"
    with pytest.raises(ConfigError, match=r"there is no such option; graphfold-train --help$"):
        Typed.parse(["--zzz"])
    assert Launch.from_environment({}).command == "graphfold-plan"


def test_ranks_call_themselves_as_their_parent(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["app/cli/train.py", "model=moe_tiny"])
    for name in ("python train.py", "graphfold-mine"):  # a user's own program
        take_name({STARTED_AS: name})
    assert programs.command_name("plan") == "python -m app.cli.plan"
    take_name({STARTED_AS: "graphfold-train"})
    assert sys.argv[1:] == ["model=moe_tiny"]
    assert [programs.command_name(name) for name in ("train", "plan")] == [
        "graphfold-train",
        "graphfold-plan",
    ]


def test_a_wheel_is_known_by_its_files(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["script.py"])  # of a user, who imports graphfold
    monkeypatch.setattr(programs, "INSTALLED", True)
    assert programs.command_name("report") == "graphfold-report"


HIDDEN = "ImportError: graphfold needs its own package app, which {} hides: rename that"


@each(
    [
        ("app.py", "app.py", None),  # a program's own file: nobody else imports it
        ("run.py", "app.py", "app.py"),
        ("run.py", "app/__init__.py", "app/__init__.py"),
    ]
)
def test_import_beside_an_app_of_the_users(
    program: str, theirs: str, hides: str | None, tmp_path: Path
):
    folder = tmp_path / f"{program}-{len(theirs)}"
    (folder / theirs).parent.mkdir(parents=True)
    (folder / theirs).touch()
    (folder / program).write_text("import graphfold, app.cli\nprint(graphfold.plan.__name__)\n")
    line = [sys.executable, str(folder / program)]
    done = subprocess.run(line, capture_output=True, text=True)  # fresh: forks have loaded `app`
    if hides is None:
        assert (done.stdout, done.stderr) == ("plan\n", "")
    else:
        assert done.returncode and done.stderr.splitlines()[-1] == HIDDEN.format(folder / hides)
