"""Checkpoints on disk: what they hold, whether they are whole, and loading them at any layout.

    checkpoints/step-00000100/manifest.json              progress, layout, configuration, who holds which parts, checksums
    checkpoints/step-00000100/rank-00000.safetensors     one rank's parts of parameters and moments, its random state and cursor
    checkpoints/latest                                   name of the newest complete one

A part is a range of a block of a global parameter (`app.plan.reshard`). A rank finds in the manifest which files share
elements with what it owns, and maps those only. `app.engine.checkpoint_save` writes all this.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from app.engine.build import Engine
from app.engine.groups import Groups
from app.engine.run_folder import complete_checkpoints
from app.engine.tensor_file import TensorFile
from app.errors import ConfigError
from app.optim.adam import Piece
from app.plan.reshard import Block, Slice, overlaps

FORMAT = 3  # of the files; another one is refused
MANIFEST = "manifest.json"
CURSOR = "cursor"  # key of a rank file's metadata: position in the data, as JSON
RANDOM_CPU, RANDOM_CUDA = "random.cpu", "random.cuda"  # names of the generators' states in a rank file


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run has come."""

    step: int = 0  # steps taken
    updates: int = 0  # of them, those that were not skipped
    tokens: int = 0  # tokens trained on


def rank_file(rank: int) -> str:
    """Name of the file that a rank writes."""
    return f"rank-{rank:05d}.safetensors"


def part_name(parameter: str, key: str) -> str:
    """Name, in a rank file, of a parameter's main values or of one of its moments."""
    return f"{parameter}.{key}"


def bias_name(router: str) -> str:
    """Name, in a rank file, of a router's selection bias."""
    return f"{router}.bias_E"


def manifest_digest(manifest: dict[str, Any]) -> str:
    """sha256 over all of a manifest but this."""
    rest = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint, whose files are all there and as long as it says; their contents are not read.

    Raises ConfigError that names what is wrong, and the checkpoint before it.
    """
    manifest = parse_manifest(path)
    for name, expected in manifest["files"].items():
        if not (path / name).is_file():
            raise _broken(path, f"{name} is missing")
        if (size := (path / name).stat().st_size) != expected["bytes"]:
            raise _broken(path, f"{name} has {size} bytes instead of {expected['bytes']}")
    return manifest


def parse_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint, without a look at its files. Raises ConfigError."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise _broken(path, f"{MANIFEST} cannot be read: {error}") from error
    found = manifest.get("format") if isinstance(manifest, dict) else None
    if found != FORMAT:
        raise _broken(path, f"{MANIFEST} has format {found}, this version reads format {FORMAT}")
    if manifest.get("sha256") != manifest_digest(manifest):
        raise _broken(path, f"{MANIFEST} was changed after it was saved (sha256 differs)")
    return manifest


def verify_checkpoint(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint, every file of which has been read and found as it was saved. Raises ConfigError."""
    manifest = read_manifest(path)
    _check_contents(path, manifest, manifest["files"])
    return manifest


def _check_contents(path: Path, manifest: dict[str, Any], names: Iterable[str]) -> None:
    for name in names:
        with (path / name).open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != manifest["files"][name]["sha256"]:
                raise _broken(path, f"{name} was changed after it was saved (sha256 differs)")


def _broken(path: Path, what: str) -> ConfigError:
    earlier = [other for other in complete_checkpoints(path.parent) if other.name < path.name]
    return ConfigError("resume", path, what, f"resume={earlier[-1]}" if earlier else None)


def load_checkpoint(path: Path, manifest: dict[str, Any], engine: Engine) -> tuple[Progress, dict[str, Any]]:
    """Fill this rank's parameters, moments, router biases, loss scale and random state; all ranks call it together.

    `manifest` is what `read_manifest` returned. The ranks share the work of checking the files, and each then reads its own
    parts. Returns the progress and this rank's data cursor. Raises ConfigError, the same on every rank.
    """
    groups, files = engine.groups, manifest["files"]
    engine.watch.rest(f"reading {path.name}")
    share = list(files)[groups.rank :: groups.host.size()]
    _all_succeed(groups, lambda: _check_contents(path, manifest, share))
    for chunk in range(len(engine.chunks)):
        engine.optimizer.gather_params(chunk)  # what is still on its way would arrive on top of what is loaded
    opened = _Opened(path)
    pieces = list(engine.optimizer.pieces())
    found = sum(_fill(piece, manifest["parts"][piece.spec.name], opened) for piece in pieces)
    missing = sum(piece.main.numel() for piece in pieces) - found
    assert missing == 0, f"{missing} elements of this rank are in no file of {path}"
    for name, _, router in engine.routers():
        router.bias_E.copy_(opened[manifest["routers"][name]][bias_name(name)])
    if engine.loss_scale is not None and manifest["loss_scale"] is not None:
        engine.loss_scale.load(manifest["loss_scale"])
    own = opened[_own_file(groups, [entry["dp_rank"] for entry in files.values()])]
    _restore_random(own, engine.device)
    engine.optimizer.restored(manifest["updates"])
    progress = Progress(manifest["step"], manifest["updates"], manifest["tokens"])
    return progress, json.loads(own.metadata[CURSOR])


def _all_succeed(groups: Groups, work: Callable[[], None]) -> None:
    """Do something on every rank; a ConfigError of one is raised on all."""
    errors: list[Any] = [None] * groups.host.size()
    mine = None
    try:
        work()
    except ConfigError as error:
        mine = error
    dist.all_gather_object(errors, mine, group=groups.host)
    for error in errors:
        if error is not None:
            raise error


class _Opened(dict[int, TensorFile]):
    """The rank files of a checkpoint, each mapped when it is first asked for."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def __missing__(self, rank: int) -> TensorFile:
        self[rank] = TensorFile(self.path / rank_file(rank))
        return self[rank]


def _fill(piece: Piece, entry: dict[str, Any], opened: _Opened) -> int:
    """Copy what the files hold of a piece; returns how many elements that are."""
    want, shape = Slice(piece.spec.block, (piece.start, piece.start + piece.main.numel())), tuple(entry["shape"])
    held = ((rank, Slice(Block(shape, tuple(start), tuple(stop)), tuple(part))) for rank, start, stop, part in entry["held"])
    found = [(rank, runs) for rank, have in held if (runs := list(overlaps(have, want)))]
    for key, tensor in piece.state.items():
        filled = torch.empty_like(tensor, device="cpu")  # runs may be many and short, and a GPU is filled at once
        for rank, runs in found:
            saved = opened[rank][part_name(piece.spec.name, key)]
            for have, into in runs:
                filled[slice(*into)] = saved[slice(*have)]
        tensor.copy_(filled)
    return sum(into[1] - into[0] for _, runs in found for _, into in runs)


def _own_file(groups: Groups, dp_ranks: list[int]) -> int:
    """The rank whose random state and position in the data this rank takes: at the same layout its own."""
    if len(dp_ranks) == groups.layout.world_size and dp_ranks[groups.rank] == groups.dp_rank:
        return groups.rank
    return dp_ranks.index(groups.dp_rank) if groups.dp_rank in dp_ranks else 0


def _restore_random(own: TensorFile, device: torch.device) -> None:
    torch.set_rng_state(own[RANDOM_CPU].clone())
    if device.type == "cuda" and RANDOM_CUDA in own:
        torch.cuda.set_rng_state(own[RANDOM_CUDA].clone(), device)
