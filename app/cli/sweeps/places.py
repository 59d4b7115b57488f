"""Places of a sweep's jobs on this host: the GPUs of each, and its share of the cores."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from app.cli.processes.environment import JOBS_AT_ONCE
from app.cli.start.launch import CPU_RANKS_PER_CORE
from app.config import Run, SweepConfig
from app.errors import ConfigError
from app.plan.formatting import count_of

VISIBLE = "CUDA_VISIBLE_DEVICES"  # variable: GPUs that a program may use, by number or UUID
ON_CPU = "leave it out; sweep.jobs_at_once=2 runs two jobs side by side on the CPU"  # advice
Place = Mapping[str, str]  # variables of the job there
ALONE: Sequence[Place] = ({},)  # one job after another, on all that the host has


def places(asked: SweepConfig, gpus: int, on_cpu: bool, env: Mapping[str, str]) -> Sequence[Place]:
    """Return a place for each job that runs at the same time, on a host with this number of GPUs.

    `on_cpu`: no job uses them. Raises ConfigError if the host has too few GPUs.
    """
    each, most = asked.gpus_per_job, asked.jobs_at_once
    if each is not None and on_cpu:
        raise ConfigError("sweep.gpus_per_job", each, "these jobs use no GPU", advice=ON_CPU)
    if each is None:
        if most is not None and most > 1 and gpus and not on_cpu:
            rule = "jobs on GPUs would share them"
            advice = f"sweep.gpus_per_job=1 gives each job its own ({count_of(gpus, 'GPU')} here)"
            raise ConfigError("sweep.jobs_at_once", most, rule, advice=advice)
        return [{JOBS_AT_ONCE: str(most)}] * most if most is not None and most > 1 else ALONE
    if each > gpus:
        if not gpus:
            raise ConfigError("sweep.gpus_per_job", each, "this host has no GPU", advice=ON_CPU)
        rule = f"this host has {count_of(gpus, 'GPU')}"
        raise ConfigError("sweep.gpus_per_job", each, rule, nearest=gpus)
    room = gpus // each
    if most is not None and most > room:
        rule = f"{count_of(gpus, 'GPU')} have room for {count_of(room, 'job')} of {each}"
        raise ConfigError("sweep.jobs_at_once", most, rule, nearest=room)
    count = room if most is None else most
    names = visible(gpus, env)
    return [
        {VISIBLE: ",".join(names[each * n : each * (n + 1)]), JOBS_AT_ONCE: str(count)}
        for n in range(count)
    ]


def visible(gpus: int, env: Mapping[str, str]) -> list[str]:
    """Return the names of the GPUs that this process may use, by which a job is given some."""
    given = env.get(VISIBLE)
    names = map(str, range(gpus)) if given is None else map(str.strip, given.split(","))
    return list(names)[:gpus]  # CUDA ignores what follows a name that it does not know


def check_share(run: Run, gpus: int) -> None:
    """Raise ConfigError if a job needs more than its share of the host's GPUs, or of its cores if
    `gpus` is 0.
    """
    each, jobs, ranks = run.sweep.gpus_per_job, run.sweep.jobs_at_once, run.world_size
    if gpus and each is not None and ranks > each:
        rule = f"a job of {count_of(ranks, 'rank')} needs as many GPUs"
        raise ConfigError("sweep.gpus_per_job", each, rule, nearest=ranks)
    most = CPU_RANKS_PER_CORE * (os.cpu_count() or 1)
    if not gpus and jobs is not None and jobs > 1 and jobs * ranks > most:
        rule = f"of {count_of(ranks, 'rank')} each: this host has room for {most} processes"
        raise ConfigError("sweep.jobs_at_once", jobs, rule, nearest=most // ranks)
