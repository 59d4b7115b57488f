"""Tensors of a file that torch.save wrote, as safetensors' `safe_open` gives those of its own.

torch unpickles tensors only (`weights_only`) and maps the file into memory: no code of a file is
run, and only the regions that are read take memory.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from zipfile import ZIP_STORED, ZipFile

import torch
from torch import Tensor

# beginning of files of before torch 1.6, which cannot be mapped into memory
LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
PROTOCOL = torch.serialization.DEFAULT_PROTOCOL
MOST_TOLD = 100  # characters of an error of torch
CALLED = re.compile(r"GLOBAL (\S+)")  # in torch's message on what a pickle would call
NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.uint8: "U8",
}


class PickleFault(Exception):
    """What is wrong with a file, to be told after its name."""


@dataclass(frozen=True, slots=True)
class PickledSlice:
    """A tensor of which parts are copied, as safetensors' slice."""

    tensor: Tensor

    def get_shape(self) -> list[int]:
        """Return its shape."""
        return [*self.tensor.shape]

    def get_dtype(self) -> str:
        """Return its type, as safetensors names it."""
        kind = self.tensor.dtype
        return NAMES.get(kind, str(kind).removeprefix("torch."))

    def __getitem__(self, region: tuple[slice, ...]) -> Tensor:
        return self.tensor[region].clone(memory_format=torch.contiguous_format)


class PickledTensors:
    """Tensors of a file by name. Raises PickleFault."""

    def __init__(self, path: Path) -> None:
        found = _unpickled(path)
        if not isinstance(found, dict) or not found:
            raise PickleFault("has no tensors by name")
        for name, value in found.items():
            if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_meta:
                raise PickleFault(f"has {str(name)[:60]!r}, which is no plain tensor")
        self._tensors = {str(name): value.detach() for name, value in found.items()}

    def keys(self) -> list[str]:
        """Return the names of its tensors."""
        return [*self._tensors]

    def get_slice(self, name: str) -> PickledSlice:
        """Return a tensor."""
        return PickledSlice(self._tensors[name])


def _unpickled(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            legacy = file.read(len(LEGACY)) == LEGACY
    except OSError as error:
        raise PickleFault(f"cannot be read: {error.strerror}") from None
    if legacy:
        again = "torch.save of what torch.load(…, weights_only=True) returns mends it"
        raise PickleFault(f"is as torch saved before 1.6, and cannot be read by part; {again}")
    try:
        with ZipFile(path) as archive:
            compressed = any(each.compress_type != ZIP_STORED for each in archive.infolist())
        with warnings.catch_warnings():
            # of other pickle protocols, which torch reads or refuses
            warnings.filterwarnings("ignore", "Detected pickle protocol")
            warnings.filterwarnings("ignore", "Validating sparse tensor")  # refused below
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    # a damaged file raises errors of many kinds, whose messages may advise to unpickle all of it
    except Exception as error:
        if called := CALLED.search(str(error)):
            raise PickleFault(f"has more than tensors ({called[1]}), and no code is run") from None
        if isinstance(error, UnpicklingError):
            raise PickleFault(f"is damaged, or not of pickle protocol {PROTOCOL}") from None
        told = str(error).partition("\n")[0][:MOST_TOLD]
        raise PickleFault(f"is truncated or no file of torch.save: {told}") from None
    if compressed:  # torch takes the bytes of the file for those of tensors
        raise PickleFault("is a compressed archive, which torch.save does not write")
    return found
