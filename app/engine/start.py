"""Everything that is settled before a run writes anything: device, data, and what it continues from."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from app.choices import Device
from app.config import Run
from app.data.feed import DataSplit
from app.data.load import load_data, prepare
from app.data.tokenizer import Tokenizer, load_tokenizer
from app.engine.checkpoint_folder import newest_checkpoint, read_manifest
from app.engine.groups import Groups
from app.engine.resume import allowed_changes, checkpoint_to_resume
from app.engine.run_folder import RUNS, FolderLock, check_place, choose_folder
from app.errors import ConfigError

T = TypeVar("T")


def usable_gpus(run: Run) -> int:
    """GPUs of this host that the run may use; 0: it computes on the CPU. Raises ConfigError for train.device=cuda without one."""
    found = torch.cuda.device_count() if run.train.device is not Device.cpu else 0
    if run.train.device is Device.cuda and not found:
        raise ConfigError("train.device", run.train.device, "this host has no usable GPU", "auto or cpu")
    return found


def choose_device(run: Run, local_rank: int) -> torch.device:
    """The device of the n-th process of this host. Raises ConfigError for more processes than GPUs."""
    gpus = usable_gpus(run)
    if gpus and local_rank >= gpus:
        raise ConfigError(
            "train.device", run.train.device, f"process {local_rank} of a host with {gpus} GPUs", f"{gpus} processes per host"
        )
    return torch.device("cuda", local_rank) if gpus else torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Start:
    """Where the run writes and what it continues from."""

    run_dir: Path | None  # None: a new folder
    checkpoint: Path | None = None
    manifest: dict[str, Any] | None = None  # of the checkpoint
    changes: tuple[str, ...] = ()  # settings that differ from the checkpoint's, as text
    passed_over: str | None = None  # newer checkpoint that does not fit, and why


def find_start(run: Run, earlier: Path | None = None) -> Start:
    """Folder and checkpoint of a run; writes nothing. `earlier` is the folder of an earlier attempt at this run: it goes on
    there, from that attempt's newest checkpoint, or without one from where that attempt started.

    Raises ConfigError for a folder that cannot be written, and for a checkpoint that is broken or
    does not fit.
    """
    if earlier is not None:
        resume = "auto" if newest_checkpoint(earlier) else run.resume
        run = replace(run, run_dir=str(earlier), resume=resume)
    check_place(Path(run.run_dir) if run.run_dir else RUNS)
    checkpoint, passed_over = checkpoint_to_resume(run)
    run_dir = choose_folder(run, checkpoint, ours=earlier is not None)
    if checkpoint is None:
        return Start(run_dir, passed_over=passed_over)
    manifest = read_manifest(checkpoint)
    changes = allowed_changes(checkpoint, manifest["config"], run)
    if manifest["step"] >= run.train.steps and earlier is None:  # an attempt may die between its last step and its end
        rule = f"the checkpoint {checkpoint} has already taken {manifest['step']}"
        raise ConfigError("train.steps", run.train.steps, rule, manifest["step"] + 100)
    return Start(run_dir, checkpoint, manifest, changes=changes, passed_over=passed_over)


def claim_start(run: Run, earlier: Path | None, lock: FolderLock) -> Start:
    """As `find_start`, and keeps other runs out of the folder before data and engine are loaded."""
    start = find_start(run, earlier)
    lock.claim(start.run_dir)
    return start


def rank_zero_says(groups: Groups, decide: Callable[[], T]) -> T:
    """What `decide()` returns on rank 0, on every rank; its ConfigError likewise."""
    said: list[Any] = [None]
    if groups.rank == 0:
        try:
            said = [decide()]
        except ConfigError as error:
            said = [error]
    if groups.host.size() > 1:
        dist.broadcast_object_list(said, src=0, group=groups.host)
    if isinstance(said[0], ConfigError):
        raise said[0]
    return said[0]


@dataclass(frozen=True, slots=True)
class Data:
    """Everything read from the corpus."""

    tokenizer: Tokenizer
    train: DataSplit
    validation: DataSplit


def check_tokenizer(run: Run) -> Tokenizer:
    """The tokenizer, which must fit the model's vocabulary. Raises ConfigError."""
    tokenizer = load_tokenizer(run.data.tokenizer)
    if tokenizer.vocab_size > run.model.vocab_size:
        rule = f"data.tokenizer={run.data.tokenizer} has {tokenizer.vocab_size} ids"
        raise ConfigError("model.vocab_size", run.model.vocab_size, rule, -(-tokenizer.vocab_size // 8) * 8)
    return tokenizer


def load_all_data(run: Run, groups: Groups, local_rank: int) -> Data:
    """Tokenizer and both splits; the first process of each host prepares the cache that the others then only map.

    Raises ConfigError, the same on every rank.
    """
    tokenizer = check_tokenizer(run)
    if local_rank == 0:
        with suppress(ConfigError):  # told below, by every rank
            prepare(run.data, tokenizer)
    groups.barrier()
    return Data(tokenizer, *load_data(run.data, run.train.seq_len, run.train.seed, tokenizer))


def preflight(run: Run, earlier: Path | None) -> None:
    """Find every mistake that one process can find, before it starts others. Raises ConfigError."""
    with FolderLock() as lock:
        claim_start(run, earlier, lock)
    load_data(run.data, run.train.seq_len, run.train.seed, check_tokenizer(run))
