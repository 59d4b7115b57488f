"""The training loop of one rank: batches -> forward and backward -> update -> report, with validations and checkpoints."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from app.choices import Device
from app.config import Run
from app.data.feed import Cursor, DataSplit, TrainFeed, ValidationFeed
from app.data.load import load_data, prepare
from app.data.tokenizer import Tokenizer, load_tokenizer
from app.engine.build import Engine, build_engine, plan_layout
from app.engine.checkpoint import Progress, load_checkpoint, save_checkpoint, verify_checkpoint
from app.engine.generate import sample_tokens
from app.engine.groups import Groups, create_groups, process_world
from app.engine.report import Meter, StepReport, Stopwatch, ValidationReport
from app.engine.run_folder import CHECKPOINTS, choose_folders, plain, write_config
from app.engine.sinks import Console, JsonLines, Sink, Wandb
from app.engine.step import TrainingStep, Validation
from app.engine.wrap_up import print_opening, print_summary
from app.errors import ConfigError
from app.optim.lr import lr_at, weight_decay_at

T = TypeVar("T")


def usable_gpus(run: Run) -> int:
    """GPUs of this host that the run may use; 0: it computes on the CPU. Raises ConfigError for train.device=cuda without one."""
    found = torch.cuda.device_count() if run.train.device is not Device.cpu else 0
    if run.train.device is Device.cuda and not found:
        raise ConfigError("train.device", run.train.device, "this host has no usable GPU", "auto or cpu")
    return found


def train(run: Run, rank: int, local_rank: int) -> None:
    """Train on this rank from start to end. Raises ConfigError for what only the data or a checkpoint can reveal."""
    device = torch.device("cuda", local_rank) if usable_gpus(run) else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.set_stream(torch.cuda.Stream())  # graphs captured later need gradients that were never on the default stream
    with process_world(rank, run.world_size, device):
        groups = create_groups(plan_layout(run), rank)
        data = load_all_data(run, groups)
        start = rank_zero_says(groups, lambda: _start(run))
        engine = build_engine(run, groups, device)
        Trainer(run, engine, data, start).fit()


@dataclass(frozen=True, slots=True)
class Start:
    """Where the run writes and what it continues from."""

    run_dir: Path
    checkpoint: Path | None
    manifest: dict[str, Any] | None  # of the checkpoint


def _start(run: Run) -> Start:
    run_dir, checkpoint = choose_folders(run)
    manifest = verify_checkpoint(checkpoint, run.model) if checkpoint else None
    if manifest and manifest["step"] >= run.train.steps:
        raise ConfigError(
            "train.steps",
            run.train.steps,
            f"the checkpoint {checkpoint} has already taken {manifest['step']}",
            manifest["step"] + 100,
        )
    return Start(run_dir, checkpoint, manifest)


def rank_zero_says(groups: Groups, decide: Callable[[], T]) -> T:
    """What `decide()` returns on rank 0, on every rank; its ConfigError likewise."""
    said: list[Any] = [None]
    if groups.rank == 0:
        try:
            said = [decide()]
        except ConfigError as error:
            said = [error]
    if groups.world.size() > 1:
        dist.broadcast_object_list(said, src=0, group=groups.world)
    if isinstance(said[0], ConfigError):
        raise said[0]
    return said[0]


@dataclass(frozen=True, slots=True)
class Data:
    """Everything read from the corpus."""

    tokenizer: Tokenizer
    train: DataSplit
    validation: DataSplit


def load_all_data(run: Run, groups: Groups) -> Data:
    """Tokenizer and both splits; rank 0 prepares the cache that the others then only map. Raises ConfigError."""
    tokenizer = load_tokenizer(run.data.tokenizer)
    if tokenizer.vocab_size > run.model.vocab_size:
        rule = f"data.tokenizer={run.data.tokenizer} has {tokenizer.vocab_size} ids"
        raise ConfigError("model.vocab_size", run.model.vocab_size, rule, -(-tokenizer.vocab_size // 8) * 8)
    rank_zero_says(groups, lambda: prepare(run.data, tokenizer))
    return Data(tokenizer, *load_data(run.data, run.train.seq_len, run.train.seed, tokenizer))


class Trainer:
    """Owns what changes during a run: progress, data cursor and, through the engine, parameters and moments."""

    def __init__(self, run: Run, engine: Engine, data: Data, start: Start) -> None:
        self.run, self.engine, self.data, self.run_dir = run, engine, data, start.run_dir
        self.progress, cursor = Progress(), Cursor()
        if start.checkpoint and start.manifest:
            self.progress, state = load_checkpoint(start.checkpoint, start.manifest, engine)
            cursor = Cursor.from_state(state)
        groups, batch = engine.groups, run.train.micro_batch
        self.feed = TrainFeed(data.train, groups.dp_rank, run.dp, batch, run.num_microbatches, cursor)
        self.held_out = ValidationFeed(data.validation, groups.dp_rank, run.dp, batch, run.train.eval_batches)
        self.training_step = TrainingStep(run, engine)
        self.validation = Validation(run, engine, len(self.held_out))
        self.meter = Meter(run, engine)
        self.last_saved = self.progress.step

    @property
    def leads(self) -> bool:
        """Whether this rank writes the run folder."""
        return self.engine.groups.rank == 0

    def fit(self) -> None:
        """Train to the last step, then validate, sample, save and sum up."""
        if self.leads:
            write_config(self.run, self.run_dir)
            print_opening(self.run, self.engine, self.run_dir, self.progress.step)
        with self._sinks() as sinks:
            watch, validated = Stopwatch(), None
            while self.progress.step < self.run.train.steps:
                report = self._step(watch)
                for sink in sinks:
                    sink.step(report)
                if self._validates_now():
                    validated = self._validate()
                    for sink in sinks:
                        sink.validation(validated)
                self._save_if_due()
                if self._validates_now() or self.last_saved == self.progress.step:
                    watch.lap()  # validation and saving are not part of the next step
        text = self._sample()
        if self.leads:
            print_summary(self.run, self.run_dir, self.data.tokenizer, self.data.train, self.data.validation, validated, text)

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

    def _step(self, watch: Stopwatch) -> StepReport:
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

    def _validate(self) -> ValidationReport:
        loss, tokens = self.validation(list(self.held_out))
        return ValidationReport(self.progress.step, loss, tokens)

    def _save_if_due(self) -> None:
        step, interval = self.progress.step, self.run.checkpoint.interval
        if interval and (step % interval == 0 or step == self.run.train.steps):
            folder = self.run_dir / CHECKPOINTS
            save_checkpoint(
                folder, self.engine, self.run.model, self.progress, self.feed.cursor.state(), self.run.checkpoint.keep_last
            )
            self.last_saved = step

    def _sample(self) -> str | None:
        """Text that continues the first tokens of the validation data; None when none is asked for."""
        count, tokenizer = self.run.train.sample_tokens, self.data.tokenizer
        if not count:
            return None
        prompt = next(iter(self.held_out)).tokens_BS[0, : self.run.train.seq_len // 2].tolist()
        seed, window = self.run.train.seed, self.run.train.seq_len
        prompt = rank_zero_says(self.engine.groups, lambda: prompt)
        drawn = sample_tokens(self.engine, prompt, count, window, tokenizer.vocab_size, seed)
        return f"{tokenizer.decode(prompt)}▶{tokenizer.decode(drawn)}"
