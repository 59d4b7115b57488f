"""Run the commands of docs/plan.md again, and put in what they print and draw.

    python scripts/plan_docs.py

A `console` block is a command and its output; a `bash` command with out=plan/<name> is followed by docs/plan/<name>.svg.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import shutil
import tempfile
from pathlib import Path

from app.cli.plan import main

DOCS = Path(__file__).resolve().parent.parent / "docs"
CONSOLE = re.compile(r"```console\n\$ (.*)\n(?:.*\n)*?```")
PICTURE = re.compile(r"^python -m app\.cli\.plan .*out=plan/(\w+).*$", re.MULTILINE)


def printed(line: str) -> str:
    """What a command of the docs prints, without the blanks that fill its lines."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        main(shlex.split(line)[3:])
    return "".join(f"{text.rstrip()}\n" for text in out.getvalue().rstrip().splitlines())


def refreshed(text: str) -> str:
    """The page with every command's output as it is now."""
    return CONSOLE.sub(lambda block: f"```console\n$ {block[1]}\n{printed(block[1])}```", text)


def refresh() -> None:
    """Rewrite the page and its pictures."""
    page = DOCS / "plan.md"
    page.write_text(refreshed(page.read_text()))
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for command in PICTURE.finditer(page.read_text()):
            printed(command[0])
            shutil.copy(f"plan/{command[1]}/timeline.svg", DOCS / f"plan/{command[1]}.svg")


if __name__ == "__main__":
    refresh()
