"""Environment variables of the programs that use a trained model; train.py handles its own.

torchrun or SLURM start the ranks of these programs too, and set rank and world size there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager

from app.cli.processes.launcher import Launch, take_name

# Rounds that idle OpenMP threads wait for work before they sleep: enough to bridge the gap between
# two operations, and less than a time slice of the scheduler. With libgomp's default of 300,000
# they take cores from other programs and from each other (bench/busy.py).
SPINS = 2_000
# variable: jobs of a sweep that run at the same time and share the cores of this host
JOBS_AT_ONCE = "GRAPHFOLD_JOBS_AT_ONCE"


def environment() -> MutableMapping[str, str]:
    """Return the environment of this process, to read and to pass to children."""
    return os.environ


@contextmanager
def environment_kept() -> Iterator[MutableMapping[str, str]]:
    """Yield the environment of this process, which after the block is as it was."""
    # `datasets` puts a copy in the place of os.environ
    ours, before = os.environ, dict(os.environ)
    try:
        yield ours
    finally:
        os.environ = ours  # noqa: B003 - not to clear it
        for name in ours.keys() - before.keys():
            del ours[name]
        ours.update({name: text for name, text in before.items() if ours.get(name) != text})


def joined_launch(parent: int) -> Launch:
    """Return the place of this process among its launcher's; make it end with process `parent`, and
    set the variables that torch, gloo and NCCL read. Raises ConfigError.
    """
    take_name(os.environ)
    launch = Launch.from_environment(os.environ)
    launch.end_with_launcher(parent)
    for name, value in {**launch.network(), **torch_settings(os.environ)}.items():
        os.environ.setdefault(name, value)
    return launch


def threads_of(ranks: int, env: Mapping[str, str]) -> int:
    """Return the threads of each of the ranks of a run that has this host, or its share as one of
    several jobs.
    """
    return max(1, (os.cpu_count() or 1) // ranks // int(env.get(JOBS_AT_ONCE, "1")))


def share_of_threads(env: Mapping[str, str]) -> dict[str, str]:
    """Return OMP_NUM_THREADS for the one process of a job beside others; nothing for other runs.

    Torch reads it as it does `torch_settings`, and heeds the user's own value.
    """
    return {"OMP_NUM_THREADS": str(threads_of(1, env))} if JOBS_AT_ONCE in env else {}


def torch_settings(env: Mapping[str, str]) -> dict[str, str]:
    """Return variables that libraries of torch read when they are loaded. None changes results.

    GOMP_SPINCOUNT, unless the user has set it or OMP_WAIT_POLICY; the number of threads stays.
    KINETO_LOG_LEVEL: torch's profiler prints nothing when it starts and stops (train.profile).
    """
    quiet = {"KINETO_LOG_LEVEL": "99"}
    if env.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}:
        return quiet
    return {"GOMP_SPINCOUNT": str(SPINS), **quiet}
