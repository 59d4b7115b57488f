"""Our weights as a folder that `transformers` loads: files of safetensors, an index, config.json.

The folder is written under another name, and renamed when it is complete. Several processes may
share the work, a file each at a time; none holds more than a part of one tensor.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from app.config import ModelConfig
from app.errors import ConfigError
from app.hf.families import Family
from app.hf.file_names import INDEX, ONE_FILE
from app.hf.piece import Piece
from app.hf.tables import mapping
from app.plan.sharding.reshard import Block

FILE_BYTES = 5 * 10**9  # most of a file, unless one tensor has more
PART_NUMEL = 2**26  # elements that are read and written at once
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
BIAS_DTYPE = torch.float32  # of routers, in all families


class WeightReader(Protocol):
    """Where weights come from."""

    def read(self, name: str, box: Block) -> Tensor:
        """A box of the weight of this name, of the box's sizes, on the host."""


@dataclass(frozen=True, slots=True)
class WrittenTensor:
    """One of their tensors, and where its elements are in one of our weights."""

    weight: str
    piece: Piece
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Of the tensor in its file."""
        return prod(self.piece.shape) * self.dtype.itemsize

    def data(self, source: WeightReader) -> Iterator[memoryview]:
        """The tensor's bytes in order, a part at a time."""
        for part in _parts(self.piece):
            values = source.read(self.weight, part.ours).permute(_to_theirs(part.order))
            flat = values.to(self.dtype).contiguous().view(-1).view(torch.uint8)
            yield flat.numpy().data


def _to_theirs(order: Sequence[int]) -> tuple[int, ...]:
    """For each dimension of theirs, which of ours it is."""
    return tuple(order.index(dim) for dim in range(len(order)))


def _parts(piece: Piece) -> Iterator[Piece]:
    """A whole tensor in parts of consecutive rows, none much larger than PART_NUMEL."""
    sizes = piece.theirs.sizes
    dim = next((dim for dim, size in enumerate(sizes) if size > 1), 0)
    rows = max(1, PART_NUMEL * sizes[dim] // prod(sizes))
    mine = piece.order.index(dim)
    for low in range(0, sizes[dim], rows):
        high = min(low + rows, sizes[dim])
        yield replace(
            piece, ours=_cut(piece.ours, mine, low, high), theirs=_cut(piece.theirs, dim, low, high)
        )


def _cut(block: Block, dim: int, low: int, high: int) -> Block:
    """From `low` to `high` of a block along a dimension."""
    first = block.start[dim]
    start = (*block.start[:dim], first + low, *block.start[dim + 1 :])
    stop = (*block.stop[:dim], first + high, *block.stop[dim + 1 :])
    return Block(block.shape, start, stop)


@dataclass(frozen=True, slots=True)
class Export:
    """A model on its way to a folder. `begin` and `finish` are one process's, `write` any's."""

    model: ModelConfig
    family: Family
    folder: Path
    dtype: torch.dtype
    # of weights that have another one
    apart: Mapping[str, torch.dtype] = field(default_factory=dict)
    replaces: bool = False  # an earlier one of the same name, when this one is complete

    @property
    def temporary(self) -> Path:
        """Where it is written."""
        return self.folder.with_name(f".{self.folder.name}.tmp")

    def files(self) -> dict[str, list[WrittenTensor]]:
        """What each file holds, in order."""
        shares: list[list[WrittenTensor]] = [[]]
        room = FILE_BYTES
        for tensor in self._tensors():
            if shares[-1] and tensor.bytes > room:
                shares.append([])
                room = FILE_BYTES
            shares[-1].append(tensor)
            room -= tensor.bytes
        if len(shares) == 1:
            return {ONE_FILE: shares[0]}
        count = len(shares)
        return {
            f"model-{number:05d}-of-{count:05d}.safetensors": share
            for number, share in enumerate(shares, start=1)
        }

    def _tensors(self) -> Iterator[WrittenTensor]:
        table = self.family.table(self.model)
        for weight in self.family.weights(self.model):
            biased = weight.name.endswith(".bias_E")
            for piece in mapping(table, self.model, weight).spellings[0]:
                dtype = BIAS_DTYPE if biased else self.apart.get(weight.name, self.dtype)
                yield WrittenTensor(weight.name, piece, dtype)

    def begin(self) -> None:
        """Make the folder to write in. Raises ConfigError where something stands at its place."""
        if os.path.lexists(self.folder) and not self.replaces:
            raise ConfigError("folder", self.folder, "is there already", advice="name a new folder")
        shutil.rmtree(self.temporary, ignore_errors=True)
        with _writing(self.folder):
            self.temporary.mkdir(parents=True)

    def write(self, name: str, source: WeightReader) -> None:
        """Write one of the files, and wait until it is on the disk. Raises ConfigError."""
        tensors = self.files()[name]
        with _writing(self.temporary / name), (self.temporary / name).open("wb") as file:
            entries = [(each.piece.name, each.dtype, each.piece.shape) for each in tensors]
            file.write(file_header(entries, {"format": "pt"}))
            for tensor in tensors:
                for data in tensor.data(source):
                    file.write(data)
            file.flush()
            os.fsync(file.fileno())

    def finish(self, texts: Mapping[str, bytes]) -> None:
        """Write the index, and files with these contents, and rename the folder. Raises
        ConfigError.
        """
        files = self.files()
        index = {}
        if list(files) != [ONE_FILE]:
            size = sum(tensor.bytes for held in files.values() for tensor in held)
            places = {each.piece.name: file for file, held in files.items() for each in held}
            index = {INDEX: as_json({"metadata": {"total_size": size}, "weight_map": places})}
        with _writing(self.folder):
            write_all(self.temporary, {**index, **texts})
            self._take_place()

    def _take_place(self) -> None:
        """Rename the folder; an earlier one is removed after that, or comes back."""
        earlier = self.folder.with_name(f".{self.folder.name}.old")
        if not self.replaces or not os.path.lexists(self.folder):
            self.temporary.rename(self.folder)
            return
        shutil.rmtree(earlier, ignore_errors=True)
        self.folder.rename(earlier)
        try:
            self.temporary.rename(self.folder)
        except OSError:
            earlier.rename(self.folder)
            raise
        shutil.rmtree(earlier, ignore_errors=True)

    def give_up(self) -> None:
        """Remove what was written of it."""
        shutil.rmtree(self.temporary, ignore_errors=True)


@contextmanager
def complete_or_gone(folder: Path, temporary: Path) -> Iterator[None]:
    """Remove the draft of a folder, and the folders made above it, where the block fails."""
    made = [above for above in folder.parents if not os.path.lexists(above)]
    try:
        yield
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        for above in made:
            with suppress(OSError):  # never made, or someone has put something there
                above.rmdir()
        raise


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Make what the system refuses a ConfigError about this path."""
    try:
        yield
    except OSError as error:
        rule = f"cannot be written: {error.strerror or error}"
        raise ConfigError("folder", path, rule) from error


def file_header(
    entries: Iterable[tuple[str, torch.dtype, Sequence[int]]], metadata: Mapping[str, str]
) -> bytes:
    """Length and contents of the header of a file with these tensors, one behind the other: the
    name of each, its type and shape.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, dtype, shape in entries:
        begin, end = end, end + prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": DTYPES[dtype],
            "shape": list(shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_all(folder: Path, texts: Mapping[str, bytes]) -> None:
    """Write files with these contents, by their names within a folder. Raises OSError."""
    for name, contents in texts.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(contents)


def as_json(value: Mapping[str, Any]) -> bytes:
    """The contents of a JSON file that people may read."""
    return (json.dumps(value, indent=2) + "\n").encode()
