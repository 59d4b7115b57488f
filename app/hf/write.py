"""Write our weights as a folder that `transformers` loads: safetensors files, index, config.json.

The folder is written under a temporary name and renamed when it is complete. Several processes may
share the work, one file at a time each; none holds more than a part of one tensor.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from app.config import ModelConfig
from app.errors import ConfigError
from app.hf.behind import copies
from app.hf.family import Family
from app.hf.file_names import INDEX, ONE_FILE
from app.hf.tables import mapping
from app.hf.weight_part import WeightPart, by_tensor
from app.own_files import fresh_file, write_whole
from app.plan.sharding.reshard import Block

FILE_BYTES = 5 * 10**9  # largest file, unless a single tensor is larger
PART_NUMEL = 2**26  # elements read and written at a time
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
BIAS_DTYPE = torch.float32  # type of router biases in all families


class WeightReader(Protocol):
    """Source of weights."""

    def read(self, name: str, box: Block) -> Tensor:
        """Return a box of the named weight in host memory, with the box's shape."""


@dataclass(frozen=True, slots=True)
class WrittenTensor:
    """One of their tensors, and the parts of our weights that hold its elements."""

    weight: str
    parts: tuple[WeightPart, ...]  # in the order of their elements, which are all of the tensor's
    dtype: torch.dtype

    @property
    def name(self) -> str:
        """Its name in the file."""
        return self.parts[0].name

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape in the file."""
        return self.parts[0].shape

    @property
    def bytes(self) -> int:
        """Return the bytes of the tensor in its file."""
        return prod(self.shape) * self.dtype.itemsize

    def data(self, source: WeightReader) -> Iterator[memoryview]:
        """Yield the tensor's bytes in order, a part at a time."""
        for part in chain.from_iterable(map(_parts, self.parts)):
            values = source.read(self.weight, part.ours).permute(_to_theirs(part.order))
            flat = values.to(self.dtype).contiguous().view(-1).view(torch.uint8)
            yield flat.numpy().data


def _to_theirs(order: Sequence[int]) -> tuple[int, ...]:
    """Invert an order: return dimension of theirs -> dimension of ours."""
    return tuple(order.index(dim) for dim in range(len(order)))


def _parts(part: WeightPart) -> Iterator[WeightPart]:
    """Split a tensor into parts of consecutive rows, none much larger than PART_NUMEL."""
    sizes = part.theirs.sizes
    dim = next((dim for dim, size in enumerate(sizes) if size > 1), 0)
    rows = max(1, PART_NUMEL * sizes[dim] // prod(sizes))
    mine = part.order.index(dim)
    for low in range(0, sizes[dim], rows):
        high = min(low + rows, sizes[dim])
        yield replace(
            part, ours=_cut(part.ours, mine, low, high), theirs=_cut(part.theirs, dim, low, high)
        )


def _cut(block: Block, dim: int, low: int, high: int) -> Block:
    """Return the range `low` to `high` of a block along a dimension."""
    first = block.start[dim]
    start = (*block.start[:dim], first + low, *block.start[dim + 1 :])
    stop = (*block.stop[:dim], first + high, *block.stop[dim + 1 :])
    return Block(block.shape, start, stop)


@dataclass(frozen=True, slots=True)
class Export:
    """Export of a model to a folder. One process calls `begin` and `finish`; any may `write`."""

    model: ModelConfig
    family: Family
    folder: Path
    dtype: torch.dtype
    # types of weights that differ from `dtype`
    apart: Mapping[str, torch.dtype] = field(default_factory=dict)
    replaces: bool = False  # replace an earlier folder of this name once this one is complete

    @property
    def temporary(self) -> Path:
        """Return the temporary folder that it is written to."""
        return self.folder.with_name(f".{self.folder.name}.tmp")

    def files(self) -> dict[str, list[WrittenTensor]]:
        """Return file -> its tensors, in order."""
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
        table, layers = self.family.table(self.model), self.family.layers_name
        for weight in self.family.weights(self.model):
            biased = weight.name.endswith(".bias_E")
            dtype = BIAS_DTYPE if biased else self.apart.get(weight.name, self.dtype)
            for parts in by_tensor(mapping(table, self.model, weight, layers).spellings[0]):
                yield WrittenTensor(weight.name, parts, dtype)
        shape = self.model.vocab_size, self.model.hidden_size
        for copy, _, ours in copies(self.model):
            yield WrittenTensor(ours, (WeightPart.same(copy, shape),), self.dtype)

    def begin(self) -> None:
        """Make the temporary folder. Raises ConfigError if the target already exists."""
        if os.path.lexists(self.folder) and not self.replaces:
            raise ConfigError("folder", self.folder, "already exists", advice="name a new folder")
        shutil.rmtree(self.temporary, ignore_errors=True)
        with _writing(self.folder):
            self.temporary.mkdir(parents=True)

    def write(self, name: str, source: WeightReader) -> None:
        """Write one of the files and flush it to disk (fsync). Raises ConfigError."""
        tensors = self.files()[name]
        with _writing(self.temporary / name), fresh_file(self.temporary / name) as file:
            entries = [(each.name, each.dtype, each.shape) for each in tensors]
            file.write(file_header(entries, {"format": "pt"}))
            for tensor in tensors:
                for data in tensor.data(source):
                    file.write(data)
            file.flush()
            os.fsync(file.fileno())

    def finish(self, texts: Mapping[str, bytes]) -> None:
        """Write the index and files with these contents, then rename the folder. Raises
        ConfigError.
        """
        files = self.files()
        index = {}
        if list(files) != [ONE_FILE]:
            size = sum(tensor.bytes for held in files.values() for tensor in held)
            places = {each.name: file for file, held in files.items() for each in held}
            index = {INDEX: as_json({"metadata": {"total_size": size}, "weight_map": places})}
        with _writing(self.folder):
            write_all(self.temporary, {**index, **texts})
            self._take_place()

    def _take_place(self) -> None:
        """Rename the folder; an earlier one is removed afterwards, or restored on failure."""
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
        """Remove the temporary folder."""
        shutil.rmtree(self.temporary, ignore_errors=True)


@contextmanager
def complete_or_gone(folder: Path, temporary: Path) -> Iterator[None]:
    """Remove a folder's temporary copy, and parent folders made for it, if the block fails."""
    made = [above for above in folder.parents if not os.path.lexists(above)]
    try:
        yield
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        for above in made:
            with suppress(OSError):  # never made, or no longer empty
                above.rmdir()
        raise


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Turn an OSError into a ConfigError about this path."""
    try:
        yield
    except OSError as error:
        rule = f"cannot be written: {error.strerror or error}"
        raise ConfigError("folder", path, rule) from error


def file_header(
    entries: Iterable[tuple[str, torch.dtype, Sequence[int]]], metadata: Mapping[str, str]
) -> bytes:
    """Return the header of a safetensors file, with its length, for these contiguous tensors: name,
    type and shape of each.
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
        write_whole(folder / name, contents)


def as_json(value: Mapping[str, Any]) -> bytes:
    """Return the bytes of an indented JSON file."""
    return (json.dumps(value, indent=2) + "\n").encode()
