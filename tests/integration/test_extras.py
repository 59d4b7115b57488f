"""The extras of the package: texts name extras that exist, and an index has what they ask for."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from app import __version__
from app.model.attention import delta_library
from app.model.layers.transformer_engine import INSTALL, LIBRARY, OLDEST
from tests.integration.installed import normal
from tests.training import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = {
    name: [Requirement(line) for line in lines]
    for name, lines in PROJECT["optional-dependencies"].items()
}
# the tool of `make sbom`: begins the file, and ends well unless told otherwise
TOOL = """#!/bin/sh
for word; do
  case $last in --output-file) out=$word ;; --pyproject) project=$word ;; esac
  last=$word
done
: > "$out"
[ -z "$FAILS" ] && grep --max-count=1 '^version = ' "$project" > "$out"
"""
NAMED = re.compile(r"(?:graphfold|['\"]\.)\[([\w,]+)\]")  # graphfold[gpu], '.[test,eval]'


def test_sbom_is_written_whole_and_has_the_version(tmp_path: Path):
    for name in ("Makefile", "pyproject.toml", "setup.py", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    for folder in ("app", ".venv", ".cache/sbom/bin"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(ROOT / "app/__init__.py", tmp_path / "app")
    (tmp_path / ".cache/sbom/bin/cyclonedx-py").write_text(TOOL)
    (tmp_path / ".cache/sbom/bin/cyclonedx-py").chmod(0o755)
    (tmp_path / "sbom.json").write_text("earlier")
    line = ["make", "--assume-old=.venv/installed", "sbom"]
    (tmp_path / ".venv/installed").touch()
    for fails, wanted in (("1", "earlier"), ("", f'version = "{__version__}"\n')):
        env = {**os.environ, "FAILS": fails}
        done = subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert bool(done.returncode) == bool(fails), done.stderr
        assert (tmp_path / "sbom.json").read_text() == wanted


def texts() -> list[Path]:
    """Files in which a user or a tool reads how to install."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    code = [path for folder in ("app", "conf") for path in (ROOT / folder).rglob("*.[py]*")]
    return [
        *pages,
        *(path for path in code if path.suffix in (".py", ".yaml")),
        ROOT / "Containerfile",
        ROOT / "Makefile",
    ]


def test_texts_name_extras_that_exist():
    named = {
        extra: path.name
        for path in texts()
        for found in NAMED.findall(path.read_text())
        for extra in found.split(",")
    }
    assert {"gpu", "slurm", "optuna", "eval", "test"} <= named.keys()
    assert named.keys() <= EXTRAS.keys(), named


def test_texts_install_transformer_engine_by_the_extra_only():
    for path in texts():
        commands = re.findall(r"pip install[^\n`)]*", path.read_text())
        direct = [line for line in commands if "transformer" in line.split("#")[0].lower()]
        assert direct == [], path


def test_extra_gpu_asks_for_the_oldest_usable_release():
    (asked,) = EXTRAS["gpu"]
    assert normal(asked.name) == normal(LIBRARY) and asked.extras == {"pytorch"}
    oldest = ".".join(map(str, OLDEST))
    assert [(each.operator, each.version) for each in asked.specifier] == [(">=", oldest)]
    assert INSTALL.startswith(f"pip install '{PROJECT['name']}[gpu]'")


def test_extra_linear_asks_for_the_oldest_usable_release():
    (asked,) = EXTRAS["linear"]
    assert normal(asked.name) == normal(delta_library.LIBRARY)
    oldest = ".".join(map(str, delta_library.OLDEST))
    assert [(each.operator, each.version) for each in asked.specifier] == [(">=", oldest)]
    assert f"pip install '{PROJECT['name']}[linear]'" == delta_library.INSTALL


def pip(*arguments: str) -> str:
    line = [sys.executable, "-m", "pip", *arguments, "--disable-pip-version-check"]
    done = subprocess.run(line, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.index
def test_index_has_what_extra_linear_asks_for():
    (asked,) = EXTRAS["linear"]
    options = ("--dry-run", "--ignore-installed", "--no-deps", "--quiet", "--report", "-")
    (found,) = json.loads(pip("install", *options, str(asked)))["install"]
    assert Version(found["metadata"]["version"]) in asked.specifier


@pytest.mark.index
def test_index_has_what_extra_gpu_asks_for():
    """Transformer Engine, and its bindings in the same release: source that pip builds."""
    (asked,) = EXTRAS["gpu"]
    options = ("--dry-run", "--ignore-installed", "--no-deps", "--quiet", "--report", "-")
    (found,) = json.loads(pip("install", *options, str(asked)))["install"]
    version = found["metadata"]["version"]
    assert Version(version) in asked.specifier
    assert "pytorch" in found["metadata"]["provides_extra"]
    needed = [Requirement(line) for line in found["metadata"]["requires_dist"]]
    (bindings,) = [each for each in needed if each.marker.evaluate({"extra": "pytorch"})]
    releases = pip("index", "versions", bindings.name).splitlines()
    (listed,) = [line for line in releases if line.startswith("Available versions: ")]
    available = listed.removeprefix("Available versions: ").split(", ")
    assert any(Version(each) in bindings.specifier for each in available), (bindings, available)
