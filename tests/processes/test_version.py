"""Version and git commit of the program, in a run's files and when it resumes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from app import __version__, version
from app.config import Run
from app.engine.files.checkpoints import newest_checkpoint, parse_manifest
from app.engine.files.run_folder import plain
from app.engine.run import trainer
from app.version import RECORD, VERSION, Version
from tests.distributed import run_distributed
from tests.training import composed, corpus_in, train_rank

OLD = Version("0.1.0", "a" * 40, False)
NEW = Version("0.2.0", "b" * 40, True)
NONE = Version(__version__, None, None)


def git(folder: Path, *command: str) -> str:
    own = ("-c", "user.name=x", "-c", "user.email=x@y", "-c", "init.defaultBranch=main")
    line = ["git", "-C", str(folder), *own, *command]
    return subprocess.run(line, check=True, capture_output=True, text=True).stdout.strip()


def checkout_in(folder: Path) -> Path:
    """A repository that tracks a package `app` and a file beside it; returns the package."""
    package = folder / "app"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (folder / "train.py").write_text("1\n")
    git(folder, "init")
    git(folder, "add", ".")
    git(folder, "commit", "-m", "first")
    return package


def test_a_checkout_has_its_commit(tmp_path: Path):
    package = checkout_in(tmp_path / "clone")
    commit = git(package, "rev-parse", "HEAD")
    assert Version.of(package) == Version(__version__, commit, False)
    (package / "new.py").touch()
    assert Version.of(package).dirty is False, "as `git describe --dirty` has it"
    (tmp_path / "clone/train.py").write_text("2\n")
    assert Version.of(package) == Version(__version__, commit, True)
    (tmp_path / "app").symlink_to(package)
    assert Version.of(tmp_path / "app").commit == commit, "wherever it is reached from"


def test_an_installed_package_has_the_commit_of_its_checkout(tmp_path: Path):
    package, installed = checkout_in(tmp_path / "clone"), tmp_path / "lib/app"
    installed.mkdir(parents=True)
    assert Version.of(installed) == NONE
    (installed / RECORD).write_text(json.dumps(Version.of(package).record()))
    commit = git(package, "rev-parse", "HEAD")
    assert Version.of(installed) == Version(__version__, commit, False)
    for broken in ("", "[]", "{}", '{"commit": 1, "dirty": true}'):
        (installed / RECORD).write_text(broken)
        assert Version.of(installed) == NONE
    (package / RECORD).write_text('{"commit": "old", "dirty": false}')
    assert Version.of(package).commit == commit, "git knows better"


def test_a_repository_is_only_read(tmp_path: Path):
    package = checkout_in(tmp_path)
    index, train = tmp_path / ".git/index", tmp_path / "train.py"
    os.utime(train, (1, 1))  # git would note that it has looked
    (tmp_path / ".git/ran").write_text("#!/bin/sh\ntouch .git/it-ran\n")
    (tmp_path / ".git/ran").chmod(0o755)
    git(tmp_path, "config", "core.fsmonitor", ".git/ran")
    before = index.read_bytes()
    assert Version.of(package).dirty is False
    assert index.read_bytes() == before and not (tmp_path / ".git/it-ran").exists()


def test_a_repository_around_an_installation_does_not_count(tmp_path: Path):
    checkout_in(tmp_path)
    installed = tmp_path / "venv/lib/app"
    installed.mkdir(parents=True)
    (installed / "__init__.py").touch()
    assert Version.of(installed) == NONE
    git(tmp_path, "add", "--intent-to-add", ".")
    assert Version.of(installed) == NONE
    git(tmp_path, "init", str(tmp_path / "empty"))  # no commit yet
    shutil.copytree(installed, tmp_path / "empty/app")
    assert Version.of(tmp_path / "empty/app") == NONE


def test_a_shell_that_works_on_another_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    package, other = checkout_in(tmp_path / "ours"), checkout_in(tmp_path / "other").parent
    git(other, "commit", "--allow-empty", "-m", "second")
    commit = git(package, "rev-parse", "HEAD")
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(other))
    monkeypatch.setenv("GIT_INDEX_FILE", str(other / ".git/index"))
    assert Version.of(package) == Version(__version__, commit, False)


def test_a_checkout_of_another_user_is_ours_if_we_run_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    package = checkout_in(tmp_path / "clone")
    deeper = checkout_in(tmp_path / "clone/lib").parent  # not a repository of its own
    shutil.rmtree(deeper / ".git")
    git(tmp_path / "clone", "add", ".")
    git(tmp_path / "clone", "commit", "-m", "second")
    commit = git(package, "rev-parse", "HEAD")
    assert Version.of(deeper / "app").commit == commit
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")  # what git's own tests set
    assert Version.of(package).commit == commit
    assert Version.of(deeper / "app") == NONE, "a repository farther up may be anybody's"


@pytest.mark.parametrize("programs", [(), ("env",)])
def test_version_without_git_has_no_commit(
    programs: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
):
    package = checkout_in(tmp_path / "clone")
    for name in programs:
        (tmp_path / name).symlink_to(shutil.which(name) or "")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert Version.of(package) == NONE and capfd.readouterr() == ("", "")
    assert str(NONE) == f"{__version__}, commit not known"


def test_a_git_that_hangs_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    package = checkout_in(tmp_path / "clone")
    (tmp_path / "git").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(version, "TIMEOUT_S", 0.05)
    assert Version.of(package) == NONE


def test_version_changes_are_reported():
    assert OLD.change_since(OLD.record()) is None and OLD.change_since(None) is None
    assert NEW.change_since(OLD.record()) == (
        "graphfold: 0.1.0, commit aaaaaaaaaa -> 0.2.0, commit bbbbbbbbbb, with uncommitted changes"
    )
    assert (
        replace(OLD, dirty=True)
        .change_since(OLD.record())
        .endswith("aaa, with uncommitted changes")
    )
    assert NONE.change_since(OLD.record()).endswith("-> 0.1.0, commit not known")


@pytest.mark.parametrize("record", [[], "x", 3, {}, {"commit": 7}, {"version": [], "more": {}}])
def test_foreign_version_record_is_ignored(record: object):
    assert isinstance(NEW.change_since(record), str | None)


def trained_by(rank: int, run: Run, program: Version) -> None:
    trainer.Version = SimpleNamespace(of=lambda: program)
    train_rank(rank, run, {})


@pytest.mark.full
def test_a_run_records_its_program_and_resumes_with_another(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    folder, corpus = tmp_path / "run", corpus_in(tmp_path / "corpus")
    for steps, program in ((1, OLD), (2, NEW), (3, NEW)):
        resume = "null" if program is OLD else "auto"
        settings = (f"train.steps={steps}", f"run_dir={folder}", f"resume={resume}")
        run = composed((*corpus, *settings, "log.console=true", "checkpoint.interval=1"), 1)
        run_distributed(trained_by, 1, run, program)
        said, config = capfd.readouterr().out, folder / "config.yaml"
        assert said.count("changed  graphfold: 0.1.0") == (steps == 2)
        assert config.read_text().startswith(f"# Graphfold {program}\nmodel:\n")
        assert OmegaConf.to_container(OmegaConf.load(config)) == plain(asdict(run))
        assert json.loads((folder / "plan.json").read_text())[VERSION] == program.record()
        saved = newest_checkpoint(folder)
        assert saved.name == f"step-0000000{steps}"
        assert parse_manifest(saved)[VERSION] == program.record()
