"""Measure at log intervals what a run gets of its hosts and GPUs, over all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from app.collectives import all_reduce
from app.engine.report.host import HostMeter
from app.engine.report.nvml import Nvml
from app.engine.step.engine import Engine

UNKNOWN = -2.0  # of a number of which the largest over ranks is taken: below every known one


class MachineMeter:
    """Waits for data and cores, and the GPU's clock, since the last log interval."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        run = engine.plan.run
        self.ranks_here = min(run.world_size, run.parallel.gpus_per_node)
        self.host = HostMeter()
        self.gpu = Nvml.of(engine.device) if engine.device.type == "cuda" else None
        self._steps = 0
        self._data_wait_ms = 0.0

    def count(self, data_wait_ms: float) -> None:
        """Add a step of this rank."""
        self._steps += 1
        self._data_wait_ms += data_wait_ms

    def lap(self) -> dict[str, float]:
        """Return the metrics since the last lap, without those that no rank knows; all ranks call
        it.
        """
        steps = max(1, self._steps)
        waited, own, busy = self.host.lap()
        clock = self.gpu.clock() if self.gpu else None
        processes = self.gpu.processes() if self.gpu else None
        most = {
            "data_wait_max_ms": self._data_wait_ms / steps,
            "host_delay_ms": UNKNOWN if waited is None else 1e3 * waited / steps,
            "busy": UNKNOWN if busy is None else busy,
            # the slowest clock, as the largest of negative ones
            "gpu_clock": UNKNOWN if clock is None else -clock,
            "gpu_others": UNKNOWN if processes is None else processes - 1.0,
        }
        self._steps, self._data_wait_ms = 0, 0.0
        largest, cores = self._over_ranks(most, own)
        found = {name: value for name, value in largest.items() if value != UNKNOWN}
        found["host_cores"] = cores
        if "busy" in found:
            found["host_others"] = max(0.0, found.pop("busy") - cores)
        if "gpu_clock" in found:
            found["gpu_clock"] *= -1
        if "gpu_others" in found:
            found["gpu_others"] = max(0, int(found["gpu_others"]))
        return found

    def _over_ranks(self, most: dict[str, float], own: float) -> tuple[dict[str, float], float]:
        """Return the largest of each number, and the cores that all ranks of a host use."""
        groups, device = self.engine.groups, self.engine.device
        world = groups.world.size()
        largest_N = torch.tensor(list(most.values()), dtype=torch.float64, device=device)
        own_1 = torch.tensor([own], dtype=torch.float64, device=device)
        if world > 1:
            dist.all_reduce(largest_N, dist.ReduceOp.MAX, groups.world)
        all_reduce(own_1, groups.world)
        cores = float(own_1) / world * self.ranks_here
        return dict(zip(most, largest_N.tolist(), strict=True)), cores
