"""Save checkpoints: every rank writes its own parts, rank 0 commits; optionally asynchronously.

A checkpoint is written under a hidden temporary name and renamed when all files are on disk;
`latest` is updated after that. An asynchronous save copies the state to host memory, training
continues, and a thread of each rank writes the copy. The threads use a process group of their own,
so that they and training never wait for each other's collectives. Hashing, writing and waiting
release Python's GIL.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from app.config import CheckpointConfig, Run
from app.engine.checkpoint.load import Progress
from app.engine.checkpoint.synced import sync_folder, write_synced
from app.engine.checkpoint.tensor_file import write_tensors
from app.engine.files import names
from app.engine.files.checkpoints import (
    LATEST,
    MANIFEST,
    checkpoint_name,
    complete_checkpoints,
    hidden,
    is_own_folder,
    manifest_digest,
    newest_checkpoint,
    step_of,
    strays,
    temporary_folder,
    unfinished,
)
from app.engine.files.manifest import FORMAT
from app.engine.files.names import rank_file
from app.engine.files.run_folder import plain
from app.engine.step.engine import Engine
from app.engine.watchdog.activity import ThreadActivity
from app.errors import ConfigError, no_room
from app.fp8.linear import Fp8Layers
from app.optim.frozen import digests, together


@dataclass(frozen=True, slots=True)
class RankState:
    """Snapshot of the state that one rank saves."""

    rank: int  # global rank
    tensors: dict[str, Tensor]  # of its file
    metadata: dict[str, str]  # of its file
    # (parameter, [global shape, block's start, block's stop, part of the flattened block])
    parts: list[tuple[str, Any]]
    routers: list[str]  # names of routers whose bias is in the file
    scales: list[str]  # names of weights whose FP8 scales are in the file
    left_out: dict[str, int]  # digests of this rank's parts of frozen weights that are not saved
    dp_rank: int
    manifest: dict[str, Any]  # entries that are equal on all ranks
    keep: CheckpointConfig


def current_state(
    engine: Engine,
    run: Run,
    progress: Progress,
    cursor: dict[str, Any],
    origin: Mapping[str, Any] | None = None,
    *,
    whole: bool = False,
    left_out: dict[str, int] | None = None,
) -> RankState:
    """Collect this rank's state; its tensors are training's own, not copies.

    whole: all that this rank needs, also what another one saves. `left_out`: known digests of the
    frozen weights, none of which is then in the state.
    """
    groups = engine.groups
    parts = []
    tensors: dict[str, Tensor] = {names.RANDOM_CPU: torch.get_rng_state()}
    if engine.device.type == "cuda":
        tensors[names.RANDOM_CUDA] = torch.cuda.get_rng_state(engine.device)
    for owned in engine.optimizer.param_shards():
        if not (whole or owned.spec.counted):
            continue
        block = owned.spec.block
        part = (owned.start, owned.start + owned.main.numel())
        parts.append((owned.spec.name, [block.shape, block.start, block.stop, part]))
        tensors |= {
            names.part_name(owned.spec.name, key): value for key, value in owned.state.items()
        }
    frozen = run.checkpoint.frozen and left_out is None
    if left_out is None:
        left_out = {} if frozen else digests(engine.frozen)
    for weight in engine.frozen if frozen else ():
        first, last = weight.own
        if weight.spec.counted and first < last:
            block = weight.spec.block
            parts.append((weight.spec.name, [block.shape, block.start, block.stop, weight.own]))
            name = names.part_name(weight.spec.name, names.MAIN)
            tensors[name] = weight.main[first:last]
    routers = {name: router.bias_E for name, router in engine.named_routers()}
    tensors |= {names.bias_name(name): bias_E for name, bias_E in routers.items()}
    fp8 = engine.state(Fp8Layers)
    scales = {} if fp8 is None or fp8.scales is None else dict(fp8.scales.state())
    tensors |= {names.scales_name(name): value for name, value in scales.items()}
    manifest = {
        "format": FORMAT,
        **dataclasses.asdict(progress),
        "time": time.time(),  # seconds since 1970, UTC
        "layout": {
            "world_size": groups.layout.world_size,
            **groups.layout.sizes(),
            **groups.layout.sizes(expert=True),
        },
        "loss_scale": None if engine.loss_scale is None else engine.loss_scale.state(),
        "config": plain(dataclasses.asdict(run)),
        **(origin or {}),
    }
    metadata = {names.CURSOR: json.dumps(cursor)}
    return RankState(
        groups.rank,
        tensors,
        metadata,
        parts=parts,
        routers=list(routers),
        scales=list(scales),
        left_out=left_out,
        dp_rank=groups.dp_rank,
        manifest=manifest,
        keep=run.checkpoint,
    )


def write_checkpoint(
    folder: Path,
    state: RankState,
    group: dist.ProcessGroup,
    *,
    activity: ThreadActivity,
    tell: Callable[[str], None],
) -> Path:
    """Write and commit the snapshots of all ranks of `group`; returns the checkpoint's folder.

    `activity` tells the watchdog what this thread does: local work may take any time, a collective
    may not. `tell` is called on rank 0 with entries of `folder` that are not ours, or cannot be
    removed. Raises ConfigError, the same on every rank.
    """
    final = folder / checkpoint_name(state.manifest["step"])
    temporary = temporary_folder(final)
    # 1. Rank 0 makes the temporary folder; the others wait until it exists.
    _lead(group, final, lambda: _begin(temporary), activity=activity)
    # 2. Every rank writes its file, and keeps an error for the gather.
    written = None
    failure = None
    activity.rest(f"writing {final.name}")
    try:
        written = _write_rank(temporary, state)
    except Exception as error:  # gathered below: the other ranks wait for this one
        failure = Failure(f"rank {state.rank}: {error}", no_room(error))
    # 3. Rank 0 collects sizes and checksums, writes the manifest, renames the folder.
    found: list[Any] = [None] * group.size()
    activity.note(f"saving {final.name}")
    dist.gather_object((written, failure), found if state.rank == 0 else None, dst=0, group=group)
    _lead(
        group,
        final,
        lambda: _finish(temporary, final, state, found=found, tell=tell),
        activity=activity,
    )
    activity.rest()
    return final


@dataclass(frozen=True, slots=True)
class Failure:
    """Reason why a checkpoint could not be saved."""

    text: str
    no_room: bool  # True if the disk is full or a quota reached


class SaveError(Exception):
    """Failure of another rank, as an exception."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.text)
        self.failure = failure


def _lead(
    group: dist.ProcessGroup, final: Path, work: Callable[[], None], activity: ThreadActivity
) -> None:
    """Run `work` on rank 0 while the others wait; its failure is raised on all ranks."""
    said: list[Failure | None] = [None]
    activity.rest(f"saving {final.name}")
    if group.rank() == 0:
        try:
            work()
        except SaveError as error:
            said = [error.failure]
        except Exception as error:
            said = [Failure(str(error), no_room(error))]
        if said[0] is not None:
            shutil.rmtree(temporary_folder(final), ignore_errors=True)
    activity.note(f"saving {final.name}")
    if group.size() > 1:
        dist.broadcast_object_list(said, src=0, group=group)
    if said[0] is not None:
        run_dir = final.parent.parent
        newest = newest_checkpoint(run_dir)
        kept = f"; {newest.name} is the newest that was saved" if newest else ""
        rule = f"{final.name} could not be saved, {said[0].text}{kept}"
        advice = "make room there, then resume=auto" if said[0].no_room else None
        raise ConfigError("run_dir", run_dir, rule, advice=advice)


def _begin(temporary: Path) -> None:
    """Create an empty temporary folder in place of whatever has its name."""
    temporary.parent.mkdir(parents=True, exist_ok=True)
    _clear(temporary)
    temporary.mkdir()


def _clear(path: Path) -> None:
    """Free a name: remove a dead process's folder there, rename anything that is not ours."""
    if is_own_folder(path):
        shutil.rmtree(path)
    else:
        _set_aside(path)


def _set_aside(path: Path) -> None:
    """Rename a foreign entry at a name that a save needs: a link itself, not its target."""
    if not os.path.lexists(path):
        return
    free = (path.with_name(f"{path.name}.stray{n}") for n in ("", *range(2, 1000)))
    path.rename(next(name for name in free if not os.path.lexists(name)))


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """Manifest entries of one rank's file, sent to rank 0."""

    entry: dict[str, Any]  # under `files` of the manifest
    parts: list[tuple[str, Any]]
    routers: list[str]
    scales: list[str]
    left_out: dict[str, int]


def _write_rank(temporary: Path, state: RankState) -> WrittenFile:
    size_and_sum = write_synced(
        temporary / rank_file(state.rank),
        lambda file: write_tensors(file, state.tensors, state.metadata),
    )
    return WrittenFile(
        {**size_and_sum, "dp_rank": state.dp_rank},
        state.parts,
        state.routers,
        scales=state.scales,
        left_out=state.left_out,
    )


def _finish(
    temporary: Path,
    final: Path,
    state: RankState,
    found: list[tuple[WrittenFile, Failure | None]],
    *,
    tell: Callable[[str], None],
) -> None:
    # one rank's failure discards the whole checkpoint
    for _, failure in found:
        if failure is not None:
            raise SaveError(failure)
    manifest = {**state.manifest, **_contents([written for written, _ in found])}
    manifest["sha256"] = manifest_digest(manifest)
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in manifest.items())
    write_synced(temporary / MANIFEST, lambda file: file.write(f"{{\n{lines}\n}}\n".encode()))
    _commit(temporary, final)
    point_to(final, tell)
    _tidy(final, state.keep, tell)


def _contents(written: list[WrittenFile]) -> dict[str, Any]:
    """Return manifest entries: files by name, parts by parameter, ranks of routers and scales."""
    parts: dict[str, Any] = {}
    left_out = together(each.left_out for each in written)
    routers: dict[str, int] = {}
    scales: dict[str, int] = {}
    for rank, each in enumerate(written):
        for name, (shape, start, stop, part) in each.parts:
            entry = parts.setdefault(name, {"shape": shape, "held": []})
            entry["held"].append((rank, start, stop, part))
        for name in each.routers:
            routers.setdefault(name, rank)  # all ranks with this layer have the same bias
        for name in each.scales:
            scales.setdefault(name, rank)  # and the same scales
    return {
        "files": {rank_file(rank): each.entry for rank, each in enumerate(written)},
        "parts": parts,
        "routers": routers,
        **({names.SCALES: scales} if scales else {}),
        **({names.LEFT_OUT: left_out} if left_out else {}),
    }


def _commit(temporary: Path, final: Path) -> None:
    """Rename a complete checkpoint to its name.

    Its folder is synced before, so that a power cut leaves either the old or the new state.
    """
    sync_folder(temporary)
    if is_own_folder(final):  # a resumed run may come to the same step again
        _hide(final)
    else:
        _set_aside(final)
    temporary.rename(final)


def point_to(final: Path, tell: Callable[[str], None]) -> None:
    """Point `latest` to a committed checkpoint.

    From here on the checkpoint counts, whatever fails: `newest_checkpoint` prefers a newer whole
    one to what `latest` names.
    """
    pointer = final.with_name(f".{LATEST}.tmp")
    latest = final.with_name(LATEST)
    try:
        sync_folder(final.parent)
        for path in (pointer, latest):
            if path.is_symlink() or not path.is_file():
                _set_aside(path)
        write_synced(pointer, lambda file: file.write(final.name.encode()))
        pointer.rename(latest)
        sync_folder(final.parent)
    except OSError as error:
        with suppress(OSError):
            pointer.unlink()
        why = error.strerror or error
        tell(f"{latest} cannot be updated: {why}; {final.name} is whole, and resume takes it")


def _tidy(final: Path, keep: CheckpointConfig, tell: Callable[[str], None]) -> None:
    """Remove outdated and unfinished checkpoints; a failure to remove does not fail the save."""
    folder = final.parent
    for old in outdated(complete_checkpoints(folder), keep):
        if old != final:
            with _telling(old, tell):
                _hide(old)
    for left in unfinished(folder):  # replaced, outdated, or left by a dead process
        with _telling(left, tell):
            shutil.rmtree(left)
    if others := strays(folder):
        listed = ", ".join(path.name for path in others)
        tell(f"{folder}: not written by a run, and left as it is: {listed}")


@contextmanager
def _telling(path: Path, tell: Callable[[str], None]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        tell(f"{path} cannot be removed: {error}")


def outdated(checkpoints: list[Path], keep: CheckpointConfig) -> Iterable[Path]:
    """Yield the checkpoints, given oldest first, that are no longer kept."""
    for path in checkpoints[: -keep.keep_last]:
        if keep.keep_every is None or step_of(path) % keep.keep_every:
            yield path


def _hide(path: Path) -> None:
    """Hide a checkpoint by one rename, so that a half-removed one never looks complete."""
    _clear(hidden(path))
    path.rename(hidden(path))
