"""Measure what this machine's GPUs reach, for planned times: `python -m app.cli.calibrate`.

Exit codes: 0, 2 for a mistake, which costs one line.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from app.cli.processes.ctrl_c import stop_quietly
from app.cli.processes.environment import environment

if __name__ == "__main__":
    # the imports take seconds
    stop_quietly("calibrate", speak=environment().get("RANK", "0") == "0")

from app.cli.processes.home import CONF, user_conf
from app.cli.processes.launcher import Launch
from app.cli.processes.program import run_program
from app.engine.calibration.profile_file import gpu_words
from app.errors import ConfigError, nearest

OWN = ("name=", "out=")
HELP = """\
== Graphfold: measure what GPUs, their host and their links reach, for planned times ==
Usage:  python -m app.cli.calibrate [name=NAME] [out=FOLDER]
        torchrun --nproc-per-node N -m app.cli.calibrate [...]   links between N GPUs too

  name=NAME    of the option: hardware=NAME; default: the GPU's name with _here behind it
  out=FOLDER   where hardware/NAME.yaml goes; default: ~/.config/graphfold, whose options train.py
               and the plan command find by themselves; others by --config-dir FOLDER

Takes a minute or two on an idle GPU. What is measured, and how times come of it:
docs/planning.md. Plan with it: python -m app.cli.plan hardware=NAME ..."""


def work(arguments: Sequence[str], launch: Launch) -> int:
    """Measure and write; the exit code."""
    typed = _parsed(arguments)
    from app.cli.measure import measure  # loads torch, after what is wrong has been told

    measure(launch, partial(option_path, typed))
    return 0


def _parsed(arguments: Sequence[str]) -> dict[str, str]:
    """This command's options. Raises ConfigError."""
    for word in arguments:
        if not word.startswith(OWN):
            rule = f"the options are {' and '.join(OWN)}; --help explains them"
            key, _, value = word.partition("=")
            guess = nearest(f"{key}=", OWN)
            raise ConfigError("option", word, rule, guess=guess and f"{guess}{value}")
    return dict(word.split("=", 1) for word in arguments)


def option_path(typed: dict[str, str], device_name: str) -> Path:
    """Where the option goes. ConfigError for the name of one that is there already, and for what
    cannot be a name.
    """
    words = re.sub(r"[^a-z0-9-]+", "_", gpu_words(device_name).lower())
    name = typed.get("name", f"{words}_here")
    if not name.replace("_", "").replace("-", "").isalnum():
        rule = "is typed as hardware=NAME: letters, digits, _ and -"
        raise ConfigError("name", name, rule, nearest=f"{words}_here")
    if (CONF / "hardware" / f"{name}.yaml").exists():
        rule = "is an option of Graphfold's own"
        raise ConfigError("name", name, rule, nearest=f"{name}_here")
    return Path(typed["out"] if "out" in typed else user_conf()) / "hardware" / f"{name}.yaml"


def main(arguments: Sequence[str], parent: int) -> int:
    """Run the command line of a process that process `parent` has started; the exit code."""
    return run_program("calibrate", HELP, arguments, parent=parent, work=work, bare=True)


def command(parent: int) -> None:
    """Run the command line; SystemExit with the exit code."""
    sys.exit(main(sys.argv[1:], parent))


if __name__ == "__main__":
    command(os.getppid())
