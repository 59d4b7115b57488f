"""Training step that profiles three steps of a process (train.profile)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch.cuda import memory
from torch.profiler import ProfilerActivity, profile

from app.config.training import PROFILED
from app.data.feed import Batch
from app.engine.files.signals import StopRequest
from app.engine.files.trace_sums import MEMORY, PROFILE, TRACE, write_sums
from app.engine.ranks.agreement import rank_zero_says
from app.engine.step.engine import Engine
from app.engine.step.kernel_sums import KernelSums
from app.engine.step.records import StepReport, StepTotals
from app.engine.step.step import TrainingStep
from app.errors import writing
from app.own_files import replaced
from app.planner.measured import TraceSums

MOST_ALLOCATIONS = 1_000_000  # of the memory snapshot; older ones are dropped


class ProfiledStep(TrainingStep):
    """Training step with a profiler around steps `train.profile` and the two after it.

    All ranks profile, so that none waits for others; rank 0 writes. `place` returns the run folder
    and the steps that the run has taken.
    """

    def __init__(
        self, engine: Engine, request: StopRequest, place: Callable[[], tuple[Path, int]]
    ) -> None:
        super().__init__(engine, request)
        assert self.run.train.profile is not None, "built for runs that profile"
        self.first = self.run.train.profile
        self.place = place
        self.on_gpu = engine.device.type == "cuda"
        self.profiler: profile | None = None
        self._before = 0  # steps of the run before the first profiled one

    def __call__(
        self,
        batches: Sequence[Batch],
        lr: float,
        weight_decay: float,
        following: Callable[[], Sequence[Batch]] | None = None,
    ) -> tuple[StepReport, StepTotals]:
        """Train on a step's microbatches as `TrainingStep`, profiled if it is time.

        Raises ConfigError, the same on every rank, if files cannot be written.
        """
        if self.taken + 1 == self.first:
            self._begin()
        found = super().__call__(batches, lr, weight_decay, following)
        if self.profiler is not None and self.taken == self.first + PROFILED - 1:
            self._end(self.profiler)
            self.profiler = None
        return found

    def _begin(self) -> None:
        self._before = self.place()[1]
        activities = [ProfilerActivity.CPU]
        if self.on_gpu:
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.synchronize(self.engine.device)
            memory._record_memory_history(max_entries=MOST_ALLOCATIONS)
        self.profiler = profile(activities=activities)
        self.profiler.start()

    def _end(self, profiler: profile) -> None:
        engine = self.engine
        engine.watchdog.rest("writing the profile")
        if self.on_gpu:
            torch.cuda.synchronize(engine.device)
        profiler.stop()
        sums = KernelSums.of(profiler.events())
        exchange = self._least(sums.exchange)
        rank_zero_says(engine.groups, lambda: self._write(profiler, sums, exchange))
        if self.on_gpu:
            memory._record_memory_history(enabled=None)

    def _least(self, exchange: float | None) -> float | None:
        """Return the least over ranks: others also count their waits for a late rank."""
        if exchange is None:
            return None
        least_1 = torch.tensor([exchange], dtype=torch.float64, device=self.engine.device)
        if self.engine.groups.world.size() > 1:
            dist.all_reduce(least_1, dist.ReduceOp.MIN, self.engine.groups.world)
        return float(least_1)

    def _write(self, profiler: profile, sums: KernelSums, exchange: float | None) -> None:
        """Write the files. Raises ConfigError."""
        run_dir, _ = self.place()
        folder = run_dir / PROFILE
        with writing(folder):
            folder.mkdir(exist_ok=True)
            with replaced(folder / TRACE) as temporary:
                profiler.export_chrome_trace(str(temporary))
            if self.on_gpu:
                with replaced(folder / MEMORY) as temporary:
                    memory._dump_snapshot(str(temporary))
        write_sums(
            run_dir,
            TraceSums(
                self._before + 1,
                self._before + PROFILED,
                {part: ms / PROFILED for part, ms in sums.parts.items()},
                compute_ms=None if sums.compute is None else sums.compute / PROFILED,
                exchange_ms=None if exchange is None else exchange / PROFILED,
                kernels=sums.kernels / PROFILED,
            ),
        )
