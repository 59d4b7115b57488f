"""Names of programs and pages in messages, as this user reaches them: `graphfold-plan` where the
package is installed or that command was typed, `python -m app.cli.plan` in a checkout.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

# not resolved: a checkout may link to another one's `app`, and has its own conf/
PACKAGE = Path(__file__).parent
INSTALLED = (PACKAGE / "conf").is_dir()  # a wheel holds conf/ and docs/ inside the package
FILES = PACKAGE if INSTALLED else PACKAGE.parent  # folder of conf/ and docs/
COMMANDS = (
    "train",
    "plan",
    "report",
    "data",
    "tokenizer",
    "convert",
    "generate",
    "chat",
    "evaluate",
    "calibrate",
    "doctor",
    "tune",
)
PREFIX = "graphfold-"
TYPED = frozenset(PREFIX + name for name in COMMANDS)
OURS = re.compile(
    rf"python -m app\.cli\.(?P<command>{'|'.join(COMMANDS)})\b"
    r"|(?P<launcher>\btorchrun .*)\btrain\.py\b"  # takes a script or a module, no command
    r"|(?:python )?\btrain\.py\b"
    r"|\bdocs/(?P<page>[\w-]+\.md)\b|\b(?P<options>conf)/(?=<)"
)


def by_command() -> bool:
    """Return whether the programs are known as installed commands: from a wheel always, in a
    checkout if this process was started by one. Ranks get the name of their parent
    (`app.cli.processes.launcher.take_name`).
    """
    return INSTALLED or Path(sys.argv[0]).name in TYPED


def command_name(program: str) -> str:
    """Return how `program`, one of COMMANDS, is typed."""
    if by_command():
        return PREFIX + program
    return "python train.py" if program == "train" else f"python -m app.cli.{program}"


def speaker(program: str) -> str:
    """Return the name with which a program begins its own lines on stderr: one of COMMANDS, or
    another program as it is.
    """
    if by_command() and program in COMMANDS:
        return PREFIX + program
    return "train.py" if program == "train" else program


def page(name: str) -> str:
    """Return where to read a page of docs/: in a checkout as `docs/NAME`, elsewhere its path."""
    return str(FILES / "docs" / name) if by_command() else f"docs/{name}"


def with_names(text: str) -> str:
    """Return a constant text, written for a checkout, with the names that this user types.

    Only for constants: in what users have typed, a file of theirs may be called train.py.
    """

    def here(found: re.Match[str]) -> str:
        if found["page"]:
            return page(found["page"])
        if found["options"]:
            return f"{FILES / found['options']}/"
        if found["launcher"]:
            return f"{found['launcher']}-m app.cli.train"
        return command_name(found["command"] or "train")

    return OURS.sub(here, text) if by_command() else text
