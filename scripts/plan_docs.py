"""Run the plans that README.md and some pages of docs/ show, and put in what they print and draw.

    python scripts/plan_docs.py

A `console` block that begins with the plan command is that and its output; a `bash` command with
out=plan/<name> draws docs/<page>/<name>.svg.
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

ROOT = Path(__file__).resolve().parent.parent
DOCS, README = ROOT / "docs", ROOT / "README.md"
TEXTS = (README, DOCS / "tutorial.md", DOCS / "planning.md")  # pages without pictures
PAGES = ("parallelism",)  # pages with pictures
DRAWN = {"groups": "layout", "schedule": "timeline"}  # what= -> the picture of that name
CONSOLE = re.compile(r"```console\n\$ (python -m app\.cli\.plan .*)\n(?:.*\n)*?```")
PICTURE = re.compile(
    r"^python -m app\.cli\.plan what=(?P<what>\w+) out=plan/(?P<name>\w+).*$", re.MULTILINE
)


def printed(line: str) -> str:
    """What a command of the docs prints, mistakes too, without the blanks that fill its lines."""
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(out),
        contextlib.suppress(SystemExit),
    ):
        main(shlex.split(line)[3:])
    return "".join(f"{text.rstrip()}\n" for text in out.getvalue().rstrip().splitlines())


def refreshed(text: str) -> str:
    """The page with every command's output as it is now."""
    return CONSOLE.sub(lambda block: f"```console\n$ {block[1]}\n{printed(block[1])}```", text)


def refresh(name: str) -> None:
    """Rewrite a page and its pictures."""
    page = DOCS / f"{name}.md"
    page.write_text(refreshed(page.read_text()))
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for command in PICTURE.finditer(page.read_text()):
            what, picture = command["what"], command["name"]
            said, drawn = printed(command[0]), Path(f"plan/{picture}/{DRAWN[what]}.svg")
            assert drawn.exists(), said
            shutil.copy(drawn, DOCS / f"{name}/{picture}.svg")


if __name__ == "__main__":
    for text in TEXTS:
        text.write_text(refreshed(text.read_text()))
    for name in PAGES:
        refresh(name)
