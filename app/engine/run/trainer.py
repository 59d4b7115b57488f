"""Training loop of one rank: batches, step, report, validation, checkpoints."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from app.data.feed import Batch, Cursor, TrainFeed
from app.engine.capture.facts import GraphFacts
from app.engine.checkpoint.load import Progress, load_checkpoint
from app.engine.checkpoint.saver import Saver
from app.engine.decoding.generate import begun, sample_text
from app.engine.export.export import export_together
from app.engine.export.texts import keep_texts
from app.engine.fast_paths import facts_of
from app.engine.files.attempt import Attempt
from app.engine.files.checkpoints import (
    CHECKPOINTS,
    checkpoint_name,
    newest_checkpoint,
    read_manifest,
)
from app.engine.files.run_folder import (
    FolderLock,
    begin_metrics,
    create_run_folder,
    describe_run,
    forget_end,
    note_end,
    read_metrics,
)
from app.engine.files.signals import StopRequest
from app.engine.ranks.agreement import rank_zero_says
from app.engine.report.beside import tracking
from app.engine.report.metrics import Meter, Stopwatch
from app.engine.report.opening import print_opening
from app.engine.report.pace import end_line, pace_of
from app.engine.report.sinks import Console, JsonLines, Sink
from app.engine.report.summary import sum_up
from app.engine.run.bad_steps import BadSteps, state_is_finite
from app.engine.run.corruption import CorruptionGuard
from app.engine.run.ready import StartTimes
from app.engine.run.validations import Validations
from app.engine.run.worse import WorseInARow
from app.engine.start.kept_tokenizer import end_of, keep_tokenizer
from app.engine.start.start import Data, Start
from app.engine.step.engine import Engine
from app.engine.step.profiled import ProfiledStep
from app.engine.step.records import (
    CorruptionReport,
    RollbackReport,
    StepReport,
    ValidationReport,
)
from app.engine.step.step import TrainingStep
from app.errors import Corrupted, Diverged, writing
from app.hf.file_names import EXPORTED
from app.optim.lr import lr_at
from app.planner.explain import Facts
from app.telling import telling
from app.version import VERSION, Version


class Trainer:
    """Owner of a run's changing state: progress and data cursor; weights are in the engine."""

    def __init__(
        self, engine: Engine, data: Data, start: Start, times: StartTimes | None = None
    ) -> None:
        run = engine.plan.run
        self.times = times or StartTimes()
        self.run = run
        self.engine = engine
        self.data = data
        self.start = start
        self.progress, cursor = self._restored()
        self.feed = self._feed_from(cursor)
        self.batches: list[Batch] = []  # of the last step
        self.request = StopRequest()
        self.training_step = (
            TrainingStep(engine, self.request)
            if run.train.profile is None
            else ProfiledStep(engine, self.request, lambda: (self.run_dir, self.progress.step))
        )
        self.held_out = Validations(engine, data)
        self.meter = Meter(engine, first_step=self.progress.step + 1)
        self.version = Version.of() if self.is_rank_zero else None
        self.pace = pace_of(engine) if self.is_rank_zero else None
        self.saver = Saver(engine, self.request.ask, self._origin())
        self.saved: Path | None = None  # checkpoint of the last step taken
        self.bad_steps = BadSteps(run.train)
        self.corruption = CorruptionGuard.of(self.training_step, run.train)
        self.stops = False  # True once the ranks have agreed to end after this step
        self.worse = WorseInARow(run.train.stop_after_worse)

    def _restored(self) -> tuple[Progress, Cursor]:
        """Load the checkpoint that the run starts from, if any."""
        start = self.start
        if not (start.checkpoint and start.manifest):
            return Progress(), Cursor()
        progress, state = load_checkpoint(start.checkpoint, start.manifest, self.engine)
        self.times.end("reading the checkpoint")
        return progress, Cursor.from_state(state)

    def _feed_from(self, cursor: Cursor) -> TrainFeed:
        run = self.run
        return TrainFeed(
            self.data.train,
            self.engine.groups.dp_rank,
            run.dp,
            micro_batch=run.train.micro_batch,
            num_microbatches=run.num_microbatches,
            cursor=cursor,
        )

    @property
    def is_rank_zero(self) -> bool:
        """True on rank 0, which writes the run folder."""
        return self.engine.groups.rank == 0

    @property
    def prints_progress(self) -> bool:
        """True on the rank that prints progress to the console, if any."""
        return self.is_rank_zero and self.run.log.console

    def _program(self) -> Version:
        assert self.version is not None, "only rank 0 has looked, and only it asks"
        return self.version

    def _facts(self) -> Facts:
        return facts_of(self.run, self.engine.device, self.engine.static)

    def _origin(self) -> dict[str, Any]:
        """Return the origin recorded in checkpoints (data, version); empty except on rank 0."""
        return {"data": self.data.record, VERSION: self.version.record()} if self.version else {}

    def fit(self, attempt: Attempt, lock: FolderLock) -> bool:
        """Train to the last step, then validate, sample, save and print the summary.

        Returns False if the ranks were told to stop before that. `lock` is that of the run folder.
        Raises ConfigError, the same on every rank.
        """
        self.lock = lock
        self.engine.watchdog.rest("opening the run folder")
        self.run_dir = rank_zero_says(self.engine.groups, lambda: self._open_folder(attempt))
        if self.is_rank_zero:
            self._print_opening(attempt.settings)
        with self.request.listening(attempt.end_process):
            # trackers close last: a slow one must not hold up a checkpoint before a deadline
            with self._tracking(attempt) as trackers:
                with self._all_saved(), self._sinks(trackers) as sinks:
                    validated = self._train(sinks)
                    text = None if self.stops else self._sample(sinks)
                rank_zero_says(self.engine.groups, lambda: self._check_files(sinks))
                self._say_farewell(attempt)
            if self.stops:  # until all are here, a second signal ends each with its exit code
                rank_zero_says(self.engine.groups, lambda: None)
                return False
        advice = self.meter.advice()
        if self.run.checkpoint.export_hf:
            self._export()

        def conclude() -> None:
            plan, first = self.engine.plan, self.meter.first_step
            sum_up(
                self.run,
                self.run_dir,
                self.data,
                report=validated,
                sample=text,
                advice=advice,
                off_plan=end_line(plan, self.run_dir, self._facts(), first_step=first),
            )
            self.saver.name_newest(self.run_dir)
            note_end(self.run_dir, self.progress.step)

        self.engine.watchdog.rest("summing up the run")
        # All wait: if rank 0 dies before the end is noted, none of the others may be gone.
        rank_zero_says(self.engine.groups, conclude)
        return True

    def _print_opening(self, settings: str | None) -> None:
        """Print what the run is; with log=none only its folder, for a program that reads it."""
        if not self.prints_progress:
            print(self.run_dir, flush=True)
            return
        version = self._program()
        print_opening(
            self.engine,
            str(self.run_dir),
            self.start,
            data=self.data,
            version=version,
            settings=settings,
        )

    def _export(self) -> None:
        """Export the checkpoint of the last step as a Hugging Face model."""
        newest = rank_zero_says(self.engine.groups, lambda: newest_checkpoint(self.run_dir))
        assert newest is not None, "runs that export save their last step"
        with telling("exporting the model", aloud=self.prints_progress):
            activity = self.engine.watchdog.main
            export_together(newest, self.run_dir / EXPORTED, self.engine.groups, activity)

    def _check_files(self, sinks: Sequence[Sink]) -> None:
        """Raise ConfigError if the run folder is gone or metrics.jsonl lacks lines."""
        self.lock.check()
        for sink in sinks:
            if isinstance(sink, JsonLines):
                sink.check()

    @contextmanager
    def _all_saved(self) -> Iterator[None]:
        """Wait after the block until all checkpoints are on disk.

        If the block raised Diverged, raise it again with the newest checkpoint in its message.
        """
        try:
            yield
        except Diverged as end:
            self.saver.wait()
            newest = newest_checkpoint(self.run_dir)
            left = f"the newest checkpoint is {newest}" if newest else "nothing was saved"
            end.args = (f"{end}; {left}",)
            raise
        with self._telling_save():
            self.saver.wait()
        # torchrun kills the other ranks as soon as one exits with a non-zero code
        self.engine.groups.barrier()
        self.engine.watchdog.rest("finishing the experiment trackers")

    def _open_folder(self, attempt: Attempt) -> Path:
        folder = create_run_folder(self.run, self.start.run_dir)
        self.lock.take(folder)
        attempt.note(folder)  # before the first file, so that a restart recognises the folder
        forget_end(folder)
        describe_run(self.engine.plan, folder, self._program(), self._facts())
        begin_metrics(folder, self.progress.step)
        keep_texts(self.run, folder, self.start.checkpoint)
        keep_tokenizer(self.run, folder, end_of(self.data.tokenizer))
        return folder

    def _train(self, sinks: Sequence[Sink]) -> ValidationReport | None:
        """Run the remaining steps; return the last validation."""
        self.times.end("run folder")
        if self.worse.most is not None:
            losses = rank_zero_says(self.engine.groups, self._earlier_losses)
            self.worse = WorseInARow.after(self.worse.most, losses)
        validated = self._first_validation(sinks)
        if validated is not None:
            self.times.end("validation")
        stopwatch = Stopwatch()
        while not (self._is_last_step or self.stops):
            report = self.step(stopwatch)
            for sink in sinks:
                sink.step(report)
            self._tell_ready(sinks)
            self._tell_graphs(sinks)
            self._tell_pace(sinks, report)
            if self.bad_steps.rolls_back(report, self.engine.loss_scale):
                # back to the checkpoint's state, but on with the next data: a bad batch would recur
                self._roll_back(sinks)
                stopwatch.lap()
                continue
            if self.corruption is not None and not self.stops:
                if self.corruption.rolls_back(report.step, self.batches, saves=self._saves_now()):
                    self._rewind(self.corruption, sinks)
                    stopwatch.lap()
                    continue
                stopwatch.lap()  # a check is not part of the next step
            if self._validates_now() and not self.stops:
                validated = self._validate(sinks)
                self._tell_end(sinks)
            self._save_if_due()
            if self._validates_now() or self.saved:
                stopwatch.lap()  # validation and saving are not part of the next step
        return validated

    @property
    def _is_last_step(self) -> bool:
        """True if no step follows."""
        return self.progress.step >= self.run.steps or self.worse.ends

    def _earlier_losses(self) -> list[float]:
        """Return the losses of validations that the run folder holds."""
        return [row["val_loss"] for row in read_metrics(self.run_dir) if "val_loss" in row]

    def _tell_end(self, sinks: Sequence[Sink]) -> None:
        """Report that the run ends before its last step."""
        if not self.worse.ends or self.progress.step == self.run.steps:
            return
        text = f"the run ends: the validation loss was not below {self.worse.best:.4f} in "
        text += f"{self.worse.count} validations (train.stop_after_worse)"
        for sink in sinks:
            sink.note(f"step {self.progress.step}/{self.run.steps}  {text}")

    def _tell_ready(self, sinks: Sequence[Sink]) -> None:
        """Report start-up times after the first step of this process, with log.verbose."""
        if self.training_step.taken != 1 or not self.run.log.verbose:
            return
        self.times.end("first step")
        for sink in sinks:
            sink.note(f"step {self.progress.step}/{self.run.steps}  {self.times}")

    def _tell_graphs(self, sinks: Sequence[Sink]) -> None:
        """Report captured graphs beside the plan, after the step that captured them, with
        log.verbose.
        """
        engine = self.engine
        recorder = engine.recorder
        captured_now = self.training_step.taken == self.run.cuda_graph.warmup_steps + 1
        if not sinks or recorder is None or not (captured_now and self.run.log.verbose):
            return
        plan = engine.plan.graphs[engine.groups.pp_rank]
        text = GraphFacts.of(recorder).beside(plan.num_graphs if plan else 1)
        for sink in sinks:
            sink.note(f"step {self.progress.step}/{self.run.steps}  {text}")

    def _tell_pace(self, sinks: Sequence[Sink], report: StepReport) -> None:
        """Report once if steps are slower than planned."""
        if self.pace is None:
            return
        text = self.pace.sentence(report, self.meter.rank_load)
        for sink in sinks if text else ():
            sink.note(f"step {self.progress.step}/{self.run.steps}  {text}")

    def _say_farewell(self, attempt: Attempt) -> None:
        if self.is_rank_zero and self.stops:
            attempt.tell(self.request.farewell(self.progress.step, self.saved, attempt.command))

    def _tracking(self, attempt: Attempt) -> AbstractContextManager[Sequence[Sink]]:
        """Open the experiment trackers of this run; none except on rank 0."""
        if not self.is_rank_zero:
            return nullcontext(())
        return tracking(
            self.engine.plan,
            self.run_dir,
            self.progress.step,
            version=self._program(),
            absent=attempt.absent,
            stopped=lambda: self.stops,
        )

    @contextmanager
    def _sinks(self, trackers: Sequence[Sink]) -> Iterator[Sequence[Sink]]:
        """Open metrics.jsonl and the console, and close them after the block.

        Yields all loggers of this run; none except on rank 0.
        """
        with ExitStack() as stack:
            sinks: list[Sink] = []
            if self.is_rank_zero:
                with writing(self.run_dir):
                    lines = JsonLines(self.run_dir, gone=self.request.ask)
                stack.callback(lines.close)
                sinks += [lines, *trackers]
            if self.prints_progress:
                console = Console(self.run, self.progress.step)
                stack.callback(console.close)
                sinks.append(console)
            yield sinks

    def step(self, stopwatch: Stopwatch) -> StepReport:
        """Train on the next global batch; `stopwatch` measures time from step to step."""
        run = self.run
        lr = lr_at(self.progress.updates + 1, run)
        following = self.feed.look_ahead if self.progress.step + 1 < run.steps else None
        began = time.perf_counter()
        batches = self.batches = self.feed.next_step()
        data_wait = time.perf_counter() - began
        by_source = self.feed.by_source()
        report, totals = self.training_step(batches, lr, run.optim.weight_decay, following)
        self.meter.count(totals)
        report.step = self.progress.step + 1
        report.tokens = self.progress.tokens + self.meter.tokens_per_step
        report.parts = {**(by_source or {}), **report.parts}
        updates = self.progress.updates + 1 - report.skipped
        self.progress = Progress(report.step, updates, report.tokens)
        # a stop request during the last step changes nothing: the run ends anyway
        self.stops = self.training_step.stops and report.step < run.steps
        report.step_ms = stopwatch.lap() * 1e3
        report.data_wait_ms += data_wait * 1e3  # that for the next step's batches is in it
        blocked = self.saver.blocked()
        report.checkpoint_blocked_ms = None if blocked is None else blocked * 1e3
        self.meter.complete(report)
        return report

    def _validates_now(self) -> bool:
        step = self.progress.step
        interval = self.run.train.eval_interval
        return step == self.run.steps or bool(interval and step % interval == 0)

    def _owes_validation(self) -> bool:
        """True if a validation is due at the start, or was skipped when the last process ended."""
        step = self.progress.step
        if not step or not self._validates_now():
            return not step
        rows = rank_zero_says(
            self.engine.groups,
            lambda: [row for row in read_metrics(self.run_dir) if row["step"] == step],
        )
        return any("loss" in row for row in rows) and not any("val_loss" in row for row in rows)

    def _first_validation(self, sinks: Sequence[Sink]) -> ValidationReport | None:
        """Run a validation owed before the first step, or the final one if no step is left."""
        if self._owes_validation():
            return self._validate(sinks)
        return self._validate(()) if self.progress.step == self.run.steps else None

    def _validate(self, sinks: Sequence[Sink]) -> ValidationReport:
        report = self.held_out.report(self.progress.step)
        self.worse.add(report.val_loss)
        for sink in sinks:
            sink.validation(report)
        return report

    def _saves_now(self) -> bool:
        interval = self.run.checkpoint.interval
        at_interval = bool(interval) and self.progress.step % interval == 0
        return bool(interval) and (at_interval or self._is_last_step or self.stops)

    def _save_if_due(self) -> None:
        if not self._saves_now():
            self.saved = None
            return
        with self._telling_save():
            self.saved = self._save()

    def _telling_save(self) -> AbstractContextManager[None]:
        """Print the progress of a slow save at the end of a run, when nothing else is printed."""
        ends = self.stops or self._is_last_step
        what = f"saving {checkpoint_name(self.progress.step)}"
        return telling(what, self.saver.progress, aloud=self.prints_progress and ends)

    def _save(self) -> Path:
        # After a bad step check the state: a checkpoint of NaNs must not become the newest.
        if self.bad_steps.in_a_row and not state_is_finite(self.engine):
            bad = "parameters or moments are not finite"
            raise Diverged(f"step {self.progress.step} was to be saved, but {bad}")
        rank_zero_says(self.engine.groups, self.lock.check)
        return self.saver.save(self.run_dir / CHECKPOINTS, self.progress, self.feed.cursor.state())

    def _roll_back(self, sinks: Sequence[Sink]) -> None:
        """Load the newest checkpoint but keep the data cursor. Raises Diverged without one."""
        bad = self.progress.step
        nothing = "there is no checkpoint to go back to (train.on_bad_step=rollback)"
        self._load_newest(Diverged(f"step {bad} is not finite, and {nothing}"))
        report = RollbackReport(self.progress.step, bad, self.bad_steps.rollbacks)
        for sink in sinks:
            sink.rollback(report)

    def _rewind(self, corruption: CorruptionGuard, sinks: Sequence[Sink]) -> None:
        """Load the newest checkpoint and its data cursor. Raises Corrupted without one."""
        bad = self.progress.step
        nothing = "there is no checkpoint to go back to (train.on_corruption=rollback)"
        text, ranks = corruption.last.text, corruption.last.ranks
        state = self._load_newest(Corrupted(f"step {bad}: {text}, and {nothing}", ranks))
        self.feed = self._feed_from(Cursor.from_state(state))
        report = CorruptionReport(self.progress.step, bad, corruption.rollbacks)
        for sink in sinks:
            sink.note(f"step {bad}/{self.run.steps}  {text}")
            sink.rollback(report)

    def _load_newest(self, otherwise: Diverged) -> dict[str, Any]:
        """Load the newest checkpoint and drop the metrics behind it; return its data cursor."""
        self.saver.wait()
        found = rank_zero_says(self.engine.groups, self._newest)
        if found is None:
            raise otherwise
        self.saved = found[0]
        self.progress, state = load_checkpoint(*found, self.engine)
        at = self.progress.step
        rank_zero_says(self.engine.groups, lambda: begin_metrics(self.run_dir, at))
        return state

    def _newest(self) -> tuple[Path, dict[str, Any]] | None:
        path = newest_checkpoint(self.run_dir) or self.start.checkpoint
        return None if path is None else (path, read_manifest(path))

    def _sample(self, sinks: Sequence[Sink]) -> str | None:
        """Return text that continues the first validation tokens; None without a sink for it."""
        log = self.run.log
        if not (log.console or log.tracked):
            return None
        feed = self.held_out.first
        found = begun(next(iter(feed)), feed.dataset.marked)
        # replicas have different validation data, and all ranks must generate the same
        prompt, end = rank_zero_says(self.engine.groups, lambda: found)
        self.engine.watchdog.note("a sample")
        text = sample_text(
            self.engine, self.data.tokenizer, prompt, end=end, aloud=self.prints_progress
        )
        self.engine.watchdog.rest("the end of the run")
        if text is not None:
            for sink in sinks:
                sink.sample(self.progress.step, text)
        return text
