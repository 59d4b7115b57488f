"""Checkpoints: every rank writes what it owns, rank 0 commits.

    checkpoints/step-00000100/manifest.json    step, updates, layout, configuration, size and sha256 of every other file
    checkpoints/step-00000100/rank-00000.pt    this rank's parts of parameters and moments, by global name and range
    checkpoints/latest                         name of the newest complete one

A checkpoint is written under a hidden temporary name and renamed when all files are on disk; `latest` moves after that.
Parts carry global names and ranges, so a run with other data- or expert-parallel degrees finds its parts too.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from torch import Tensor

from app.config import Run
from app.engine.build import Engine
from app.engine.run_folder import LATEST, STEP_PREFIX, complete_checkpoints, hidden, plain
from app.errors import ConfigError
from app.optim.adam import Piece

FORMAT = 1  # of the files below; another one is refused
MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run has come."""

    step: int = 0  # steps taken
    updates: int = 0  # of them, those that were not skipped
    tokens: int = 0  # tokens trained on


def save_checkpoint(folder: Path, engine: Engine, run: Run, progress: Progress, cursor: dict[str, Any]) -> Path:
    """Write and commit a checkpoint; all ranks call it together. Returns its folder."""
    groups = engine.groups
    final = folder / f"{STEP_PREFIX}{progress.step:08d}"
    draft = folder / f".{final.name}.tmp"
    if groups.rank == 0:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
    groups.barrier()
    name = _rank_file(groups.rank)
    _write_synced(draft / name, lambda file: torch.save(_rank_state(engine, cursor), file))
    files = _gather(engine, (name, _fingerprint(draft / name)))
    if groups.rank == 0:
        layout = {"world_size": groups.layout.world_size, "dp": groups.layout.dp, "ep": groups.layout.ep, "pp": groups.layout.pp}
        manifest = {
            "format": FORMAT,
            **dataclasses.asdict(progress),
            "layout": layout,
            "config": plain(dataclasses.asdict(run)),
            "files": files,
        }
        manifest["sha256"] = _manifest_digest(manifest)
        _write_synced(draft / MANIFEST, lambda file: file.write(json.dumps(manifest, indent=1).encode()))
        _commit(draft, final, run.checkpoint.keep_last)
    groups.barrier()
    return final


def _commit(draft: Path, final: Path, keep_last: int) -> None:
    _sync_folder(draft)
    if final.exists():  # a resumed run may come to the same step again
        _hide(final)
    draft.rename(final)
    _sync_folder(final.parent)
    pointer = final.parent / f".{LATEST}.tmp"
    _write_synced(pointer, lambda file: file.write(final.name.encode()))
    pointer.rename(final.parent / LATEST)
    _sync_folder(final.parent)
    for old in complete_checkpoints(final.parent)[:-keep_last]:
        if old != final:
            _hide(old)
    for left in final.parent.glob(f".{STEP_PREFIX}*"):  # replaced, old, or of a process that died
        shutil.rmtree(left)


def _hide(path: Path) -> None:
    """Take a checkpoint away in one operation, so that one that is half removed is never taken for a complete one."""
    shutil.rmtree(hidden(path), ignore_errors=True)
    path.rename(hidden(path))


def _rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.pt"


def _rank_state(engine: Engine, cursor: dict[str, Any]) -> dict[str, Any]:
    device = engine.device
    return {
        "pieces": [
            {"name": p.spec.name, "start": p.spec.offset + p.start, **{k: _packed(v) for k, v in p.state.items()}}
            for p in engine.optimizer.pieces()
            if p.spec.counted
        ],
        "routers": {name: _packed(router.bias_E) for name, _, router in engine.routers()},
        "cursor": cursor,
        "rng": {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None},
    }


def _packed(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().clone()  # a view would be saved with all of its buffer


def _gather(engine: Engine, entry: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    groups = engine.groups
    found: list[Any] = [None] * groups.host.size()
    dist.all_gather_object(found, entry, group=groups.host)
    return dict(found)


def _write_synced(path: Path, write: Callable[[BinaryIO], object]) -> None:
    with path.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def _fingerprint(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def verify_checkpoint(path: Path) -> dict[str, Any]:
    """Read the manifest of a checkpoint and check every file against it.

    Raises ConfigError that names the file that is missing, truncated or edited, and the checkpoint before it.
    """
    manifest = _read_manifest(path)
    for name, expected in manifest["files"].items():
        file = path / name
        if not file.is_file():
            raise _broken(path, f"{name} is missing")
        found = _fingerprint(file)
        if found["bytes"] != expected["bytes"]:
            raise _broken(path, f"{name} has {found['bytes']} bytes instead of {expected['bytes']}")
        if found != expected:
            raise _broken(path, f"{name} was changed after it was saved (sha256 differs)")
    return manifest


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((path / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise _broken(path, f"{MANIFEST} cannot be read: {error}") from error
    found = manifest.get("format") if isinstance(manifest, dict) else None
    if found != FORMAT:
        raise _broken(path, f"{MANIFEST} has format {found}, this version reads format {FORMAT}")
    if manifest.get("sha256") != _manifest_digest(manifest):
        raise _broken(path, f"{MANIFEST} was changed after it was saved (sha256 differs)")
    return manifest


def _manifest_digest(manifest: dict[str, Any]) -> str:
    rest = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _broken(path: Path, what: str) -> ConfigError:
    earlier = [other for other in complete_checkpoints(path.parent) if other.name < path.name]
    return ConfigError("resume", path, what, f"resume={earlier[-1]}" if earlier else None)


def load_checkpoint(path: Path, manifest: dict[str, Any], engine: Engine) -> tuple[Progress, dict[str, Any]]:
    """Fill this rank's parameters, moments and router biases; returns the progress and this rank's data cursor.

    `manifest` is what `verify_checkpoint` returned. Every file is searched for the parts that this rank owns.
    """
    pieces = list(engine.optimizer.pieces())
    missing = sum(piece.main.numel() for piece in pieces)
    biases: dict[str, Tensor] = {}
    for name in manifest["files"]:
        state = torch.load(path / name, map_location="cpu", mmap=True, weights_only=True)
        missing -= sum(_copy_overlap(saved, piece) for saved, piece in _same_name(state["pieces"], pieces))
        biases |= state["routers"]
    assert missing == 0, f"{missing} elements of this rank are in no file of {path}"
    own = _rank_file(engine.groups.rank if engine.groups.rank < len(manifest["files"]) else 0)
    state = torch.load(path / own, map_location="cpu", weights_only=True)
    for router_name, _, router in engine.routers():
        router.bias_E.copy_(biases[router_name])
    _restore_random(state, engine)
    engine.optimizer.restored(manifest["updates"])
    return Progress(manifest["step"], manifest["updates"], manifest["tokens"]), state["cursor"]


def _same_name(saved: list[dict[str, Any]], pieces: list[Piece]) -> Iterator[tuple[dict[str, Any], Piece]]:
    by_name: dict[str, list[Piece]] = {}
    for piece in pieces:
        by_name.setdefault(piece.spec.name, []).append(piece)
    for entry in saved:
        for piece in by_name.get(entry["name"], ()):
            yield entry, piece


def _copy_overlap(saved: dict[str, Any], piece: Piece) -> int:
    """Copy the elements that both ranges of one global parameter have in common; returns how many."""
    begin = piece.spec.offset + piece.start
    start, end = max(begin, saved["start"]), min(begin + piece.main.numel(), saved["start"] + saved["main"].numel())
    if start >= end:
        return 0
    for key, tensor in piece.state.items():
        tensor[start - begin : end - begin].copy_(saved[key][start - saved["start"] : end - saved["start"]])
    return end - start


def _restore_random(state: dict[str, Any], engine: Engine) -> None:
    torch.set_rng_state(state["rng"]["cpu"])
    if state["rng"]["cuda"] is not None and engine.device.type == "cuda":
        torch.cuda.set_rng_state(state["rng"]["cuda"], engine.device)
