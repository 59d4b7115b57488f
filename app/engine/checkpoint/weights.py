"""Read weights of a checkpoint box by box, outside the run that saved it.

A box is assembled from the files of all ranks that held parts of it. Only the rows of the weight
that contain the box are read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from app.engine.files.checkpoints import MANIFEST, broken
from app.engine.files.names import MAIN, bias_name, part_name, rank_file
from app.hf.weight_part import refined
from app.hf.write import DTYPES
from app.plan.sharding.reshard import Block
from app.plan.shards import Bounds


class SavedWeights:
    """Weights and router biases of the checkpoint `path` with this manifest."""

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self.path = path
        self.manifest = manifest
        self._routers = {bias_name(name): rank for name, rank in manifest["routers"].items()}
        self._opened: dict[int, safe_open] = {}
        # Cache of the rows read last: boxes of Q, K and V heads, or gate and up, come in turn.
        self._last: tuple[object, Tensor] | None = None

    def dtype(self, name: str) -> torch.dtype:
        """Return the type in which the weight `name` is saved."""
        rank, *_ = self._entry(name)["held"][0]
        found = self._file(rank).get_slice(part_name(name, MAIN))
        return next(kind for kind, code in DTYPES.items() if code == found.get_dtype())

    def read(self, name: str, box: Block) -> Tensor:
        """Read a box of the weight `name` as fp32, in the box's sizes.

        The box's shape may split dimensions of the saved shape further. Raises ConfigError for a
        weight that the checkpoint lacks, or has in another size.
        """
        if name in self._routers:
            bias_E: Tensor = self._file(self._routers[name]).get_tensor(name)
            self._check_shape(name, bias_E.shape, box)
            return bias_E.view(box.shape)[tuple(map(slice, box.start, box.stop))]
        entry = self._entry(name)
        shape = tuple(entry["shape"])
        self._check_shape(name, shape, box)
        held: dict[Block, list[tuple[int, Bounds]]] = defaultdict(list)
        for rank, start, stop, part in entry["held"]:
            held[Block(shape, tuple(start), tuple(stop))].append((rank, tuple(part)))
        out = torch.empty(box.sizes)
        filled = 0
        for block, parts in held.items():
            apart = refined(block, box.shape)
            shared = apart.intersection(box)
            if shared.numel:
                rows = self._rows(name, apart, shared, parts=parts)
                out[_inside(shared, box.start)] = rows[
                    _inside(shared, (shared.start[0], *apart.start[1:]))
                ]
                filled += shared.numel
        assert filled == box.numel, f"{box.numel - filled} elements of {name} are in no file"
        return out

    def _entry(self, name: str) -> dict[str, Any]:
        """Return a weight's entry in the manifest. Raises ConfigError if it has none."""
        if name not in self.manifest["parts"]:
            raise broken(self.path, f"{MANIFEST}: parts has no {name}, which its model has")
        entry: dict[str, Any] = self.manifest["parts"][name]
        return entry

    def _check_shape(self, name: str, shape: Sequence[int], box: Block) -> None:
        if prod(shape) != prod(box.shape):
            rule = f"{name} has the shape {[*shape]}, and its model's has {[*box.shape]}"
            raise broken(self.path, rule)

    def _rows(
        self, name: str, held: Block, shared: Block, *, parts: list[tuple[int, Bounds]]
    ) -> Tensor:
        """Return the rows of the `held` block that the `shared` box touches."""
        rows = shared.start[0] - held.start[0], shared.stop[0] - held.start[0]
        asked = name, held, rows
        if self._last is None or self._last[0] != asked:
            self._last = None  # free it first: it is as large as the next rows
            row = prod(held.sizes[1:])
            flat = self._flat(name, (rows[0] * row, rows[1] * row), parts)
            self._last = asked, flat.view(-1, *held.sizes[1:])
        return self._last[1]

    def _flat(self, name: str, wanted: Bounds, parts: list[tuple[int, Bounds]]) -> Tensor:
        """Read a range of a flattened block from the parts in rank files."""
        first, last = wanted
        flat = torch.empty(last - first)
        filled = 0
        for rank, (begin, end) in parts:
            low, high = max(first, begin), min(last, end)
            if low < high:
                found = self._file(rank).get_slice(part_name(name, MAIN))
                flat[low - first : high - first] = found[low - begin : high - begin]
                filled += high - low
        assert filled == len(flat), f"{len(flat) - filled} elements of {name} are in no file"
        return flat

    def _file(self, rank: int) -> safe_open:
        if rank not in self._opened:
            self._opened[rank] = safe_open(self.path / rank_file(rank), "pt")
        return self._opened[rank]


def _inside(block: Block, origin: tuple[int, ...]) -> tuple[slice, ...]:
    bounds = zip(block.start, block.stop, origin, strict=True)
    return tuple(slice(low - at, high - at) for low, high, at in bounds)
