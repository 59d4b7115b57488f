"""docs/tutorial.md: its commands run in their order, and print what it shows."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from app.cli.options.arguments import Typed
from app.cli.options.compose import load_typed
from scripts.plan_docs import CONSOLE, refreshed
from tests.training import ROOT

PAGE = (ROOT / "docs/tutorial.md").read_text()
INSTALL = (
    "git clone",
    "cd ",
    "make train",
    "source ",
)  # what the tests' own environment stands for
NUMBER = re.compile(r"\d[\d.,:]*")
LEFT_OUT = "…"


@dataclass(frozen=True)
class Block:
    """A script, and what the page shows of its output."""

    script: str
    shown: tuple[str, ...]


def blocks() -> list[Block]:
    found = []
    for kind, text in re.findall(r"```(bash|console)\n(.*?)```", PAGE, re.DOTALL):
        if kind == "console":
            command, *shown = text.splitlines()
            found.append(Block(command.removeprefix("$ "), tuple(shown)))
        elif not text.startswith(INSTALL):
            found.append(Block(text, ()))
    return found


BLOCKS = blocks()
TRAINING = [
    line
    for block in BLOCKS
    for line in block.script.splitlines()
    if line.startswith("python train.py")
]
SLIPS = [
    block.script for block in BLOCKS if any(line.startswith("train.py: ") for line in block.shown)
]


def pattern(shown: tuple[str, ...]) -> str:
    """What the output must match: any numbers, and anything where lines are left out."""
    parts = []
    for line in shown:
        if line == LEFT_OUT:
            parts.append(r"(?:.*\n)*?")
        else:
            text = " ".join(NUMBER.sub("0", line).split())
            parts.append(re.escape(text).replace("0", r"\S+") + r"\n")
    return "".join(parts)


def plain(text: str) -> str:
    """Lines without what fills them, as they are compared."""
    return "".join(f"{' '.join(line.split())}\n" for line in text.splitlines())


def test_there_is_a_command_for_every_step():
    assert len(BLOCKS) >= 10 and len(TRAINING) >= 6 and len(SLIPS) == 1
    assert len(CONSOLE.findall(PAGE)) == 1


@pytest.mark.parametrize(
    "line", [line for line in TRAINING if line not in SLIPS and "my_run" not in line]
)
def test_a_configuration_is_sound(line: str):
    words = [word for word in shlex.split(line)[2:] if not word.startswith("resume")]
    assert load_typed(Typed.parse(words)).train.steps > 0


@pytest.mark.parametrize("block", list(CONSOLE.finditer(PAGE)), ids=lambda block: block[1])
def test_the_page_shows_what_is_planned(block: re.Match[str]):
    """scripts/plan_docs.py puts it in anew."""
    assert refreshed(block[0]).splitlines() == block[0].splitlines()


def test_the_suggestion_that_is_typed_is_the_first_that_is_shown():
    (shown,) = re.findall(r"^[\d.]+ +\+\d+ % +(.+)$", PAGE, re.MULTILINE)[:1]
    assert f"train.global_batch=64 {shown}\n```" in PAGE


@pytest.mark.full
def test_the_page_from_its_beginning_to_its_end(tmp_path: Path):
    folder = tmp_path / "graphfold"
    folder.mkdir()
    for name in ("app", "conf", "hydra_plugins", "train.py", "README.md"):
        (folder / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "docs", folder / "docs")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "HOME": str(tmp_path), "PATH": path, "CUDA_VISIBLE_DEVICES": ""}
    env.pop("COLUMNS", None)  # the page shows tables as wide as without it
    refused = ("model.num_layer=2", "what=memory")  # a mistake, and a run that does not fit
    for block in BLOCKS:
        done = subprocess.run(
            ["bash", "-c", block.script],
            cwd=folder,
            env=env,
            capture_output=True,
            text=True,
            timeout=300,
        )
        said = plain(done.stdout + done.stderr)
        fails = block.shown and any(word in block.script for word in refused)
        assert (done.returncode != 0) == bool(fails), said
        assert re.fullmatch(pattern(block.shown) if block.shown else r"(?s:.*)", said), (
            f"{block.script}\n{said}"
        )
