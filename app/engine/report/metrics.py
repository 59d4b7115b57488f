"""Measure the metrics of a step's report that the step itself does not compute.

One small tensor is copied to the host per step; memory, expert load and energy are read at the
log interval only.

Shapes: L MoE layers of this rank, E experts of each, R ranks that share them.
"""

from __future__ import annotations

import resource
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from app.collectives import all_reduce
from app.engine.capture.facts import GraphFacts
from app.engine.report.clones import clones_would_pay
from app.engine.report.energy import energy_meter
from app.engine.report.fp8 import Fp8Meter
from app.engine.report.machine import MachineMeter
from app.engine.step.engine import Engine
from app.engine.step.records import StepReport, StepTotals
from app.moe.clones.cloning import Cloning
from app.plan.cost.flops import peak_tflops, run_flops_per_token

GIB = 2**30


class Meter:
    """Completes step reports; accumulates expert counts between log intervals."""

    def __init__(self, engine: Engine, first_step: int) -> None:
        self.run = engine.plan.run
        self.engine = engine
        self.first_step = first_step
        run = self.run
        self.tokens_per_step = run.train.global_batch * run.train.seq_len
        self.flops_per_step = self.tokens_per_step * run_flops_per_token(run)
        self.peak = run.hardware.peak_tflops or _known_peak(engine.device)
        self.fp8 = Fp8Meter(engine)
        self.energy = energy_meter(engine)
        self.metered_steps = 0  # steps since energy was last read
        self.machine = MachineMeter(engine)
        self.counts: dict[tuple[int, int], Tensor] = {}
        self.dropped: Tensor | int = 0
        # tokens per expert over all ranks, by MoE layer of this stage, at the last log interval
        self.counts_LE = torch.zeros(0, dtype=torch.int64, device=engine.device)

    def count(self, totals: StepTotals) -> None:
        """Add a step's tokens per expert, on the device."""
        for key, counts_E in totals.counts.items():
            self.counts[key] = counts_E + self.counts.get(key, 0)
        self.dropped = self.dropped + totals.dropped

    def complete(self, report: StepReport) -> None:
        """Add rates to a step's report; at the log interval all ranks measure memory and loads."""
        world = self.engine.groups.layout.world_size
        seconds = report.step_ms / 1e3
        report.time = time.time()
        report.tokens_per_s = self.tokens_per_step / seconds
        report.tokens_per_s_per_gpu = report.tokens_per_s / world
        report.tflops_per_gpu = self.flops_per_step / seconds / world / 1e12
        report.mfu = report.tflops_per_gpu / self.peak if self.peak else None
        self.metered_steps += 1
        self.machine.count(report.data_wait_ms)
        at_interval = self._at_interval(report.step)
        measured = self._memory() if at_interval or report.step == self.first_step else {}
        if at_interval:
            measured |= self._expert_load() | self.fp8.metrics() | self.machine.lap()
            measured |= self._energy()
        for key, value in measured.items():
            setattr(report, key, value)

    def _at_interval(self, step: int) -> bool:
        return step % self.run.log.interval == 0 or step == self.run.steps

    def advice(self) -> list[str]:
        """Return advice for the next run from measurements of this one; all ranks call it."""
        engine = self.engine
        stages = engine.groups.pp_control
        clones = clones_would_pay(
            self.run, self.counts_LE, stages, peak=self.peak, device=engine.device
        )
        return [each for each in (clones, self.fp8.advice()) if each is not None]

    def rank_load(self) -> float | None:
        """Return the dispatched tokens of the busiest EP rank over the mean, at the last interval.

        None if nothing was counted, or if clones balance the load.
        """
        if self.engine.state(Cloning) is not None:
            return None
        return rank_load(self.counts_LE, self.engine.groups.layout.ep)

    def _memory(self) -> dict[str, Any]:
        found = memory_gib(self.engine.device)
        recorder = self.engine.recorder
        if recorder is not None:  # the same on every rank, as the all-reduce below needs
            found |= GraphFacts.of(recorder).metrics()
        values = torch.tensor(list(found.values()), dtype=torch.float64, device=self.engine.device)
        if self.engine.groups.world.size() > 1:
            dist.all_reduce(values, dist.ReduceOp.MAX, self.engine.groups.world)
        largest = dict(zip(found, values.tolist(), strict=True))
        counts = {name: int(value) for name, value in largest.items() if name == "graph_count"}
        return largest | counts

    def _energy(self) -> dict[str, float]:
        tokens, self.metered_steps = self.metered_steps * self.tokens_per_step, 0
        return {} if self.energy is None else self.energy.metrics(tokens)

    def _expert_load(self) -> dict[str, float]:
        """Measure expert load over all pipeline ranks; those without MoE layers must join too."""
        if self.run.model.moe is None:
            return {}
        counts = [self.counts[key] for key in sorted(self.counts)]  # the same order on all ranks
        self.counts = {}
        dropped = self.dropped
        self.dropped = 0
        ratio_L = torch.zeros(1, dtype=torch.float64, device=self.engine.device)
        ranks_L = ratio_L  # the same of expert-parallel ranks
        pairs_2 = torch.zeros(2, dtype=torch.int64, device=self.engine.device)  # dropped and kept
        if counts:
            counts_LE = torch.stack(counts)
            pairs_2[0] = dropped
            all_reduce(counts_LE, self.engine.groups.tp_cp_dp_control)
            all_reduce(pairs_2, self.engine.groups.tp_cp_dp_control)
            self.counts_LE = counts_LE
            pairs_2[1] = counts_LE.sum()
            ratio_L = counts_LE.max(dim=1).values / counts_LE.double().mean(dim=1)
            ranks_L = rank_loads(counts_LE, self.engine.groups.layout.ep)
        # sums over stages: ratios, number of layers, choices dropped and kept
        layers = ratio_L.new_full((), len(counts))
        total = torch.stack((ratio_L.sum(), ranks_L.sum(), layers, *pairs_2.double()))
        worst = ratio_L.max()
        all_reduce(total, self.engine.groups.pp_control)
        if self.engine.groups.pp_control.size() > 1:
            dist.all_reduce(worst, dist.ReduceOp.MAX, self.engine.groups.pp_control)
        ratios, of_ranks, count, lost, kept = total.tolist()
        share = {}
        if self.run.model.moe.capacity_factor is not None:
            share["moe_dropped"] = lost / (lost + kept)
        loads = {"moe_load_mean": ratios / count, "moe_load_worst": float(worst)}
        return {**loads, "moe_rank_load": of_ranks / count, **share}


def rank_load(counts_LE: Tensor, ranks: int) -> float | None:
    """Return the load of the busiest of `ranks` EP ranks over the mean, averaged over L layers.

    `counts_LE` are tokens per layer and expert; None if it is empty.
    """
    if not counts_LE.numel():
        return None
    return float(rank_loads(counts_LE, ranks).mean())


def rank_loads(counts_LE: Tensor, ranks: int) -> Tensor:
    """Return the load of the busiest of `ranks` EP ranks over the mean in each layer, fp64 [L]."""
    rows_LR = counts_LE.double().unflatten(1, (ranks, -1)).sum(dim=2)
    load_L: Tensor = rows_LR.max(dim=1).values / rows_LR.mean(dim=1).clamp(min=1)
    return load_L


def _known_peak(device: torch.device) -> float | None:
    return peak_tflops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def memory_gib(device: torch.device) -> dict[str, float]:
    """Memory of this rank: GPU tensors, or the process's resident memory on CPU; GiB."""
    if device.type == "cuda":
        return {
            "memory_allocated_gib": torch.cuda.memory_allocated(device) / GIB,
            "memory_reserved_gib": torch.cuda.memory_reserved(device) / GIB,
            "memory_peak_gib": torch.cuda.max_memory_allocated(device) / GIB,
        }
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT / GIB
    return {"memory_allocated_gib": _resident_bytes() / GIB or peak, "memory_peak_gib": peak}


_RSS_UNIT = 1 if Path("/System/Library").exists() else 1024  # macOS counts bytes, Linux KiB


def _resident_bytes() -> int:
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return 0
    return int(statm.read_text(encoding="utf-8").split()[1]) * resource.getpagesize()


class Stopwatch:
    """Wall time since it was made or last read."""

    def __init__(self) -> None:
        self._since = time.perf_counter()

    def lap(self) -> float:
        """Seconds since the last lap."""
        before = self._since
        self._since = time.perf_counter()
        return self._since - before
