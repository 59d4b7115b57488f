"""Load a checkpoint at any layout.

A part is a range of a flattened block of a global parameter (`app.plan.sharding.reshard`). A rank
finds in the manifest which files share elements with its own parts, and maps only those files.
`app.engine.checkpoint.save` writes them, `app.engine.files.checkpoints` defines their names.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from app.data.feed import Cursor
from app.engine.files.checkpoints import MANIFEST, broken, check_contents
from app.engine.files.names import (
    CURSOR,
    IMPORTED,
    LEFT_OUT,
    MAIN,
    RANDOM_CPU,
    RANDOM_CUDA,
    SCALES,
    bias_name,
    part_name,
    rank_file,
    scales_name,
)
from app.engine.ranks.agreement import all_succeed, rank_zero_says
from app.engine.ranks.groups import Groups
from app.engine.step.engine import Engine
from app.errors import ConfigError
from app.fp8.delayed import EACH
from app.fp8.linear import Fp8Layers
from app.model.chunk import Chunk
from app.moe.phases import Router
from app.optim.frozen import FrozenWeight, digests, together
from app.optim.shard import ParamShard
from app.plan.sharding.reshard import Block, Slice, overlaps
from app.plan.shards import Bounds


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a run."""

    step: int = 0  # steps taken
    updates: int = 0  # steps whose update was not skipped
    tokens: int = 0  # tokens trained on


def load_checkpoint(
    path: Path, manifest: dict[str, Any], engine: Engine
) -> tuple[Progress, dict[str, Any]]:
    """Fill parameters, moments, router biases, FP8 scales and RNG state; all ranks call it.

    `manifest` is what `read_manifest` returned. Each rank checks some of the files, then reads its
    own parts. Returns the progress and the data cursor. Raises ConfigError, the same on
    every rank.
    """
    groups = engine.groups
    files = manifest["files"]
    engine.watchdog.rest(f"reading {path.name}")
    # 1. Check the files, shared among the ranks, before anything is overwritten.
    share = list(files)[groups.rank :: groups.host.size()]
    all_succeed(groups, lambda: check_contents(path, manifest, share))
    opened = _Opened(path)
    all_succeed(groups, lambda: _check_fits(engine, manifest, opened))
    return fill_engine(path, manifest, engine, opened=opened)


def fill_engine(
    path: Path, manifest: dict[str, Any], engine: Engine, *, opened: Mapping[int, RankFile]
) -> tuple[Progress, dict[str, Any]]:
    """Fill the engine from `opened` files of ranks; `path` names them in messages. Otherwise as
    `load_checkpoint`, which has checked them.
    """
    groups = engine.groups
    dp_ranks = [entry["dp_rank"] for entry in manifest["files"].values()]
    own = opened[_own_file(groups, dp_ranks)]
    # 2. Parameters and moments. An all-gather still under way would overwrite loaded values.
    engine.gather_all_params()
    param_shards = list(engine.optimizer.param_shards())
    keys = (MAIN,) if IMPORTED in manifest else None
    found = sum(
        _fill(owned, manifest["parts"][owned.spec.name], opened, keys) for owned in param_shards
    )
    missing = sum(owned.main.numel() for owned in param_shards) - found
    assert missing == 0, f"{missing} elements of this rank are in no file of {path}"
    _load_frozen(path, manifest, engine, opened=opened)
    # 3. Router biases, FP8 scales, loss scale, RNG state.
    for name, router in engine.named_routers():
        if _lacks_bias(manifest, name):
            continue
        router.bias_E.copy_(opened[manifest["routers"][name]].get_tensor(bias_name(name)))
    _restore_scales(engine, manifest, opened)
    if engine.loss_scale is not None and manifest["loss_scale"] is not None:
        engine.loss_scale.load(manifest["loss_scale"])
    if IMPORTED not in manifest:
        _restore_random(own, engine.device)
    # 4. Adam's step count, and the low-precision parameters from the loaded main parameters.
    engine.optimizer.restored(manifest["updates"])
    for state in engine.states:
        state.restored(manifest["updates"])
    progress = Progress(manifest["step"], manifest["updates"], manifest["tokens"])
    cursor = json.loads(own.metadata()[CURSOR])
    if Cursor.is_of_streams(cursor):
        one_each = {dp_rank: rank for rank, dp_rank in enumerate(dp_ranks)}.values()
        metadata = (opened[rank].metadata() for rank in one_each)
        cursor = rank_zero_says(
            groups, lambda: _merged(path, [json.loads(each[CURSOR]) for each in metadata]).state()
        )
    return progress, cursor


def _merged(path: Path, states: list[dict[str, Any]]) -> Cursor:
    """Return the position in the data from the files of all ranks. Raises ConfigError."""
    try:
        return Cursor.merged(states)
    except (KeyError, TypeError, ValueError) as error:
        raise broken(path, "the data cursors of its rank files are of different data") from error


def _check_fits(engine: Engine, manifest: dict[str, Any], opened: _Opened) -> None:
    """Raise ConfigError if files lack what this rank needs, or have it in other sizes."""
    path = opened.path
    own = opened[_own_file(engine.groups, [each["dp_rank"] for each in manifest["files"].values()])]
    parts: list[ParamShard | FrozenWeight] = [*engine.optimizer.param_shards()]
    parts += [each for each in engine.frozen if each.spec.name not in manifest.get(LEFT_OUT, {})]
    for owned in parts:
        block = owned.spec.block
        entry = _entry(path, manifest, owned.spec.name, block.shape)
        want = Slice(block, (owned.start, owned.start + owned.main.numel()))
        for rank, _ in _Found.of(want, entry).runs if IMPORTED not in manifest else ():
            for key in owned.state:
                if (name := part_name(owned.spec.name, key)) not in opened.names(rank):
                    raise broken(path, f"{rank_file(rank)} has no {name}")
    _check_routers(path, manifest, engine.named_routers(), opened)
    for name, rank in manifest.get(SCALES, {}).items():
        shape = opened[rank].get_slice(scales_name(name)).get_shape()
        if len(shape) != 2 or shape[0] != EACH or shape[1] < 2:
            raise broken(path, f"{scales_name(name)}.shape={shape} must be [{EACH}, 1 + steps]")
    if IMPORTED not in manifest:
        try:
            torch.Generator().set_state(own.get_tensor(RANDOM_CPU))
            if engine.device.type == "cuda" and RANDOM_CUDA in own.keys():  # noqa: SIM118
                torch.Generator(engine.device).set_state(own.get_tensor(RANDOM_CUDA))
        except RuntimeError as error:
            raise broken(path, f"holds no state of random numbers: {error}") from error


def _entry(path: Path, manifest: dict[str, Any], name: str, shape: Sequence[int]) -> dict[str, Any]:
    """Return a weight's entry. Raises ConfigError if it is missing or has another shape."""
    entry: dict[str, Any] | None = manifest["parts"].get(name)
    if entry is None:
        raise broken(path, f"{MANIFEST}: parts has no {name}, which its model has")
    if entry["shape"] != [*shape]:
        raise broken(path, f"{MANIFEST}: parts.{name}.shape={entry['shape']} must be {[*shape]}")
    return entry


def _check_routers(
    path: Path,
    manifest: dict[str, Any],
    routers: Iterable[tuple[str, Router]],
    opened: _Opened,
) -> None:
    """Raise ConfigError if biases of routers are missing or have other shapes."""
    for name, router in routers:
        if _lacks_bias(manifest, name):
            continue
        if name not in manifest["routers"]:
            raise broken(path, f"{MANIFEST}: routers has no {name}, which its model has")
        shape = opened[manifest["routers"][name]].get_slice(bias_name(name)).get_shape()
        if shape != [*router.bias_E.shape]:
            must = [*router.bias_E.shape]
            raise broken(path, f"{bias_name(name)}.shape={shape} must be {must}")


def _load_frozen(
    path: Path, manifest: dict[str, Any], engine: Engine, *, opened: Mapping[int, RankFile]
) -> None:
    """Fill frozen parameters. Of those that are not saved, check that their initial values are
    what the checkpoint was trained with. Raises ConfigError, the same on every rank.
    """
    left_out: dict[str, int] = manifest.get(LEFT_OUT, {})
    for weight in engine.frozen:
        if weight.spec.name not in left_out:
            found = _fill(weight, manifest["parts"][weight.spec.name], opened, (MAIN,))
            assert found == weight.main.numel(), f"{weight.spec.name} is not whole in {path}"
    if not left_out:
        return
    own = digests(each for each in engine.frozen if each.spec.name in left_out)
    parts: list[dict[str, int]] = [{}] * engine.groups.host.size()
    dist.all_gather_object(parts, own, group=engine.groups.host)
    here = together(parts)
    if other := [name for name, digest in left_out.items() if here.get(name) != digest]:
        rule = f"was saved without frozen weights, and {other[0]} differs from what it was trained"
        rule += " with"
        advice = "give the model.init_from, model.init_std and train.seed of its run"
        raise ConfigError("resume", path, rule, advice=advice)


def _restore_scales(
    engine: Engine, manifest: dict[str, Any], opened: Mapping[int, RankFile]
) -> None:
    """Load FP8 scales of the layers that the checkpoint has; the others start fresh."""
    fp8 = engine.state(Fp8Layers)
    if fp8 is None or fp8.scales is None:
        return
    scales = fp8.scales
    scales.forget()
    for name, rank in manifest.get(SCALES, {}).items():
        if name in scales.of:
            scales.load(name, opened[rank].get_tensor(scales_name(name)))


class RankFile(Protocol):
    """File of a rank, or a copy in memory of what it would hold."""

    def keys(self) -> Collection[str]:
        """Return the names of its tensors."""

    def get_tensor(self, name: str) -> Tensor:
        """Return a tensor, on the CPU."""

    def metadata(self) -> dict[str, str]:
        """Return its metadata."""


class _Opened(dict[int, safe_open]):
    """Rank files of a checkpoint, each mapped at first access."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self._names: dict[int, frozenset[str]] = {}

    def names(self, rank: int) -> frozenset[str]:
        """Return the names of a file's tensors."""
        if rank not in self._names:
            self._names[rank] = frozenset(self[rank].keys())
        return self._names[rank]

    def __missing__(self, rank: int) -> safe_open:
        self[rank] = safe_open(self.path / rank_file(rank), "pt")
        return self[rank]


def _lacks_bias(manifest: dict[str, Any], router: str) -> bool:
    """True if an imported checkpoint has no bias for a router, as in many model families."""
    return IMPORTED in manifest and router not in manifest["routers"]


@torch.no_grad()
def load_weights(
    path: Path, manifest: dict[str, Any], chunks: Sequence[Chunk], groups: Groups
) -> None:
    """Fill weights and router biases of this rank's chunks for inference; all ranks call it.

    Otherwise as `load_checkpoint`.
    """
    share = list(manifest["files"])[groups.rank :: groups.host.size()]
    all_succeed(groups, lambda: check_contents(path, manifest, share))
    opened = _Opened(path)
    all_succeed(groups, lambda: _check_chunks(path, manifest, chunks, opened))
    for chunk in chunks:
        for named, param in chunk.weights():
            want = Slice(groups.coords.block(named.weight))
            found = _Found.of(want, manifest["parts"][named.name])
            assert found.elements == param.numel(), f"{named.name} is in no file of {path}"
            param.copy_(found.read(named.name, MAIN, opened).view_as(param))
        for name, module in chunk.named_modules():
            if isinstance(module, Router) and not _lacks_bias(manifest, name):
                saved = opened[manifest["routers"][name]]
                module.bias_E.copy_(saved.get_tensor(bias_name(name)))


def _check_chunks(
    path: Path, manifest: dict[str, Any], chunks: Sequence[Chunk], opened: _Opened
) -> None:
    """Raise ConfigError if a checkpoint lacks weights of these chunks."""
    for chunk in chunks:
        for named, _ in chunk.weights():
            _entry(path, manifest, named.name, named.weight.shape)
        modules = chunk.named_modules()
        routers = ((name, each) for name, each in modules if isinstance(each, Router))
        _check_routers(path, manifest, routers, opened)


def _fill(
    owned: ParamShard | FrozenWeight,
    entry: dict[str, Any],
    opened: Mapping[int, RankFile],
    keys: tuple[str, ...] | None,
) -> int:
    """Copy an owned part from the files; returns the number of elements found.

    `keys` are the state keys in the files, and the other keys become zero; None means all keys.
    """
    want = Slice(owned.spec.block, (owned.start, owned.start + owned.main.numel()))
    found = _Found.of(want, entry)
    for key, tensor in owned.state.items():
        if keys is not None and key not in keys:
            tensor.zero_()
            continue
        # assembled on the CPU: ranges may be many and short, and the GPU gets one copy
        tensor.copy_(found.read(owned.spec.name, key, opened))
    return found.elements


@dataclass(frozen=True, slots=True)
class _Found:
    """Locations, in rank files, of the elements of a wanted part of a parameter."""

    wanted: int  # elements
    runs: Sequence[tuple[int, Sequence[tuple[Bounds, Bounds]]]]  # rank: (range there, range here)

    @classmethod
    def of(cls, want: Slice, entry: dict[str, Any]) -> _Found:
        """Locate them through the parameter's entry in the manifest."""
        shape = tuple(entry["shape"])
        held = (
            (rank, Slice(Block(shape, tuple(start), tuple(stop)), tuple(part)))
            for rank, start, stop, part in entry["held"]
        )
        runs = [(rank, runs) for rank, have in held if (runs := list(overlaps(have, want)))]
        first, end = want.bounds
        return cls(end - first, runs)

    @property
    def elements(self) -> int:
        """Number of elements found."""
        return sum(into[1] - into[0] for _, runs in self.runs for _, into in runs)

    def read(self, name: str, key: str, opened: Mapping[int, RankFile]) -> Tensor:
        """Read main values or a moment: as fp32, on the CPU, flat."""
        filled = torch.empty(self.wanted, dtype=torch.float32)
        for rank, runs in self.runs:
            saved = opened[rank].get_tensor(part_name(name, key))
            for have, into in runs:
                filled[slice(*into)] = saved[slice(*have)]
        return filled


def _own_file(groups: Groups, dp_ranks: list[int]) -> int:
    """Return the rank whose RNG state this one takes: itself at the same layout."""
    if len(dp_ranks) == groups.layout.world_size and dp_ranks[groups.rank] == groups.dp_rank:
        return groups.rank
    return dp_ranks.index(groups.dp_rank) if groups.dp_rank in dp_ranks else 0


def _restore_random(own: RankFile, device: torch.device) -> None:
    torch.set_rng_state(own.get_tensor(RANDOM_CPU).clone())
    if device.type == "cuda" and RANDOM_CUDA in own.keys():  # noqa: SIM118 - no mapping
        torch.cuda.set_rng_state(own.get_tensor(RANDOM_CUDA).clone(), device)
