"""Blocks of a page of docs/: the commands that it shows, run in their order, and their outputs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.training import ROOT

NUMBER = re.compile(r"\d[\d.,:]*")
LEFT_OUT = "…"
CLONE = ("app", "conf", "graphfold", "hydra_plugins", "train.py", "README.md")
FAILS = ("train.py: ", "plan: ", "Does not fit")  # begin lines of output with a non-zero exit code


@dataclass(frozen=True)
class Block:
    """A script, and the output that the page shows below it."""

    script: str
    shown: tuple[str, ...] = ()

    @property
    def fails(self) -> bool:
        return any(line.startswith(FAILS) for line in self.shown)


# notices of what takes long on a busy computer
SLOW = re.compile(r"^.*: (?:\d+ s so far|done in \d+ s)\n", re.MULTILINE)


def blocks_of(page: Path) -> list[Block]:
    """Return the `bash` and `console` blocks; of the latter, the first line is the command."""
    found = []
    for kind, text in re.findall(r"```(bash|console)\n(.*?)```", page.read_text(), re.DOTALL):
        command, *shown = text.splitlines()
        if kind == "console":
            found.append(Block(command.removeprefix("$ "), tuple(shown)))
        else:
            found.append(Block(text))
    return found


def lines_of(blocks: Iterable[Block], word: str = "") -> list[str]:
    """Return the lines of all scripts that contain `word`, without comments."""
    lines = [line for block in blocks for line in block.script.replace("\\\n", " ").splitlines()]
    return [line.split("  #")[0].strip() for line in lines if word in line and line.strip()]


def plain(text: str) -> str:
    """Return lines with single blanks and rules of one character, for comparison."""
    return "".join(f"{re.sub('─+', '─', ' '.join(line.split()))}\n" for line in text.splitlines())


def pattern(shown: Iterable[str]) -> str:
    """Return a regular expression: any numbers for numbers, any lines for `…`."""
    parts = []
    for line in shown:
        if line == LEFT_OUT:
            parts.append(r"(?:.*\n)*?")
        else:
            text = NUMBER.sub("0", plain(line) or "\n")
            parts.append(re.escape(text).replace("0", r"\S+"))
    return "".join(parts)


def clone_in(folder: Path) -> Path:
    """Fill a folder with links to what a clone has."""
    folder.mkdir(exist_ok=True)
    for name in CLONE:
        (folder / name).symlink_to(ROOT / name)
    return folder


def run_block(block: Block, folder: Path, home: Path | None = None) -> str:
    """Run a block in `folder` on the CPU; return stdout and stderr after checking them."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "CUDA_VISIBLE_DEVICES": "", "HOME": str(home or folder)}
    env["OMP_NUM_THREADS"] = "2"  # pages show a computer with two cores
    env.pop("COLUMNS", None)  # pages show tables as wide as without it
    done = subprocess.run(
        ["bash", "-ec", block.script],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=600,
    )
    said = done.stdout + done.stderr
    assert (done.returncode != 0) == block.fails, f"{block.script}\n{said}"
    assert "Traceback" not in said, said
    if block.shown:
        quick = SLOW.sub("", plain(said))
        assert re.fullmatch(pattern(block.shown), quick), f"{block.script}\n{said}"
    return said
