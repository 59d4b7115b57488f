"""Experiment trackers: metrics in panels, sample, tags; Weights & Biases and TensorBoard.

MLflow and Trackio have modules of their own.
"""

from __future__ import annotations

import dataclasses
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import Any, Literal

from app.choices import WandbMode
from app.engine.files.run_folder import PLAN, plain
from app.engine.report.sinks import Sink
from app.engine.step.records import RollbackReport, StepReport, ValidationReport
from app.errors import warn
from app.own_files import read_regular, write_whole
from app.plan.formatting import drawable
from app.planner.plan import Plan
from app.planner.summary import degree_sizes
from app.version import VERSION, Version

ID = re.compile(r"[A-Za-z0-9_.-]{1,64}")  # id of a run in a tracker
WANDB_ID = "wandb_id"  # file in the run folder with that id
FLUSH_S = 10  # seconds after which TensorBoard can show recorded values
TENSORBOARD = "tensorboard"  # folder in the run folder
# Panel -> its metrics, by their keys in metrics.jsonl; `step` is the axis of all.
PANELS = {
    "train": ("loss", "aux_loss", "z_loss", "lr", "weight_decay", "grad_norm",
              "skipped", "loss_scale", "tokens", "epochs", "rollback_from", "rollbacks"),
    "val": ("val_loss", "val_tokens"),
    "perf": ("time", "step_ms", "data_wait_ms", "data_wait_max_ms", "launch_ms",
             "device_wait_ms", "checkpoint_blocked_ms", "tokens_per_s", "tokens_per_s_per_gpu",
             "tflops_per_gpu", "mfu", "joules_per_token", "host_delay_ms", "host_cores",
             "host_others", "gpu_clock", "gpu_others"),
    "memory": ("memory_allocated_gib", "memory_reserved_gib", "memory_peak_gib"),
    "moe": ("moe_load_mean", "moe_load_worst", "moe_rank_load", "moe_dropped", "reruns",
            "moe_rank_load_before", "moe_rank_load_after", "moe_clones"),
    "fp8": ("fp8_overflow_inputs", "fp8_overflow_weights", "fp8_overflow_grads",
            "fp8_overflow_worst"),
    "graph": ("graph_count", "graph_capture_s", "graph_objects_gib", "graph_static_gib",
              "graph_cut_gib", "graph_pool_gib"),
}  # fmt: skip
# Key -> name in trackers, without the panel's word twice: val_loss is val/loss.
NAMES = {
    key: f"{panel}/{key.removeprefix(f'{panel}_')}"
    for panel, keys in PANELS.items()
    for key in keys
}
BRIEF = 80  # characters at either end of an error's text that are shown
AnyReport = StepReport | ValidationReport | RollbackReport


def in_panels(report: AnyReport) -> dict[str, Any]:
    """Return a report's metrics under their names in trackers, as "train/loss"."""
    found = {}
    for key, value in report.metrics().items():
        name, slash, label = key.partition("/")  # of a part, which training alone may have
        if name != "step":
            place = NAMES.get(name, f"train/{name}") if slash else NAMES[name]
            found[place + slash + label] = value
    return found


def brief(error: Exception) -> str:
    """Return an error on one line, without the middle of a long text: causes stand at the end."""
    text = " ".join(repr(error).split())
    return text if len(text) <= 2 * BRIEF else f"{text[:BRIEF]} … {text[-BRIEF:]}"


def tags(plan: Plan) -> tuple[str, str, str]:
    """Return tags that distinguish runs: layout=dp2-pp4, schedule=1f1b, graphs=none."""
    graph = plan.run.cuda_graph
    partial = graph.of_parts
    parts = "+".join(part.value for part in graph.scope) or "layer"
    held = parts if partial else graph.impl.value
    layout = "-".join(f"{axis}{size}" for axis, size in degree_sizes(plan).items())
    return f"layout={layout}", f"schedule={plan.schedule_name.value}", f"graphs={held}"


class Tracker(Sink, ABC):
    """Sink with panels that records at the log interval; its failure does not stop training."""

    def __init__(self, name: str, plan: Plan) -> None:
        self._name = name
        self._interval = plan.run.log.interval
        self._total = plan.run.steps
        self._lost = False

    def step(self, report: StepReport) -> None:
        """Record a step at `log.interval`, and the last one."""
        if report.step % self._interval == 0 or report.step == self._total:
            self._attempt(lambda: self.record(report.step, in_panels(report)))

    def validation(self, report: ValidationReport) -> None:
        """Record a validation."""
        self._attempt(lambda: self.record(report.step, in_panels(report)))

    def rollback(self, report: RollbackReport) -> None:
        """Record a rollback, after which steps are repeated."""
        self._attempt(lambda: self.go_back(report))

    def note(self, text: str) -> None:
        """No-op: notes are for the console."""

    def sample(self, step: int, text: str) -> None:
        """Record the generated text."""
        self._attempt(lambda: self.record_text(step, text))

    def close(self) -> None:
        """Finish the run and its files."""
        self._attempt(self.finish)

    @abstractmethod
    def record(self, step: int, values: Mapping[str, float]) -> None:
        """Record named values of a step."""

    @abstractmethod
    def record_text(self, step: int, text: str) -> None:
        """Record the text that the model generated after `step`."""

    @abstractmethod
    def go_back(self, report: RollbackReport) -> None:
        """Handle a rollback: steps after the checkpoint are recorded again."""

    @abstractmethod
    def finish(self) -> None:
        """Close the run."""

    @abstractmethod
    def give_up(self) -> None:
        """Clean up after a failure; no other method is called afterwards."""

    def _attempt(self, tell: Callable[[], None]) -> None:
        if self._lost:
            return
        try:
            tell()
        except Exception as error:
            self._lost = True
            warn(f"{self._name} has stopped recording ({brief(error)}); metrics.jsonl continues")
            with suppress(Exception):
                self.give_up()


class Wandb(Tracker):
    """Weights & Biases run in the run folder; a resumed run keeps its id.

    Its service is a separate process. SLURM ends it together with the ranks, which still save a
    step after that.
    """

    def __init__(self, plan: Plan, run_dir: Path, version: Version, run_id: str) -> None:
        import wandb  # takes a second, hence only on use, and beside the first steps

        super().__init__("Weights & Biases", plan)
        self._wandb = wandb
        log = plan.run.log
        self._run = wandb.init(
            project=log.project,
            group=log.group,
            job_type="train",
            tags=tags(plan),
            name=drawable(run_dir.name),
            dir=run_dir,
            config={**plain(dataclasses.asdict(plan.run)), VERSION: version.record()},
            id=run_id,
            mode=_mode(log.wandb_mode, wandb.setup().settings.mode, wandb.login),
            resume="allow",
            settings=wandb.Settings(silent=True, console="off"),
        )
        # The axis of all plots: after a rollback steps repeat, which W&B's own counter must not.
        self._run.define_metric("*", step_metric="step")
        self._at = self._run.step - 1  # the counter's last value; that of a resumed run online
        files = self._run.dir  # a copy here can be synchronised even if the run folder moves
        write_whole(Path(files) / PLAN, read_regular(run_dir / PLAN))
        self._run.save(str(Path(files) / PLAN), base_path=files, policy="now")

    def record(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values as one row of `step`."""
        self._log(step, values)

    def record_text(self, step: int, text: str) -> None:
        """Log the text as HTML, which keeps line breaks."""
        page = f'<pre style="white-space: pre-wrap">{escape(text)}</pre>'
        self._log(step, {"sample": self._wandb.Html(page)})

    def _log(self, step: int, values: Mapping[str, Any]) -> None:
        """Log a row at once, under a counter that is the step or one more than the last: W&B drops
        rows whose counter falls, and an upload of several offline runs needs their order.
        """
        self._at = max(step, self._at + 1)
        self._run.log({"step": step, **values}, step=self._at, commit=True)

    def go_back(self, report: RollbackReport) -> None:
        """Log a row; repeated steps are appended after it."""
        self.record(report.step, in_panels(report))

    def finish(self) -> None:
        """End the run and its service."""
        self._run.finish()

    def give_up(self) -> None:
        """Stop its service, which would otherwise fail again when this process ends."""
        self._wandb.teardown()


def claim_id(run_dir: Path, file_name: str = WANDB_ID, tracker: str = "Weights & Biases") -> str:
    """Return the id of a run folder's run in a tracker: the recorded one, or a new one, which is
    recorded before anything can fail. Raises OSError.
    """
    file = run_dir / file_name
    known = recorded_id(file, tracker)
    if known is None:
        known = secrets.token_hex(4)
        write_whole(file, known)
    return known


def recorded_id(file: Path, tracker: str = "Weights & Biases") -> str | None:
    """Return the id of the run to continue; None for a new one, with a warning if invalid."""
    try:
        text = read_regular(file).decode(errors="replace")
    except FileNotFoundError:
        return None
    except OSError:
        text = ""
    if ID.fullmatch(text):
        return text
    warn(f"{file} holds no id of a {tracker} run, so a new one begins")
    return None


def _mode(
    asked: WandbMode, preset: str, login: Callable[..., bool]
) -> Literal["online", "offline"] | None:
    """Return the mode of a W&B run, None for W&B's own choice; print why it is offline if the user
    has asked for online, or has credentials that do not work.

    `preset` is the mode of W&B's own settings (WANDB_MODE, `wandb offline`).
    """
    if asked is WandbMode.offline:
        return "offline"
    away = preset != "online"  # W&B then warns of a login, and denies it
    if asked is WandbMode.auto and away:
        return None
    why = "nobody is logged in (`wandb login`)" if asked is WandbMode.online else ""
    try:
        if away:
            why = f"W&B itself is set to {preset} (WANDB_MODE, or `wandb online` undoes it)"
        elif login(prompt=False):
            return "online" if asked is WandbMode.online else None
    except Exception as error:  # the server refuses them, or cannot be reached
        why = str(error)
    if why:
        said = f"log.wandb_mode={asked.value}: {why}"
        warn(f"{said}; recording offline, `wandb sync` uploads it later")
    return "offline"


class TensorBoard(Tracker):
    """TensorBoard events in the run folder; those of repeated steps are hidden."""

    def __init__(self, plan: Plan, run_dir: Path, from_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # fails at import without tensorboard

        super().__init__("TensorBoard", plan)
        self._make = SummaryWriter
        self._folder = run_dir / TENSORBOARD
        self._open(from_step)

    def _open(self, from_step: int) -> None:
        hidden = from_step + 1 if from_step else 0  # earlier events from this step on are hidden
        self._writer = self._make(self._folder, purge_step=hidden, flush_secs=FLUSH_S)

    def record(self, step: int, values: Mapping[str, float]) -> None:
        """Add a point to each plot."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def record_text(self, step: int, text: str) -> None:
        """Add the text as a code block, since TensorBoard renders Markdown."""
        code = "\n".join(f"    {line}" for line in text.splitlines())
        self._writer.add_text("sample", code, step)

    def go_back(self, report: RollbackReport) -> None:
        """Start a new event file that hides the repeated steps."""
        self._writer.close()
        self._open(report.step)
        self.record(report.step, in_panels(report))

    def finish(self) -> None:
        """Write remaining events."""
        self._writer.close()

    def give_up(self) -> None:
        """Close the file as it is."""
        self._writer.close()
