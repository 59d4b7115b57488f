"""The training loop of one rank: batches -> forward and backward -> update -> report, with validations and checkpoints."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch

from app.config import Run
from app.data.feed import Cursor, TrainFeed, ValidationFeed
from app.engine.build import Engine, build_engine, plan_layout
from app.engine.checkpoint import Progress, load_checkpoint, save_checkpoint
from app.engine.generate import sample_tokens
from app.engine.groups import create_groups, process_world
from app.engine.report import Meter, StepReport, Stopwatch, ValidationReport
from app.engine.run_folder import CHECKPOINTS, create_run_folder, plain
from app.engine.sinks import Console, JsonLines, Sink, Wandb
from app.engine.start import Data, Start, choose_device, find_start, load_all_data, rank_zero_says
from app.engine.step import TrainingStep, Validation
from app.engine.wrap_up import print_opening, sum_up
from app.optim.lr import lr_at, weight_decay_at


def train(run: Run, rank: int, local_rank: int) -> None:
    """Train on this rank from start to end. Raises ConfigError for what only the host, data or a checkpoint can reveal."""
    device = choose_device(run, local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.set_stream(torch.cuda.Stream())  # graphs captured later need gradients that were never on the default stream
    with process_world(rank, run.world_size, device):
        groups = create_groups(plan_layout(run), rank)
        start = rank_zero_says(groups, lambda: find_start(run))
        data = load_all_data(run, groups, local_rank)
        engine = build_engine(run, groups, device)
        Trainer(run, engine, data, start).fit()


class Trainer:
    """Owns what changes during a run: progress, data cursor and, through the engine, parameters and moments."""

    def __init__(self, run: Run, engine: Engine, data: Data, start: Start) -> None:
        self.run, self.engine, self.data, self.start = run, engine, data, start
        self.progress, cursor = Progress(), Cursor()
        if start.checkpoint and start.manifest:
            self.progress, state = load_checkpoint(start.checkpoint, start.manifest, engine)
            cursor = Cursor.from_state(state)
        groups, batch = engine.groups, run.train.micro_batch
        self.feed = TrainFeed(data.train, groups.dp_rank, run.dp, batch, run.num_microbatches, cursor)
        self.held_out = ValidationFeed(data.validation, groups.dp_rank, run.dp, batch, run.eval_microbatches)
        self.training_step = TrainingStep(run, engine)
        self.validation = Validation(run, engine, len(self.held_out))
        self.meter = Meter(run, engine, first_step=self.progress.step + 1)
        self.last_saved = self.progress.step

    @property
    def leads(self) -> bool:
        """Whether this rank writes the run folder."""
        return self.engine.groups.rank == 0

    def fit(self) -> None:
        """Train to the last step, then validate, sample, save and sum up."""
        self.run_dir = rank_zero_says(self.engine.groups, lambda: create_run_folder(self.run, self.start.run_dir))
        if self.leads and self.run.log.console:
            print_opening(self.run, self.engine, self.run_dir, self.start)
        with self._sinks() as sinks:
            validated = None if self.progress.step else self._validate(sinks)
            watch = Stopwatch()
            while self.progress.step < self.run.train.steps:
                report = self.step(watch)
                for sink in sinks:
                    sink.step(report)
                if self._validates_now():
                    validated = self._validate(sinks)
                self._save_if_due()
                if self._validates_now() or self.last_saved == self.progress.step:
                    watch.lap()  # validation and saving are not part of the next step
        text = self._sample() if self.run.log.console else None
        if self.leads:
            sum_up(self.run, self.run_dir, self.data, validated, text)

    @contextmanager
    def _sinks(self) -> Iterator[Sequence[Sink]]:
        with ExitStack() as stack:
            sinks: list[Sink] = []
            for make in self._sink_makers():
                sinks.append(make())
                stack.callback(sinks[-1].close)
            yield sinks

    def _sink_makers(self) -> Iterator[Callable[[], Sink]]:
        if not self.leads:
            return
        yield lambda: JsonLines(self.run_dir, self.progress.step)
        if self.run.log.wandb:
            yield lambda: Wandb(self.run, self.run_dir, plain(dataclasses.asdict(self.run)))
        if self.run.log.console:
            yield lambda: Console(self.run, self.progress.step)

    def step(self, watch: Stopwatch) -> StepReport:
        """Train on the next batches; `watch` times what lies between two steps."""
        run, updates = self.run, self.progress.updates + 1
        lr, decay = lr_at(updates, run.optim, run.decay_steps), weight_decay_at(updates, run.optim, run.decay_steps)
        facts, totals = self.training_step(self.feed.next_step(), lr, decay)
        self.meter.count(totals)
        taken, tokens = self.progress.step + 1, self.progress.tokens + self.meter.tokens_per_step
        self.progress = Progress(taken, self.progress.updates + 1 - int(facts.skipped), tokens)
        return self.meter.report(taken, tokens, facts, lr, decay, watch.lap())

    def _validates_now(self) -> bool:
        step, interval = self.progress.step, self.run.train.eval_interval
        return step == self.run.train.steps or bool(interval and step % interval == 0)

    def _validate(self, sinks: Sequence[Sink]) -> ValidationReport:
        report = ValidationReport(self.progress.step, *self.validation(list(self.held_out)))
        for sink in sinks:
            sink.validation(report)
        return report

    def _save_if_due(self) -> None:
        step, interval = self.progress.step, self.run.checkpoint.interval
        if interval and (step % interval == 0 or step == self.run.train.steps):
            save_checkpoint(self.run_dir / CHECKPOINTS, self.engine, self.run, self.progress, self.feed.cursor.state())
            self.last_saved = step

    def _sample(self) -> str | None:
        """Text that continues the first tokens of the validation data; None when none is asked for."""
        count, tokenizer = self.run.train.sample_tokens, self.data.tokenizer
        if not count:
            return None
        prompt = next(iter(self.held_out)).tokens_BS[0, : max(1, self.run.train.seq_len // 2)].tolist()
        seed, window = self.run.train.seed, self.run.train.seq_len
        prompt = rank_zero_says(self.engine.groups, lambda: prompt)
        drawn = sample_tokens(self.engine, prompt, count, window, tokenizer.vocab_size, seed)
        return f"{tokenizer.decode(prompt)}▶{tokenizer.decode(drawn)}"
