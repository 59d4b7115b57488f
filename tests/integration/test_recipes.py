"""The container's recipe and the hooks of commits: what they name exists, and what they run
works.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sysconfig
import tomllib
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
STEP = re.compile(r"^(FROM|WORKDIR|COPY|RUN|ENV|USER|HEALTHCHECK|ENTRYPOINT) (.+)$", re.MULTILINE)
RECIPE = STEP.findall((ROOT / "Containerfile").read_text())
HOOKS = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]


def copied() -> Iterator[tuple[list[str], str]]:
    """What is copied from the checkout in one step, and where to."""
    for step, text in RECIPE:
        if step == "COPY":
            *names, place = text.split()
            yield names, place


def test_every_line_of_the_recipe_is_understood_here():
    lines = (ROOT / "Containerfile").read_text().splitlines()
    assert [
        line for line in lines if line and not line.startswith("#") and not STEP.match(line)
    ] == []
    assert RECIPE[0][0] == "FROM" and RECIPE[-1] == ("ENTRYPOINT", '["graphfold-train"]')


def test_an_image_is_built_from_what_is_copied_and_nothing_else():
    allowed = [
        line[1:]
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    ]
    assert allowed and set(allowed) == {name for names, _ in copied() for name in names}
    assert all((ROOT / name).exists() for name in allowed)


@pytest.mark.full
def test_the_recipe_installs_commands_that_work(tmp_path: Path):
    """Its commands, in order, in a fresh environment that borrows what is installed here instead
    of loading it.
    """
    place, folder = tmp_path / "python", tmp_path
    venv.create(place, symlinks=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(place)}))
    (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    # The index, and a build environment of its own, are left out; whatever else the commands say is
    # what counts.
    settings = {
        "PIP_NO_INDEX": "1",
        "PIP_NO_BUILD_ISOLATION": "0",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }
    env = {**os.environ, **settings, "PATH": f"{place / 'bin'}:{os.environ['PATH']}"}
    env.pop("PYTHONPATH", None)
    for step, text in RECIPE:
        match step:
            case "WORKDIR":
                folder = tmp_path / text.lstrip("/")
                folder.mkdir()
            case "COPY":
                *names, to = text.split()
                for name in names:
                    copy(ROOT / name, folder / to / name if to == "./" else folder / to)
            case "RUN" if text.startswith("useradd "):
                pass  # would add a user to this host
            case "RUN":
                text = re.sub(r"^(--mount=\S+ )+", "", text)  # the builder's, not the shell's
                if "graphfold[gpu]" in text:  # a computer without GPUs has nothing to borrow
                    continue
                text = text.replace(' "cuda-toolkit[cccl,crt]" setuptools ninja', "")
                done = subprocess.run(
                    text, shell=True, cwd=folder, env=env, capture_output=True, text=True
                )
                assert done.returncode == 0, f"{text}\n{done.stdout}{done.stderr}"
    (command,) = yaml.safe_load(RECIPE[-1][1])
    asked = [shutil.which(command, path=env["PATH"]), "--cfg", "job"]
    done = subprocess.run(asked, cwd=folder, env=env, capture_output=True, text=True)
    assert asked[0] == str(place / "bin" / command) and done.returncode == 0, done.stderr
    assert "global_batch: 16" in done.stdout and list(folder.iterdir()) == []
    assert (packages / "app" / "conf" / "train.yaml").exists()


def copy(source: Path, to: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, to, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copy(source, to)


def test_hooks_run_what_make_runs_and_load_nothing():
    hooks = [hook for repo in HOOKS for hook in repo["hooks"]]
    assert {repo["repo"] for repo in HOOKS} == {"local"} and {
        hook["language"] for hook in hooks
    } == {"system"}
    makefile = (ROOT / "Makefile").read_text().replace("$(BIN)", ".venv/bin")
    made = [
        shlex.split(line)
        for line in re.findall(r"^\t@(\.venv/bin/(?:ruff|mypy) .*)$", makefile, re.MULTILINE)
    ]
    named = {hook["id"]: shlex.split(hook["entry"]) for hook in hooks}
    ruff, mypy = made
    # the hook gets the changed files
    assert named == {"ruff": ruff[:-1], "mypy": mypy} and ruff[-1] == "."


def test_types_are_strict_except_for_untyped_libraries():
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(r"^\t@\$\(BIN\)/mypy (.*)$", makefile, re.MULTILINE)[1] == "app graphfold"
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]
    assert settings["strict"] and not settings.keys() & {"ignore_missing_imports", "exclude"}
    ours = [
        part
        for part in settings["overrides"]
        if any(name.startswith("app") for name in part["module"])
    ]
    assert all(part.keys() == {"module", "disallow_untyped_calls"} for part in ours)


def test_image_runs_as_a_user_of_its_own_after_all_installs():
    steps = [step for step, _ in RECIPE]
    installs = [place for place, (_, text) in enumerate(RECIPE) if "pip install" in text]
    assert len(installs) == 2 and max(installs) < steps.index("USER")
    assert dict(RECIPE)["USER"] == "graphfold"
    # --user with a number that the image does not know would get HOME=/ from Docker; pip's cache,
    # mounted in root's home, needs root's.
    (key, _, home), place = dict(RECIPE)["ENV"].partition("="), steps.index("ENV")
    assert key == "HOME" and max(installs) < place < steps.index("USER")
    assert f" && chmod 1777 {home} && " in RECIPE[place - 1][1]
    assert all(RECIPE[place][1].startswith("--mount=type=cache,") for place in installs)
    assert json.loads(dict(RECIPE)["HEALTHCHECK"].partition("CMD ")[2])[0] == "graphfold-plan"
    built = re.findall(r"podman build (.*?) -t", (ROOT / "Containerfile").read_text())
    assert built == ["--format docker"]  # OCI images have no health check
