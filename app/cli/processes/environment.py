"""The environment of the programs that use a trained model; train.py has its own.

Their ranks too are started by torchrun or SLURM, which say in it who is who.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

from app.cli.processes.launcher import Launch
from app.cli.processes.openmp import waiting_threads


def environment() -> MutableMapping[str, str]:
    """What this process has been started with, to read and to hand on."""
    return os.environ


def joined_launch(parent: int) -> Launch:
    """The place of this process, which process `parent` has started and takes along when it ends,
    among its launcher's; sets what torch and its network libraries read. Raises ConfigError.
    """
    launch = Launch.from_environment(os.environ)
    launch.end_with_launcher(parent)
    for name, value in {**launch.network(), **waiting_threads(os.environ)}.items():
        os.environ.setdefault(name, value)
    return launch
