"""Environment variables of the programs that use a trained model; train.py handles its own.

torchrun or SLURM start the ranks of these programs too, and set rank and world size there.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

from app.cli.processes.launcher import Launch
from app.cli.processes.openmp import waiting_threads


def environment() -> MutableMapping[str, str]:
    """Return the environment of this process, to read and to pass to children."""
    return os.environ


def joined_launch(parent: int) -> Launch:
    """Return the place of this process among its launcher's; make it end with process `parent`, and
    set the variables that torch, gloo and NCCL read. Raises ConfigError.
    """
    launch = Launch.from_environment(os.environ)
    launch.end_with_launcher(parent)
    for name, value in {**launch.network(), **waiting_threads(os.environ)}.items():
        os.environ.setdefault(name, value)
    return launch
