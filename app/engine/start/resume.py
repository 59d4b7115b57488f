"""Choose the checkpoint to resume from, and check which settings may differ from it.

Every key of the configuration is either fixed or free. A resumed run may change its plan, how it
computes, and its training settings; it may not change the model or the stream of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

from app.choices import AttentionBackendKind
from app.config import ModelConfig, MoEConfig, Run
from app.config.model import LOSS_WEIGHTS
from app.data.sources import (
    TOKENIZER_KEY,
    Record,
    difference,
    differing_option,
    read_otherwise,
    same_documents,
    same_tokenizer,
)
from app.engine.files.checkpoints import CHECKPOINTS, MANIFEST, newest_checkpoint, parse_manifest
from app.engine.files.run_folder import RUNS, plain
from app.engine.start.in_effect import unread
from app.errors import ConfigError, FirstOf, nearest, typed
from app.hf.file_names import CONFIG_JSON
from app.rules import attention

FIXED = frozenset((
    # Types of parameters and main gradients; the optimizer, whose state a checkpoint holds.
    "precision.params", "precision.grads", "optim.name",
    # Documents, their split, tokenizer and attention mask.
    "data.source", "data.path", "data.name", "data.config_name", "data.split", "data.streaming",
    "data.text_field", "data.chat_template", "data.truncate", "data.tokenizer",
    "data.validation_fraction", "data.validation_documents", "data.document_mask",
    "data.max_documents", "data.packing", "data.validation",
    # Packing of tokens into sequences, and their order.
    "train.seq_len", "train.seed",
    # Parameters without optimizer state; adapters, which are all that has it.
    "train.frozen", "lora.rank", "lora.alpha", "lora.rslora", "lora.targets",
    "lora.base",
))  # fmt: skip
FREE = frozenset((
    # No effect on training.
    "model.name", "run_dir", "resume",
    # Used before the first step only.
    "model.init_std", "model.init_from", "lora.init_from",
    # Noise and bias updates of training, as the learning rate and LOSS_WEIGHTS; see `_misfit`.
    "model.moe.balance", "model.moe.jitter_eps", "model.moe.bias_update_rate", "loss.normalize",
    "lora.dropout",
    # Speed and memory: results differ at most in the order of summation.
    "model.moe.dispatcher", "model.moe.static.transport", "model.moe.static.capacity",
    "model.moe.static.factor", "model.moe.static.on_overflow", "model.moe.static.paged_buffer",
    "model.moe.echo.spares", "model.moe.echo.algorithm", "model.moe.echo.threshold",
    "model.moe.echo.check",
    "model.moe.shared_overlap", "model.moe.pad_to_capacity",
    "loss.chunk_tokens", "train.device", "train.deterministic",
    "train.attention_backend",
    # Plans only.
    "model.moe.planned_imbalance",
    # Loss scaling: keeps small gradients from underflow, and is divided out again.
    "precision.loss_scale", "precision.initial_loss_scale", "precision.min_loss_scale",
    "precision.loss_scale_window", "precision.loss_scale_hysteresis",
    # Preparation of the same documents, and its cache.
    "data.num_proc", "data.cache_dir", "data.accept_changed", "data.on_bad_file",
    # Sources may come and go, but keep their texts (`_other_source`).
    "data.sources",
    # Length and batches of training; the data cursor counts sequences, whatever the batch.
    "train.steps", "train.tokens", "train.epochs", "train.global_batch", "train.micro_batch",
    # Validation, sample, and reaction to non-finite steps.
    "train.eval_interval", "train.eval_sequences", "train.stop_after_worse",
    "train.sample_tokens", "train.on_bad_step",
    "train.max_bad_steps", "train.max_rollbacks", "train.profile",
    "train.replay_every", "train.on_corruption",
))  # fmt: skip
# Layout, speed, precision of the same computation; optimizer; and files written.
FREE_SECTIONS = ("parallel.", "hardware.", "schedule.", "recompute.", "cuda_graph.", "optim.",
                 "precision.fp8.", "checkpoint.", "log.", "sweep.")  # fmt: skip
# Paths of data. Fixed if the checkpoint has no record of the contents; otherwise contents count.
PLACES = ("data.path", "data.name", "data.tokenizer")
# Not reported as changes: start-up paths, and the world size, which follows from `parallel`.
SOURCES = "data.sources"
BIAS_RATE = "model.moe.bias_update_rate"
# Keys of a source that may differ: its share, and its place, whose contents count instead.
SHARES = ("weight", "after_end", "path", "name")
LENGTH = ("train.steps", "train.epochs")  # saved as steps, which the data decide with epochs
UNREPORTED = (
    "run_dir", "resume", "parallel.world_size", "parallel.replaced", "data.accept_changed",
)  # fmt: skip
READ_OTHERWISE = (
    "read exactly as written now; the program that saved the checkpoint rewrote texts of JSON that "
    "look like times and kept byte order marks, so that other tokens may follow"
)
Difference = tuple[str, Any, Any]  # dotted key, saved value, current value


def is_fixed(key: str) -> bool:
    """True if a resumed run must have the checkpoint's value of a key."""
    in_free_section = key not in FIXED and f"{key}.".startswith(FREE_SECTIONS)
    free = key in FREE or in_free_section or key.rpartition(".")[2] in LOSS_WEIGHTS
    # keys of the model decide shapes of weights and the forward computation, unless listed as free
    fixed = key in FIXED or (key.startswith("model.") and not free)
    assert fixed != free, f"{key} must be listed as either fixed or free for resumed runs"
    return fixed


def allowed_changes(
    checkpoint: Path, manifest: dict[str, Any], run: Run, record: Callable[[], Record]
) -> tuple[str, ...]:
    """Describe settings and data that differ from those of the checkpoint with this manifest.

    `record` returns the record of the present data. Raises ConfigError for a difference that
    forbids resuming.
    """
    data = _DataThen(manifest.get("data"), run, record)
    saved, current = manifest["config"], plain(asdict(run))
    differences = list(_differences(_with_replicas(saved), _with_replicas(current)))
    misfit = _misfit(differences, data)
    if misfit is not None:
        key, was, now = misfit
        rule = f"the checkpoint {checkpoint} was trained with {typed(was)}"
        advice = None
        if key == BIAS_RATE:
            rule += ", and 0 would drop the biases that its routers have learnt"
        elif key == "data.validation":
            rule += ", which leaves other documents for training"
        elif key in PLACES and data.change() is not None:
            rule += f", which held other data: {data.change()}"
            advice = "otherwise data.accept_changed=true"
        near = None if key == SOURCES else FirstOf([was])
        raise ConfigError(key, now, rule, nearest=near, advice=advice)
    data.check(checkpoint)
    idle = {*unread(saved)} & {*unread(current)}
    if run.train.attention_backend is AttentionBackendKind.auto:
        idle.add(attention.KEY)  # the checkpoint's is taken, if the host has it
    quiet = (*UNREPORTED, *idle, *(LENGTH if run.train.epochs else ()))
    told = (each for each in differences if not each[0].startswith(quiet))
    changes = tuple(
        f"{key}: {_other_shares(was, now) if key == SOURCES else f'{was} -> {now}'}"
        for key, was, now in told
    )
    return (*changes, *data.told())


def _with_replicas(config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration with parallel.dp filled in from the world size if it was null."""
    parallel = config.get("parallel")
    if not isinstance(parallel, dict) or parallel.get("dp") is not None:
        return config
    sizes = (parallel.get(name) for name in ("world_size", "tp", "cp", "pp"))
    processes, *degrees = (size if isinstance(size, int) else 1 for size in sizes)
    replicas = max(1, processes // prod(degrees))
    return config | {"parallel": parallel | {"dp": replicas}}


@dataclass(frozen=True, slots=True)
class _DataThen:
    """Data record of a checkpoint beside that of the present run."""

    saved: Record | None  # None if the checkpoint has no record
    run: Run
    now: Callable[[], Record]

    def change(self) -> str | None:
        """Describe how they differ; None if they are equal or cannot be compared."""
        return difference(self.saved, self.now()) if self.saved else None

    def told(self) -> tuple[str, ...]:
        """Return the lines that start-up prints about changed data."""
        if (change := self.change()) is not None:
            return (f"data: {change}",)
        if self.saved and read_otherwise(self.saved, self.now()):
            return (f"data: {READ_OTHERWISE}",)
        return ()

    def fits(self, key: str) -> bool:
        """True if a run may resume although `key`, one of PLACES, names another path."""
        if not self.saved:
            return False
        if self.run.data.accept_changed:
            return True
        same = same_tokenizer if key == TOKENIZER_KEY else same_documents
        return same(self.saved, self.now())

    def check(self, checkpoint: Path) -> None:
        """Raise ConfigError if the data changed and data.accept_changed does not allow it."""
        change = self.change()
        config = self.run.data
        if self.saved is None or change is None:
            return
        if config.accept_changed and config.streaming:
            rule = f"a position in a stream is invalid in changed data ({change})"
            raise ConfigError("data.accept_changed", True, rule, advice="restore the data")
        if not config.accept_changed:
            rule = f"the data have changed since {checkpoint} was saved: {change}"
            advice = "restore them, or continue with data.accept_changed=true"
            raise ConfigError(
                *differing_option(config, self.saved, self.now()), rule, advice=advice
            )


def _differences(saved: dict[str, Any], current: dict[str, Any]) -> Iterator[Difference]:
    """Yield keys that differ. A key newer than the checkpoint counts as saved with its default."""
    usual = plain(asdict(Run(ModelConfig(moe=MoEConfig()))))
    known = ("model",) if saved.keys() == {"model"} else current  # imported: has no other section
    for name in known:
        yield from _unlike(name, saved.get(name), current[name], usual.get(name))


def _unlike(key: str, saved: Any, current: Any, usual: Any) -> Iterator[Difference]:
    if not (isinstance(saved, dict) and isinstance(current, dict)):
        if saved != current:
            yield key, saved, current
        return
    known = usual if isinstance(usual, dict) else {}
    for name, value in current.items():
        was = saved[name] if name in saved else known.get(name)
        yield from _unlike(f"{key}.{name}", was, value, known.get(name))


def _misfit(differences: Iterable[Difference], data: _DataThen) -> Difference | None:
    """Return the first difference that forbids resuming, or None."""
    for key, was, now in differences:
        if key in PLACES and data.fits(key):
            continue
        if key == SOURCES and (changed := _other_source(was, now)) is not None:
            return changed
        if key == "data.validation" and was and now:
            continue  # the same documents are left for training
        # With a rate of 0 a router ignores its bias, and so would drop what it has learnt.
        drops_biases = key == BIAS_RATE and was and not now
        if is_fixed(key) or drops_biases:
            return key, was, now
    return None


def _other_source(was: Any, now: Any) -> Difference | None:
    """Return the first key of a source in both lists that decides which tokens it gives."""
    before = {entry["label"]: entry for entry in was}
    for entry in now:
        for key, value in before.get(entry["label"], entry).items():
            if key not in SHARES and value != entry.get(key):
                lead = f"{entry['label']}: {key}="
                return SOURCES, lead + typed(value), lead + typed(entry.get(key))
    return None


def _other_shares(was: Any, now: Any) -> str:
    """Describe how lists of sources differ."""
    before, after = ({entry["label"]: entry for entry in each} for each in (was, now))
    told = [f"{label} is new" for label in after if label not in before]
    told += [f"{label} is left out" for label in before if label not in after]
    for label, entry in after.items():
        for key in SHARES:
            then = before.get(label, entry)[key]
            if then != entry[key]:
                told.append(f"{label}: {key} {then} -> {entry[key]}")
    return "; ".join(told)


def checkpoint_to_resume(run: Run, record: Callable[[], Record]) -> tuple[Path | None, str | None]:
    """Return the checkpoint that `resume` asks for (None: start anew), and a line on those skipped.

    `record` returns the record of the present data. Without a run_dir, resume=auto looks through
    all runs and skips newer checkpoints that this configuration cannot resume. Writes nothing.
    Raises ConfigError for a path without a checkpoint.
    """
    if run.resume is None:
        return None, None
    if run.resume != "auto":
        return checkpoint_at(Path(run.resume), "resume"), None
    if run.run_dir:
        return newest_checkpoint(Path(run.run_dir)), None
    return _newest_that_fits(run, record)


def checkpoint_at(path: Path, key: str) -> Path:
    """Return the checkpoint at a path, or the newest of the run there.

    Raises ConfigError under this key.
    """
    try:
        exists = (path / MANIFEST).exists() or path.exists()
    except OSError as error:
        raise ConfigError(key, path, f"cannot be read: {error.strerror}") from error
    if path.name.startswith("step-") and path.is_dir():
        return path
    newest = newest_checkpoint(path.parent if path.name == CHECKPOINTS else path)
    if newest is None:
        known = sorted(str(folder) for folder in RUNS.glob("*") if newest_checkpoint(folder))
        beside = [str(each) for each in path.parent.glob("*") if holds_weights(each)]
        rule = "holds no complete checkpoint" if exists else "does not exist"
        if (path / CONFIG_JSON).is_file():
            rule = "is the folder of a Hugging Face model, not a run or checkpoint"
        elif path.is_file():
            rule = "is a file, and a checkpoint is a folder"
            known = [str(path.parent)] if (path.parent / MANIFEST).exists() else known
        guess = nearest(str(path), [*beside, *known])
        last = f"the last run with a checkpoint is {known[-1]}" if known and not guess else None
        raise ConfigError(key, path, rule, guess=guess, advice=last)
    return newest


def holds_weights(folder: Path) -> bool:
    """True if a folder is a checkpoint, or a run folder with one."""
    return (folder / MANIFEST).is_file() or newest_checkpoint(folder) is not None


@dataclass(frozen=True, slots=True)
class _Saved:
    """Newest checkpoint of a run with its recorded time, configuration and data."""

    checkpoint: Path
    time: float  # of saving, seconds since 1970
    config: dict[str, Any] | None  # None if unreadable
    data: Record | None = None  # None if not recorded


def _newest_that_fits(run: Run, record: Callable[[], Record]) -> tuple[Path | None, str | None]:
    """Return the most recent of all runs' newest checkpoints that this configuration can resume.

    Also returns a line on the most recent one skipped, and why. A checkpoint with an unreadable
    manifest is chosen: loading it reports what is wrong.
    """
    newest = [found for folder in RUNS.glob("*") if (found := newest_checkpoint(folder))]
    passed: list[tuple[Path, Difference]] = []
    current = plain(asdict(run))
    for saved in sorted(map(_recorded, newest), key=lambda saved: saved.time, reverse=True):
        data = _DataThen(saved.data, run, record)
        misfit = saved.config and _misfit(_differences(saved.config, current), data)
        if not misfit:
            return saved.checkpoint, _passed_over(passed)
        passed.append((saved.checkpoint, misfit))
    return None, _passed_over(passed)


def _recorded(checkpoint: Path) -> _Saved:
    try:
        manifest = parse_manifest(checkpoint)
    except ConfigError:
        return _Saved(checkpoint, checkpoint.stat().st_mtime, None)
    # Older manifests have no time of saving.
    time = manifest["time"] if "time" in manifest else checkpoint.stat().st_mtime
    return _Saved(checkpoint, time, manifest["config"], data=manifest.get("data"))


def _passed_over(passed: list[tuple[Path, Difference]]) -> str | None:
    if not passed:
        return None
    checkpoint, (key, *values) = passed[0]
    there, here = ("{…}" if isinstance(value, dict) else value for value in values)
    others = f"; and {len(passed) - 1} more" if len(passed) > 1 else ""
    return f"{checkpoint}: {key}={there} there, {here} here{others}"
