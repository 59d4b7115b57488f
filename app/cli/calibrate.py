"""Measure the speeds of this machine's GPUs for planned times: `python -m app.cli.calibrate`.

Exit codes: 0; 2 for a mistake of the user, reported in one line.
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
    # before the imports, which take seconds: Ctrl-C meanwhile prints one line
    stop_quietly("calibrate", speak=environment().get("RANK", "0") == "0")

from app.cli.processes.home import CONF, user_conf
from app.cli.processes.launcher import Launch
from app.cli.start.program import run_program
from app.engine.calibration.profile_file import gpu_words
from app.errors import ConfigError, nearest

OWN = ("name=", "out=")
HELP = """\
== Graphfold: measure GPUs, their host and their links, for planned times ==
Usage:  python -m app.cli.calibrate [name=NAME] [out=FOLDER]
        torchrun --nproc-per-node N -m app.cli.calibrate [...]   links between N GPUs too

  name=NAME    name of the new option, used as hardware=NAME; default: the GPU's name + _here
  out=FOLDER   folder for hardware/NAME.yaml; default: ~/.config/graphfold, which all programs
               search; give them --config-dir FOLDER for any other

Takes a minute or two on an idle GPU. Afterwards: python -m app.cli.plan hardware=NAME ...
docs/planning.md says what is measured and how planned times are computed."""


def work(arguments: Sequence[str], launch: Launch) -> int:
    """Measure, write the option file and return the exit code."""
    typed = _parsed(arguments)
    from app.cli.measure import measure  # loads torch; mistakes are reported before

    measure(launch, partial(option_path, typed))
    return 0


def _parsed(arguments: Sequence[str]) -> dict[str, str]:
    """Return this command's options as name -> value. Raises ConfigError."""
    for word in arguments:
        if not word.startswith(OWN):
            rule = f"the options are {' and '.join(OWN)}; --help explains them"
            key, _, value = word.partition("=")
            guess = nearest(f"{key}=", OWN)
            raise ConfigError("option", word, rule, guess=guess and f"{guess}{value}")
    return dict(word.split("=", 1) for word in arguments)


def option_path(typed: dict[str, str], device_name: str) -> Path:
    """Return the path of the option file. Raises ConfigError if the name cannot be typed as
    hardware=NAME, or is that of an option in conf/.
    """
    words = re.sub(r"[^a-z0-9-]+", "_", gpu_words(device_name).lower())
    name = typed.get("name", f"{words}_here")
    if not name.replace("_", "").replace("-", "").isalnum():
        rule = "must consist of letters, digits, _ and -, to be typed as hardware=NAME"
        raise ConfigError("name", name, rule, nearest=f"{words}_here")
    if (CONF / "hardware" / f"{name}.yaml").exists():
        rule = "is an option that Graphfold already has"
        raise ConfigError("name", name, rule, nearest=f"{name}_here")
    return Path(typed["out"] if "out" in typed else user_conf()) / "hardware" / f"{name}.yaml"


def main(arguments: Sequence[str], parent: int) -> int:
    """Run the command line of this process, started by process `parent`; return the exit code."""
    return run_program("calibrate", HELP, arguments, parent=parent, work=work, bare=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.getppid()))
