"""The weights of a checkpoint, box by box, without the run that saved it.

A box comes from as many files as ranks held parts of it. No more of these is read than the rows of
the weight that the box lies in.
"""

from __future__ import annotations

from collections import defaultdict
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from app.engine.checkpoint.load import MAIN, bias_name, part_name, rank_file
from app.hf.weight_part import refined
from app.hf.write import DTYPES
from app.plan.sharding.reshard import Block
from app.plan.shards import Bounds


class SavedWeights:
    """What the checkpoint `path` with this manifest holds of weights and routers' biases."""

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self.path = path
        self.manifest = manifest
        self._routers = {bias_name(name): rank for name, rank in manifest["routers"].items()}
        self._opened: dict[int, safe_open] = {}
        # the rows last read, since query, key and value heads, or gate and up, follow each other
        self._last: tuple[object, Tensor] | None = None

    def dtype(self, name: str) -> torch.dtype:
        """The type in which the weight `name` is kept."""
        rank, *_ = self.manifest["parts"][name]["held"][0]
        found = self._file(rank).get_slice(part_name(name, MAIN))
        return next(kind for kind, code in DTYPES.items() if code == found.get_dtype())

    def read(self, name: str, box: Block) -> Tensor:
        """A box of the weight `name`, whose dimensions may be taken apart further than those of the
        weight's description; of the box's sizes, fp32.
        """
        if name in self._routers:
            bias_E: Tensor = self._file(self._routers[name]).get_tensor(name)
            return bias_E[tuple(map(slice, box.start, box.stop))]
        entry = self.manifest["parts"][name]
        shape = tuple(entry["shape"])
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

    def _rows(
        self, name: str, held: Block, shared: Block, *, parts: list[tuple[int, Bounds]]
    ) -> Tensor:
        """Of a block that ranks hold parts of, all rows that something is wanted of."""
        rows = shared.start[0] - held.start[0], shared.stop[0] - held.start[0]
        asked = name, held, rows
        if self._last is None or self._last[0] != asked:
            self._last = None  # no longer needed, and as large as what comes
            row = prod(held.sizes[1:])
            flat = self._flat(name, (rows[0] * row, rows[1] * row), parts)
            self._last = asked, flat.view(-1, *held.sizes[1:])
        return self._last[1]

    def _flat(self, name: str, wanted: Bounds, parts: list[tuple[int, Bounds]]) -> Tensor:
        """A range of a flattened block, from the parts that ranks hold of it."""
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
