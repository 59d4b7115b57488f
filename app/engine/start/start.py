"""Settle a run's start before it writes anything: device, folder, checkpoint, data."""

from __future__ import annotations

import filecmp
import math
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from app.choices import Device
from app.config import Run
from app.data.blend import BlendedSequences
from app.data.corpora import Corpora, Folders, HeldOut, all_left_out, load_all, prepare_all
from app.data.feed import DataSplit
from app.data.packing import PackedSequences
from app.data.sources import Record, difference, differing_option, identity
from app.data.tokenizer import BYTES, Tokenizer, load_tokenizer, vocabulary
from app.data.tokenizer_files import SENTENCEPIECE, TOKENIZER, bring_tokenizer, tokenizer_file
from app.engine.files.checkpoints import newest_checkpoint, read_manifest
from app.engine.files.names import IMPORTED, LEFT_OUT
from app.engine.files.run_folder import RUNS, FolderLock, check_place, choose_folder, has_ended
from app.engine.ranks.agreement import all_succeed, rank_zero_says
from app.engine.ranks.dtypes import DTYPES
from app.engine.ranks.groups import Groups
from app.engine.start.kept_tokenizer import changed_end, kept_end, recorded_end
from app.engine.start.resume import allowed_changes, checkpoint_to_resume
from app.errors import ConfigError, typed, warn
from app.hf.adapter import SavedAdapter
from app.hf.families import differences
from app.hf.hub import PRETRAINED, commit_of, config_folder, model_folder
from app.hf.pretrained import Pretrained
from app.plan.formatting import count_of
from app.rules.training import check_lr_schedule

INIT_FROM = "model.init_from"


def usable_gpus(run: Run) -> int:
    """Return the number of GPUs of this host that the run may use; 0 means CPU.

    Raises ConfigError for train.device=cuda without a GPU.
    """
    found = torch.cuda.device_count() if run.train.device is not Device.cpu else 0
    if run.train.device is Device.cuda and not found:
        raise ConfigError(
            "train.device", run.train.device, "this host has no usable GPU", nearest=("auto", "cpu")
        )
    return found


def choose_device(run: Run, local_rank: int) -> torch.device:
    """Return the device of a local rank. Raises ConfigError for more processes than GPUs."""
    gpus = usable_gpus(run)
    if gpus and local_rank >= gpus:
        rule = f"process {local_rank} of a host with {gpus} GPUs"
        advice = f"start {gpus} processes per host"
        raise ConfigError("train.device", run.train.device, rule, advice=advice)
    return torch.device("cuda", local_rank) if gpus else torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Start:
    """Folder of a run, and the checkpoint that it resumes."""

    run_dir: Path | None  # None for a new folder
    checkpoint: Path | None = None
    manifest: dict[str, Any] | None = None  # of the checkpoint
    changes: tuple[str, ...] = ()  # settings and data that differ from the checkpoint's, as text
    passed_over: str | None = None  # newer checkpoint that does not fit, with the reason
    by_torch: str | None = None  # why torch computes attention, where another library is faster


def reads_initial_weights(start: Start) -> bool:
    """True if a run needs weights of its initial model: a new one, and one whose checkpoint lacks
    the frozen ones.
    """
    return start.manifest is None or LEFT_OUT in start.manifest


def find_start(
    run: Run, earlier: Path | None = None, sources: Callable[[], Corpora] | None = None
) -> Start:
    """Find folder and checkpoint of a run; writes nothing.

    `earlier` is the folder of an earlier attempt at this run. The run then resumes there, from the
    newest checkpoint in it, or without one from where that attempt started. `sources` reads the
    list of data, which is needed if a checkpoint has a record of its data.

    Raises ConfigError for a folder that cannot be written, and for a checkpoint that is broken or
    does not fit.
    """
    if earlier is not None:
        resume = "auto" if newest_checkpoint(earlier) else run.resume
        run = replace(run, run_dir=str(earlier), resume=resume)
    check_place(Path(run.run_dir) if run.run_dir else RUNS)
    look = sources or look_once(run)
    record = cache(lambda: look().record())
    checkpoint, passed_over = checkpoint_to_resume(run, record)
    run_dir = choose_folder(run, checkpoint, ours=earlier is not None)
    if checkpoint is None:
        return Start(run_dir, passed_over=passed_over)
    manifest = read_manifest(checkpoint)
    changes = allowed_changes(checkpoint, manifest, run, record=record)
    if IMPORTED in manifest:
        if run.adapters is not None:
            rule = "holds a model without adapters, and lora.rank adds some"
            advice = f"start them with {INIT_FROM}={run.resume}, without resume"
            raise ConfigError("resume", run.resume, rule, advice=advice)
        folder = checkpoint.parent.parent
        check_own_tokenizer(run, folder / PRETRAINED, name=str(folder))
    elif (change := changed_end(manifest, run.data.tokenizer)) is not None:
        changes = (*changes, change)
    if earlier is None:  # a restart of a finished run may only have its end left to do
        _check_steps_left(run, checkpoint, manifest["step"], run_dir=run_dir)
    return Start(run_dir, checkpoint, manifest, changes=changes, passed_over=passed_over)


def _check_steps_left(run: Run, checkpoint: Path, taken: int, run_dir: Path | None) -> None:
    """Raise ConfigError if nothing is left to do after a checkpoint.

    A run that died between its last step and its end still has the end to do.
    """
    saved_in = checkpoint.parent.parent
    resumes = run_dir is not None and run_dir.resolve() == saved_in.resolve()
    if run.train.steps is None:  # what is left is known when the data are read
        return
    lacks_end = resumes and taken == run.steps and not has_ended(saved_in)
    if taken >= run.steps and not lacks_end:
        rule = f"the checkpoint {checkpoint} has already taken {taken}"
        raise ConfigError("train.steps", run.steps, rule, nearest=taken + 1)


def claim_start(
    run: Run,
    earlier: Path | None,
    lock: FolderLock,
    sources: Callable[[], Corpora] | None = None,
) -> Start:
    """Run `find_start`, and lock the folder before data and engine are loaded."""
    start = find_start(run, earlier, sources)
    lock.claim(start.run_dir)
    return start


@dataclass(frozen=True, slots=True)
class Data:
    """Tokenizer and data of a run."""

    tokenizer: Tokenizer
    train: DataSplit
    validation: tuple[HeldOut, ...]
    record: Record | None = None  # data record for checkpoints; None except on local rank 0


def check_own_tokenizer(run: Run, folder: Path, name: str) -> None:
    """Raise ConfigError if the run's tokenizer does not match that of its initial model.

    The model is `name`, its tokenizer is in `folder`. The run's tokenizer may have additional
    tokens, up to the size of the embedding.
    """
    own, typed_in = folder / TOKENIZER, run.data.tokenizer

    def refusal(rule: str) -> ConfigError:
        return ConfigError("data.tokenizer", typed_in, rule, nearest=str(own))

    if not own.is_file():
        if typed_in == BYTES and (folder / SENTENCEPIECE).is_file():
            rule = f"{name} has a tokenizer of its own, but no {TOKENIZER}, which is read here"
            advice = "AutoTokenizer of transformers saves one"
            raise ConfigError("data.tokenizer", typed_in, rule, advice=advice)
        return
    if typed_in == BYTES:
        raise refusal(f"{name} was trained with a tokenizer of its own")
    file = tokenizer_file(typed_in)
    if filecmp.cmp(file, own, shallow=False):
        return
    ids = vocabulary(file)
    for token, number in sorted(vocabulary(own).items(), key=lambda entry: entry[1]):
        if ids.get(token) != number:
            rule = f"{name} has been trained with {number} for {token!r}, which is {ids.get(token)}"
            raise refusal(rule)
    if max(ids.values()) >= run.model.vocab_size:
        raise refusal(f"has {max(ids.values()) + 1} ids, and {name} has {run.model.vocab_size}")


def check_tokenizer(
    run: Run, manifest: Mapping[str, Any] | None = None, *, asks: bool = True
) -> Tokenizer:
    """Load the tokenizer, and check it against the model's vocabulary.

    For a run with model.init_from, whose files are present, it must match the initial model's.
    `manifest` is that of the checkpoint resumed or used, whose end-of-document token is kept; None
    without a checkpoint. `asks`: whether this process asks the hub for it. Raises ConfigError.
    """
    if (name := run.model.init_from) is not None:
        check_own_tokenizer(run, config_folder(name, INIT_FROM, asks=False), name)
    spec = run.data.tokenizer
    bring_tokenizer(spec, asks)
    tokenizer = load_tokenizer(spec, kept_end(manifest, spec))
    if tokenizer.vocab_size > run.model.vocab_size:
        rule = f"data.tokenizer={spec} has {tokenizer.vocab_size} ids"
        raise ConfigError(
            "model.vocab_size",
            run.model.vocab_size,
            rule,
            nearest=-(-tokenizer.vocab_size // 8) * 8,
        )
    return tokenizer


def look_once(run: Run) -> Callable[[], Corpora]:
    """Return a function that finds the data sources at its first call, and caches them."""
    return cache(lambda: Corpora.find(run.data))


def load_all_data(
    run: Run,
    groups: Groups,
    local_rank: int,
    sources: Callable[[], Corpora] | None = None,
    *,
    manifest: Mapping[str, Any] | None = None,
) -> Data:
    """Load the tokenizer and both splits; the first process of each host prepares the cache.

    All processes of the host map that cache. `manifest` is that of the checkpoint that the run
    resumes, if any. Raises ConfigError, the same on every rank.
    """
    leads = local_rank == 0
    look = sources or look_once(run)
    tokenizer = all_succeed(groups, lambda: check_tokenizer(run, manifest, asks=leads))
    own = all_succeed(
        groups, lambda: prepare_all(run.data, tokenizer, look(), say=warn) if leads else None
    )
    record = {**look().record(), **recorded_end(tokenizer)} if leads else None
    for line in all_left_out(own, look()) if groups.rank == 0 and own is not None else ():
        warn(line)
    folders = _agreed(run, groups, record, folders=own)
    train, validation = all_succeed(groups, lambda: _loaded(run, tokenizer, folders))
    return Data(tokenizer, train, validation, record=record)


def with_steps(run: Run, data: DataSplit, start: Start) -> Run:
    """Return the run with the steps that train.epochs makes of its data. Raises ConfigError."""
    epochs = run.train.epochs
    if epochs is None:
        return run
    assert isinstance(data.sequences, PackedSequences), "streams and blends have no epochs"
    steps = max(1, math.ceil(epochs * data.sequences.per_epoch / run.train.global_batch))
    taken = start.manifest["step"] if start.manifest else 0
    if taken > steps:
        made = f"makes {count_of(steps, 'step')}"
        rule = f"{made}, and the checkpoint {start.checkpoint} has taken {taken}"
        raise ConfigError("train.epochs", epochs, rule, advice="give more")
    run = replace(run, train=replace(run.train, steps=steps, epochs=None))
    check_lr_schedule(run)
    return run


def _loaded(
    run: Run, tokenizer: Tokenizer, folders: Folders
) -> tuple[DataSplit, tuple[HeldOut, ...]]:
    """Return all data of a run. Raises ConfigError for sources that are used up before its end."""
    train, validation = load_all(
        run.data, run.train.seq_len, run.train.seed, tokenizer=tokenizer, folders=folders
    )
    sequences = train.sequences
    limit = sequences.limit if isinstance(sequences, BlendedSequences) else None
    if limit is not None and (needed := run.steps * run.train.global_batch) > limit:
        rule = f"read {needed} sequences, and the sources, which all stop, have {limit}"
        near = limit // run.train.global_batch
        raise ConfigError("train.steps", run.steps, rule, nearest=near or None)
    return train, validation


def _agreed(run: Run, groups: Groups, record: Record | None, *, folders: Folders | None) -> Folders:
    """Return this host's prepared corpora. Raises ConfigError if hosts have different data."""
    # Compare checksums first, and lists of files only if these differ: a list may have thousands
    # of names per host.
    mine = (socket.gethostname(), identity(record) if record else None, folders)
    found: list[tuple[str, Any, Folders | None]] = [("", None, None)] * groups.host.size()
    dist.all_gather_object(found, mine, group=groups.host)
    if any(other not in (None, found[0][1]) for _, other, _ in found):
        first = rank_zero_says(groups, lambda: record)
        all_succeed(groups, lambda: _check_same(run, groups.rank, first, record=record))
    return next(each for host, _, each in found if each is not None and host == mine[0])


def _check_same(run: Run, rank: int, first: Record | None, *, record: Record | None) -> None:
    """Raise ConfigError if the data of `record` differ from those of rank 0."""
    if first and record and (what := difference(first, record)):
        rule = f"rank {rank} on {socket.gethostname()} finds other data than rank 0: {what}"
        raise ConfigError(*differing_option(run.data, first, record), rule)


def open_pretrained(run: Run, groups: Groups, local_rank: int) -> Pretrained:
    """Open the initial model of a new run.

    Rank 0 downloads it from the hub, then the first process of each other host the same commit;
    all ranks then read the files on their host. Raises ConfigError, the same on every rank.
    """
    name = str(run.model.init_from)
    commit = rank_zero_says(groups, lambda: commit_of(model_folder(name, INIT_FROM)))
    if commit is not None:
        asks = local_rank == 0 and groups.rank > 0
        all_succeed(groups, lambda: model_folder(name, INIT_FROM, commit) if asks else None)
    found = all_succeed(groups, lambda: find_pretrained(run, commit, asks=False))
    dtype = run.precision.params
    if groups.rank == 0 and (left_out := found.left_out()):
        warn(f"{INIT_FROM}={name}: {left_out}")
    if groups.rank == 0 and (finer := found.finer(DTYPES[dtype])):
        rounded = f"computed with in precision.params={dtype.value}; the optimizer keeps their bits"
        warn(f"{INIT_FROM}={name}: {finer}, and {rounded}")
    return found


def find_pretrained(run: Run, commit: str | None = None, asks: bool = True) -> Pretrained:
    """Open the initial model of a run, all of whose files are present.

    `commit` and `asks` are those of `model_folder`. Raises ConfigError.
    """
    name = str(run.model.init_from)
    folder = model_folder(name, INIT_FROM, commit, asks=asks)
    found = Pretrained(folder, INIT_FROM, run.model)
    for field, ours, theirs in differences(run.model, found.model):
        rule = f"has model.{field}={typed(theirs)} now, and had {typed(ours)} when the run began"
        raise ConfigError(INIT_FROM, name, rule, advice="start it again")
    return found


def preflight(run: Run, earlier: Path | None) -> None:
    """Find every mistake that one process can find before it starts others. Raises ConfigError."""
    sources = look_once(run)
    with FolderLock() as lock:
        start = claim_start(run, earlier, lock, sources=sources)
    if run.model.init_from is not None and reads_initial_weights(start):
        find_pretrained(run)
    if run.lora.init_from is not None and start.manifest is None:
        SavedAdapter(run.model, run.lora)
    check_data(run, sources, start.manifest)


def check_data(
    run: Run,
    sources: Callable[[], Corpora] | None = None,
    manifest: Mapping[str, Any] | None = None,
) -> None:
    """Read all data that the run needs, and prepare them if they are not yet.

    `manifest` is that of `load_all_data`. Raises ConfigError.
    """
    look = sources or look_once(run)
    tokenizer = check_tokenizer(run, manifest)
    _loaded(run, tokenizer, prepare_all(run.data, tokenizer, look(), say=warn))
