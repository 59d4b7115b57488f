"""How the jobs of a sweep share this host."""

from __future__ import annotations

from dataclasses import dataclass

from app.config.bounds import at_least


@dataclass(frozen=True)
class SweepConfig:
    """Jobs of a sweep (-m) that run side by side on this host, by hydra/launcher=torchrun."""

    # GPUs of each job: as many jobs run side by side as there are GPUs for; null: one job after
    # another, on all GPUs
    gpus_per_job: int | None = None
    # most jobs side by side, which share the cores; null: as many as gpus_per_job has room for, on
    # the CPU one
    jobs_at_once: int | None = None

    def __post_init__(self) -> None:
        at_least("sweep", self, 1, "gpus_per_job", "jobs_at_once")
