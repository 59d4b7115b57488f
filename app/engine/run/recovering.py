"""Train on one rank that survives the death of others: `checkpoint.memory_every`.

A generation is a run of all ranks as `train` has it. When a rank dies, the others leave their
engine and process groups, meet again with the rank that its supervisor has started, and begin the
next generation from copies in memory. Process, CUDA context and compiled kernels stay.
"""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from app.config import Run
from app.data.corpora import Corpora
from app.data.feed import Cursor
from app.engine.checkpoint.load import Progress
from app.engine.files.attempt import Attempt
from app.engine.files.checkpoints import newest_checkpoint, step_of
from app.engine.files.run_folder import FolderLock
from app.engine.files.signals import StopRequest
from app.engine.ranks.agreement import rank_zero_says
from app.engine.ranks.groups import Groups
from app.engine.recovery.copier import Copier, late_copies
from app.engine.recovery.copies import Agreed, Copies, Offer
from app.engine.recovery.generations import EndedError, Generations
from app.engine.report.lasting import lasting_output
from app.engine.report.metrics import Stopwatch
from app.engine.report.sinks import JsonLines, Sink
from app.engine.run.ready import StartTimes
from app.engine.run.train import Beginning, on_device, train_together
from app.engine.run.trainer import Trainer
from app.engine.start.start import Data, Start
from app.engine.step.engine import Engine
from app.engine.step.records import RecoveryReport, StepReport
from app.errors import warn
from app.plan.partners import shift_of
from app.planner.plan import Plan

SETTLED = 5  # copies: the first two allocate the memory of all


@dataclass(slots=True)
class Memory:
    """State that this process keeps from one generation to the next."""

    copies: Copies
    generations: Generations
    attempt: Attempt
    step: int = 0  # last step taken
    agreed: Agreed | None = None  # copies that the present generation continues from
    offers: tuple[Offer, ...] = ()  # of all ranks, at its beginning
    request: StopRequest = field(default_factory=StopRequest)
    copier: Copier | None = None
    wait_for_saves: Callable[[], object] = tuple  # waits for the checkpoint under way
    phases: dict[str, float] = field(default_factory=dict)  # seconds, by name
    since: float = 0.0  # end of the last phase, seconds since 1970
    noticed: float = 0.0  # when this rank noticed that another one has died, seconds since 1970

    def end(self, phase: str) -> None:
        """Count the time since the last call as this phase."""
        now = time.time()
        self.phases[phase] = now - self.since
        self.since = now


def train_recovering(plan: Plan, rank: int, local_rank: int, attempt: Attempt) -> int:
    """Train as `train` does, but continue in place when other ranks have died."""
    run = plan.run
    times = StartTimes(attempt.began)
    device = on_device(run, local_rank)
    times.end("device")
    shift = shift_of(run.world_size, run.parallel.gpus_per_node)
    assert shift is not None, "a rule refuses such runs"
    memory = Memory(
        Copies(rank, run.world_size, shift, pinned=device.type == "cuda"),
        Generations(rank, run.world_size, attempt.connect),
        attempt,
    )
    memory.since = attempt.life.died_at or time.time()
    with FolderLock() as lock, lasting_output():
        while True:
            try:
                store = memory.generations.begin()
                code = train_together(
                    plan,
                    rank,
                    local_rank,
                    attempt=attempt,
                    device=device,
                    store=store,
                    lock=lock,
                    times=times,
                    beginning=Remembering(memory),
                )
                attempt.ended(code)
                memory.generations.end_run(code)
                return code
            except EndedError as error:
                if error.code is None:
                    raise
                return error.code  # it died when the others were about to exit
            except Exception as error:
                if memory.request.signal is not None or not memory.generations.is_cause(error):
                    raise
                memory.since = memory.noticed = time.time()
                memory.phases = {}
                traceback.clear_frames(error.__traceback__)
            _leave(memory, device)
            times = StartTimes(time.monotonic())


def _leave(memory: Memory, device: torch.device) -> None:
    """Drop engine, threads and groups of a generation that is over."""
    memory.generations.leave()
    if memory.copier is not None:
        memory.copier.close()
        memory.copier = None
    with suppress(Exception):  # the save was cut off; the next one removes its temporary folder
        memory.wait_for_saves()
    memory.wait_for_saves = tuple
    gc.collect()  # modules refer to each other in circles
    if device.type == "cuda":
        torch.cuda.empty_cache()
    memory.end("abort")


def _saved_since(folder: Path | None, agreed: Agreed) -> bool:
    """Return whether a run folder has a checkpoint of a later step than the copies."""
    newest = folder and newest_checkpoint(folder)
    return newest is not None and step_of(newest) > agreed.step


@dataclass(frozen=True, slots=True)
class Remembering(Beginning):
    """Beginning of a generation: from copies in memory where all ranks have some."""

    memory: Memory

    def choose(
        self,
        run: Run,
        groups: Groups,
        lock: FolderLock,
        *,
        attempt: Attempt,
        sources: Callable[[], Corpora],
    ) -> Start:
        """Agree on copies; without any, or with a newer checkpoint, choose as a restart does."""
        memory = self.memory
        memory.end("rejoin")
        life = attempt.life
        died_at = life.died_at if memory.generations.met == 1 else 0.0  # known since then
        agreed, memory.offers = memory.copies.agree(
            groups, restarts=life.restarts, died_at=died_at, step=memory.step
        )
        # Records after the copies are dropped: a later checkpoint would continue without them.
        newer = rank_zero_says(
            groups, lambda: agreed and _saved_since(attempt.earlier(run), agreed)
        )
        memory.agreed = None if newer else agreed
        if memory.noticed:
            died_at = max(each.died_at for each in memory.offers)
            memory.phases = {"notice": max(0.0, memory.noticed - died_at), **memory.phases}
        if memory.agreed is None:
            start = Beginning.choose(self, run, groups, lock, attempt=attempt, sources=sources)
            if (
                not newer
                and groups.rank == 0
                and any(each.restarts or each.step for each in memory.offers)
            ):
                where = start.checkpoint or "the beginning: there is no checkpoint"
                warn(f"no step has a whole copy of every rank in memory; continuing from {where}")
            return start

        def begin() -> Start:
            folder = attempt.earlier(run)
            assert folder is not None, "copies are taken after the folder was noted"
            lock.claim(folder)
            return Start(folder, manifest=memory.copies.manifest())

        return rank_zero_says(groups, begin)

    def trainer(self, engine: Engine, data: Data, start: Start, times: StartTimes) -> Trainer:
        """Build a trainer that takes copies."""
        trainer = RecoveringTrainer(engine, data, start, times, self.memory)
        self.memory.generations.settle()
        return trainer


class RecoveringTrainer(Trainer):
    """Trainer that copies each rank's state, and may begin from such copies."""

    def __init__(
        self, engine: Engine, data: Data, start: Start, times: StartTimes, memory: Memory
    ) -> None:
        self.memory = memory
        super().__init__(engine, data, start, times)
        interval = self.run.checkpoint.memory_interval
        assert interval is not None, "chosen by memory_every"
        self.interval = interval
        self.intervals = 0  # copies begun
        self.taken = 0.0  # seconds: when the last one began
        self.waited = 0.0  # seconds that the host had waited for copies by then
        self.copier = memory.copier = Copier(engine, memory.copies, self._origin())
        memory.request = self.request
        memory.wait_for_saves = self.saver.wait
        self.back_from = max((each.step for each in memory.offers), default=0)
        self.back_to = self.progress.step
        self.again = [rank for rank, each in enumerate(memory.offers) if each.died_at]
        self.tells = bool(self.again or self.back_from)  # False at the start of all ranks
        memory.end("state")

    def _restored(self) -> tuple[Progress, Cursor]:
        if self.memory.agreed is None:
            return super()._restored()
        return self.memory.copies.restore(self.engine, self.memory.agreed)

    def _print_opening(self, settings: str | None) -> None:
        if self.memory.agreed is None:
            super()._print_opening(settings)
        for change in () if self.memory.agreed is None else self.start.changes:
            warn(change)

    def step(self, stopwatch: Stopwatch) -> StepReport:
        """Take a step; its numbers are void if a rank has died meanwhile."""
        self.copier.begin_step((self.progress.step + 1) % self.interval == 0)
        report = super().step(stopwatch)
        self.memory.generations.check()
        self.memory.step = report.step
        return report

    def _tell_ready(self, sinks: Any) -> None:
        super()._tell_ready(sinks)
        if not self.tells:
            return
        memory, recorder = self.memory, self.engine.recorder
        if self.training_step.taken == 1:
            memory.end("first step")
        if recorder is not None and recorder.seconds:
            memory.phases["capture"] = recorder.seconds
        ends = self._is_last_step or self.stops
        warms_up = self.training_step.taken <= self.run.cuda_graph.warmup_steps
        if recorder is not None and warms_up and not ends:
            return  # tell it with the time of the capture
        self.tells = False
        self._tell_recovery(sinks)

    def _tell_recovery(self, sinks: list[Sink]) -> None:
        """Report which rank was started again, how far back, and the seconds of each phase."""
        phases = self.memory.phases
        who = " and ".join(map(str, self.again)) or "none"
        seconds = ", ".join(f"{name} {each:.2f}" for name, each in phases.items())
        whole = sum(phases.values())
        place = "the newest checkpoint" if self.start.checkpoint else "the beginning"
        place = "copies in memory" if self.memory.agreed else place
        text = (
            f"ranks started again: {who}; back from step {self.back_from} to {self.back_to}, "
            f"from {place}, in {whole:.2f} s: {seconds}"
        )
        named = {f"recovery_{name.replace(' ', '_')}_s": each for name, each in phases.items()}
        report = RecoveryReport(
            self.back_to, self.back_from, len(self.again), recovery_s=whole, **named
        )
        for sink in sinks:
            sink.note(f"step {self.progress.step}/{self.run.steps}  {text}")
            if isinstance(sink, JsonLines):
                sink.recovery(report)

    def _save_if_due(self) -> None:
        super()._save_if_due()
        if self._is_last_step or self.stops:
            self.copier.wait()
            return
        self.copier.check()
        if self.progress.step % self.interval == 0:
            self._warn_of_late_copies()
            self.copier.take(self.progress, self.feed.cursor.state())
            self.memory.attempt.progressed()

    def _warn_of_late_copies(self) -> None:
        """Warn once, on GPUs: after the copies that allocate memory."""
        copier, now = self.copier, time.monotonic()
        waited, self.waited = copier.waited - self.waited, copier.waited
        since, self.taken = now - self.taken, now
        self.intervals += 1
        if self.intervals != SETTLED or self.engine.device.type != "cuda":
            return
        found = late_copies(
            self.run.checkpoint.memory_every or 0,
            since / self.interval,
            waited_s=waited / self.interval,
            took_s=copier.took,
        )
        if found is not None and self.engine.groups.rank == 0:
            warn(found)
