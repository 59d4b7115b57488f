"""Measure the energy that the GPUs of a run take per token, by their own counters.

GPUs since Volta have them.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from app.collectives import all_gather
from app.engine.report.nvml import Nvml
from app.engine.step.engine import Engine

HALF = 8  # bytes of a GPU's identity in one integer


@dataclass(frozen=True, slots=True)
class EnergyCounter:
    """Energy counter of this rank's GPU."""

    identity: uuid.UUID  # of the GPU, different for every GPU of all hosts
    read: Callable[[], int | None]  # millijoules since the driver was loaded; None if it fails


class EnergyMeter:
    """Energy per token of all GPUs of a run, between calls of `metrics`."""

    def __init__(
        self, counter: EnergyCounter | None, world: dist.ProcessGroup, device: torch.device
    ) -> None:
        """`counter` is None where this rank's GPU has none; `device` holds what ranks exchange."""
        self._counter = counter
        self._world = world
        self._device = device
        self._before = None if counter is None else counter.read()

    def metrics(self, tokens: int) -> dict[str, float]:
        """Return joules per token since the last call, over all ranks, which call this together.

        `tokens` are those of all ranks since then. Empty if the counter of any GPU cannot be read:
        the others would be no sum.
        """
        rows = torch.empty(self._world.size(), 4, dtype=torch.int64, device=self._device)
        all_gather(rows, torch.tensor(self._row(), device=self._device), self._world)
        # ranks that share a GPU read the same counter
        millijoules = {(high, low): taken for high, low, _, taken in rows.tolist()}
        if not all(rows[:, 2].tolist()):
            return {}
        return {"joules_per_token": sum(millijoules.values()) / 1e3 / tokens}

    def _row(self) -> list[int]:
        """Return the GPU's identity in two integers, whether it was read, and the millijoules."""
        if self._counter is None:
            return [0, 0, 0, 0]
        before, self._before = self._before, self._counter.read()
        name = self._counter.identity.bytes
        high, low = (int.from_bytes(half, signed=True) for half in (name[:HALF], name[HALF:]))
        # a counter that falls was reset with the driver
        if before is None or self._before is None or self._before < before:
            return [high, low, 0, 0]
        return [high, low, 1, self._before - before]


def energy_meter(engine: Engine) -> EnergyMeter | None:
    """Build the meter of a run on GPUs; None on CPU. All ranks are of one kind."""
    if engine.device.type != "cuda":
        return None
    return EnergyMeter(energy_counter(engine.device), engine.groups.world, engine.device)


def energy_counter(device: torch.device) -> EnergyCounter | None:
    """Return the counter of a GPU; None if it has none.

    A slice of a GPU (MIG) has none: its UUID is not that of the GPU, whose other slices may work
    for others.
    """
    gpu = Nvml.of(device)
    if gpu is None or gpu.millijoules() is None:
        return None
    name = str(torch.cuda.get_device_properties(device).uuid)
    return EnergyCounter(uuid.UUID(name), gpu.millijoules)
