"""Run the plans that README.md and some pages of docs/ show, and put in what they print and draw.

    python scripts/plan_docs.py

A `console` block that begins with the plan command is that and its output, in which a line `…`
stands for lines left out; a `bash` command with out=plan/<name> is followed by its picture, which
is docs/<page>/<name>.svg.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import shutil
import tempfile
from collections.abc import Sequence
from difflib import SequenceMatcher
from pathlib import Path

from app.cli.plan import main

ROOT = Path(__file__).resolve().parent.parent
DOCS, README = ROOT / "docs", ROOT / "README.md"
# pages without pictures
TEXTS = (README, *(DOCS / f"{name}.md" for name in ("quickstart", "two-gpus", "planning")))
PAGES = ("parallelism",)  # pages with pictures
CONSOLE = re.compile(r"```console\n\$ (python -m app\.cli\.plan .*)\n((?:.*\n)*?)```")
LEFT_OUT = "…"
PICTURE = re.compile(
    r"^python -m app\.cli\.plan what=schedule out=plan/(?P<name>\w+).*$", re.MULTILINE
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


def shortened(shown: Sequence[str], output: Sequence[str]) -> list[str]:
    """Return the lines of `output` in place of those shown, in the same order.

    The line behind a `…` is the one in the rest of the output most like the shown line; without a
    `…` between them, lines follow each other in the output too.
    """
    kept: list[str] = []
    place = 0
    for line in shown:
        if line == LEFT_OUT:
            kept.append(line)
            continue
        if kept and kept[-1] == LEFT_OUT:
            rest = range(place, len(output))
            place = max(rest, key=lambda at: SequenceMatcher(None, line, output[at]).ratio())
        kept.append(output[place])
        place += 1
    return kept


def refreshed_block(block: re.Match[str]) -> str:
    """Return a block with its command's output as it is now."""
    output, shown = printed(block[1]), block[2].splitlines()
    if LEFT_OUT in shown:
        output = "".join(f"{line}\n" for line in shortened(shown, output.splitlines()))
    return f"```console\n$ {block[1]}\n{output}```"


def refreshed(text: str) -> str:
    """Return the page with every command's output as it is now."""
    return CONSOLE.sub(refreshed_block, text)


def refresh(name: str) -> None:
    """Rewrite a page and its pictures."""
    page = DOCS / f"{name}.md"
    page.write_text(refreshed(page.read_text()))
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for command in PICTURE.finditer(page.read_text()):
            picture = command["name"]
            said, drawn = printed(command[0]), Path(f"plan/{picture}/timeline.svg")
            assert drawn.exists(), said
            shutil.copy(drawn, DOCS / f"{name}/{picture}.svg")


if __name__ == "__main__":
    for text in TEXTS:
        text.write_text(refreshed(text.read_text()))
    for name in PAGES:
        refresh(name)
