"""Layout of a run's `checkpoints` folder: which entries are checkpoints, complete, newest.

    latest                                 name of the newest complete checkpoint
    step-00000100/manifest.json            progress, layout, configuration, parts by rank,
                                           checksums
    step-00000100/rank-00000.safetensors   one rank's parts of parameters and moments, its RNG
                                           state and data cursor
    .step-00000200.tmp/                    a checkpoint being written
    .step-00000050.old/                    a checkpoint about to be removed or replaced

Other entries are not ours: they do not count as checkpoints and are never removed.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from app.config.renamed import with_new_names
from app.engine.files.checked import FieldError, parse_strictly
from app.engine.files.manifest import FORMAT, check_config, check_manifest
from app.engine.files.names import IMPORTED
from app.engine.files.rank_header import check_header, held_parts, read_header
from app.errors import ConfigError, typed
from app.own_files import read_regular

CHECKPOINTS = "checkpoints"
LATEST = "latest"
MANIFEST = "manifest.json"
_CHECKPOINT = re.compile(r"step-([0-9]{8,18})")
_UNFINISHED = re.compile(r"\.step-[0-9]{8,18}\.(tmp|old)")
_LIKE_OURS = re.compile(r"\.?(step-|latest)")


def checkpoint_name(step: int) -> str:
    """Return the name of the checkpoint of a step."""
    return f"step-{step:08d}"


def step_of(checkpoint: Path) -> int:
    """Return the step in a checkpoint's name."""
    found = _CHECKPOINT.search(checkpoint.name)
    assert found is not None, f"{checkpoint} is not named like a checkpoint"
    return int(found[1])


def temporary_folder(checkpoint: Path) -> Path:
    """Return the temporary folder in which a checkpoint is written."""
    return checkpoint.with_name(f".{checkpoint.name}.tmp")


def hidden(checkpoint: Path) -> Path:
    """Return the hidden name of a checkpoint that is about to be removed or replaced."""
    return checkpoint.with_name(f".{checkpoint.name}.old")


def complete_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints of a folder, oldest first; links do not count."""
    return [path for path in _called_so(folder) if not path.is_symlink()]


def _called_so(folder: Path) -> list[Path]:
    named = (path for path in folder.glob("step-*") if _CHECKPOINT.fullmatch(path.name))
    return sorted((path for path in named if path.is_dir()), key=step_of)


def unfinished(folder: Path) -> list[Path]:
    """Return checkpoints that dead processes left half written or half removed."""
    named = (path for path in folder.glob(".step-*") if _UNFINISHED.fullmatch(path.name))
    return sorted(filter(is_own_folder, named), key=step_of)


def strays(folder: Path) -> list[Path]:
    """Return entries named like those of a save that no save has made."""
    ours = {*complete_checkpoints(folder), *unfinished(folder), folder / LATEST}
    like_ours = (path for path in folder.glob("*") if _LIKE_OURS.match(path.name))
    return sorted(path for path in like_ours if path not in ours)


def is_own_folder(path: Path) -> bool:
    """True for a folder that is not a link."""
    return path.is_dir() and not path.is_symlink()


def newest_checkpoint(run_dir: Path) -> Path | None:
    """Return the checkpoint that `latest` names, or a newer whole one: a process that died, or
    could not write `latest`, leaves it. None without any.

    Without a usable `latest` return the newest whole one; if none is whole, the newest broken one:
    loading it reports what is wrong.
    """
    folder = run_dir / CHECKPOINTS
    try:
        named = named_by_latest(folder)
        return newer_whole(named) or named
    except LookupError:
        replaced = [path for path in unfinished(folder) if path.suffix == ".old"]
    found = [*reversed(_called_so(folder)), *reversed(replaced)]
    return next(filter(is_whole, found), found[0] if found else None)


def named_by_latest(folder: Path) -> Path:
    """Return the checkpoint that `latest` names. Raises LookupError with the fault of `latest`."""
    pointer = folder / LATEST
    if not pointer.is_file():
        raise LookupError("is not a file" if pointer.exists() else "is missing")
    try:
        name = pointer.read_bytes().decode().strip()
    except UnicodeDecodeError:
        raise LookupError("is not text") from None
    except OSError as error:
        raise LookupError(f"cannot be read ({error.strerror})") from None
    if not name:
        raise LookupError("is empty")
    if not _CHECKPOINT.fullmatch(name):
        raise LookupError(f"names {name[:40]!r}, which is not the name of a checkpoint")
    named = folder / name
    # A process that died while replacing the checkpoint leaves it under its hidden name.
    for path in (named, hidden(named)):
        if path.is_dir():
            return path
    raise LookupError(f"names {name}, which is not there")


def newer_whole(checkpoint: Path) -> Path | None:
    """Return the newest whole checkpoint beside one and of a later step; None without any."""
    later = [
        path
        for path in complete_checkpoints(checkpoint.parent)
        if step_of(path) > step_of(checkpoint)
    ]
    return next(filter(_is_whole_of_its_step, reversed(later)), None)


def _is_whole_of_its_step(checkpoint: Path) -> bool:
    """False for copies under another name too, which are not the run's latest."""
    try:
        return bool(read_manifest(checkpoint)["step"] == step_of(checkpoint))
    except ConfigError:
        return False


def fault_of_latest(checkpoint: Path) -> str | None:
    """Say what is wrong with `latest` in a checkpoint's folder; None if it is fine."""
    try:
        named = named_by_latest(checkpoint.parent)
    except LookupError as fault:
        return f"{checkpoint.parent / LATEST} {fault}"
    older = step_of(named) < step_of(checkpoint)
    return f"{checkpoint.parent / LATEST} names {named.name}, which is older" if older else None


def is_whole(checkpoint: Path) -> bool:
    """True if a checkpoint has a manifest and all its files in the recorded sizes."""
    try:
        read_manifest(checkpoint)
    except ConfigError:
        return False
    return True


def manifest_digest(manifest: dict[str, Any]) -> str:
    """Return the sha256 of a manifest without its own `sha256` entry."""
    rest = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def read_manifest(path: Path) -> dict[str, Any]:
    """Read the manifest of a checkpoint, and check that its files exist in the recorded sizes.

    Their contents are not read. Raises ConfigError with the fault, which suggests the checkpoint
    before.
    """
    manifest = parse_manifest(path)
    for name, expected in manifest["files"].items():
        if not (path / name).is_file():
            raise broken(path, f"{name} is missing")
        if (size := (path / name).stat().st_size) != expected["bytes"]:
            raise broken(path, f"{name} has {size} bytes instead of {expected['bytes']}")
    return manifest


def read_whole_manifest(path: Path) -> dict[str, Any]:
    """Read the manifest of a checkpoint with all weights. Raises ConfigError, also for one of a
    run with checkpoint.frozen=false.
    """
    manifest = read_manifest(path)
    if missing := manifest.get("left_out"):
        frozen = manifest["config"]["train"]["frozen"]
        rule = f"lacks {len(missing)} frozen weights (checkpoint.frozen=false, train.frozen="
        rule += f"{typed(frozen)})"
        advice = "resume its run for a step with checkpoint.frozen=true, which saves them"
        raise ConfigError("resume", path, rule, advice=advice)
    layers = manifest["config"]["model"].get("num_layers", 0)
    if layers > len(manifest["parts"]):  # before a model of so many is built
        raise broken(path, f"{MANIFEST}: config.model.num_layers={layers}, and `parts` has fewer")
    return manifest


def parse_manifest(path: Path, as_saved: bool = False) -> dict[str, Any]:
    """Read and check the manifest of a checkpoint, without its files. Keys of its configuration get
    their present names, unless `as_saved`. Raises ConfigError.
    """
    try:
        manifest = parse_strictly(read_regular(path / MANIFEST))
    except (OSError, ValueError) as error:
        raise broken(path, f"{MANIFEST} cannot be read: {error}") from error
    found = manifest.get("format") if isinstance(manifest, dict) else None
    if not isinstance(manifest, dict) or found != FORMAT:
        raise broken(path, f"{MANIFEST} has format {found}, this version reads format {FORMAT}")
    if manifest.get("sha256") != manifest_digest(manifest):
        raise broken(path, f"{MANIFEST} was changed after it was saved (sha256 differs)")
    try:
        check_manifest(manifest)
        present, _ = with_new_names(manifest["config"], saved=True)
        check_config(present, IMPORTED in manifest)
    except FieldError as error:
        raise broken(path, f"{MANIFEST}: {error}") from error
    return manifest if as_saved else {**manifest, "config": present}


def check_contents(
    path: Path, manifest: dict[str, Any], names: Iterable[str], threads: int = 1
) -> None:
    """Compare the sha256 of files of a checkpoint with its manifest's, and check their headers.
    Raises ConfigError.
    """
    held = held_parts(manifest)
    ranks = {name: rank for rank, name in enumerate(manifest["files"])}

    def check(name: str) -> None:
        try:
            with (path / name).open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != manifest["files"][name]["sha256"]:
                raise broken(path, f"{name} was changed after it was saved (sha256 differs)")
            rank = ranks[name]
            check_header(read_header(path / name), manifest, rank, held=held.get(rank, {}))
        except ConfigError:
            raise
        except (OSError, ValueError) as error:
            raise broken(path, f"{name}: {error}") from error

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(check, names))  # re-raises the error of a thread


def broken(path: Path, what: str) -> ConfigError:
    """Return the error for a broken checkpoint, which suggests the one before."""
    earlier = [other for other in complete_checkpoints(path.parent) if other.name < path.name]
    return ConfigError("resume", path, what, nearest=earlier[-1] if earlier else None)
