"""Copy of one rank's state in host memory: a flat buffer, and a header that says what is where."""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from app.engine.checkpoint.save import RankState

ALIGNMENT = 16  # bytes; of each tensor in the buffer
PART = 2**26  # bytes of a message, and of a sum
SUMMING = 4  # threads
DTYPES = {str(each): each for each in (torch.float32, torch.bfloat16, torch.float16, torch.uint8,
                                       torch.int8, torch.int32, torch.int64)}  # fmt: skip


@dataclass(slots=True)
class Slot:
    """Buffer for one copy; it grows to the size of the state and is then reused."""

    pinned: bool  # page-locked, so that a GPU can write it beside its own work
    serial: int = 0  # number of the copy, from 1; 0: none, or one that is not whole
    header: dict[str, Any] = field(default_factory=dict)
    data: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    crc: int = 0  # sum of the data

    def fit(self, size: int) -> Tensor:
        """Return the first `size` bytes of the buffer, which is replaced if it is smaller."""
        if self.data.numel() < size:
            self.data = torch.empty(size, dtype=torch.uint8, pin_memory=self.pinned)
        return self.data[:size]

    def lay_out(self, state: RankState) -> dict[str, Tensor]:
        """Write the header of a state; return views of the buffer, in which its tensors belong."""
        self.serial = 0
        end, places = 0, {}
        for name, tensor in state.tensors.items():
            places[name] = (str(tensor.dtype), list(tensor.shape), end)
            end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        self.header = {
            "tensors": places,
            "size": end,
            "metadata": state.metadata,
            "manifest": state.manifest,
            "parts": state.parts,
            "routers": state.routers,
            "scales": state.scales,
            "left_out": state.left_out,
        }
        self.fit(end)
        return {name: self._view(*place) for name, place in places.items()}

    def _view(self, dtype: str, shape: list[int], begin: int) -> Tensor:
        kind = DTYPES[dtype]
        numel = 1
        for size in shape:
            numel *= size
        return self.data[begin : begin + numel * kind.itemsize].view(kind).view(shape)

    def header_bytes(self) -> bytes:
        """Return the header with number and checksum, as JSON."""
        return json.dumps({**self.header, "serial": self.serial, "crc": self.crc}).encode()

    def take_header(self, text: bytes) -> int:
        """Read the header of a copy that is to arrive; return its number. The slot counts as empty
        until then.
        """
        self.serial = 0
        self.header = json.loads(text)
        self.crc = self.header.pop("crc")
        serial: int = self.header.pop("serial")
        return serial

    @property
    def content(self) -> Tensor:
        """Return the bytes of the tensors."""
        return self.data[: self.header["size"]]

    def sum(self) -> int:
        """Return the CRC-32 of the CRC-32s of parts, which threads compute side by side."""
        parts = [part.numpy().data for part in self.content.split(PART)]
        with ThreadPoolExecutor(SUMMING) as threads:  # zlib lets other threads run
            sums = list(threads.map(zlib.crc32, parts))
        return zlib.crc32(b"".join(each.to_bytes(4, "little") for each in sums))

    def is_whole(self) -> bool:
        """True if the slot has a copy with the sum that it was made with."""
        return self.serial > 0 and self.sum() == self.crc

    def keys(self) -> Collection[str]:
        """Return the names of the tensors."""
        return self.header["tensors"].keys()  # type: ignore[no-any-return]

    def get_tensor(self, name: str) -> Tensor:
        """Return a tensor, a view of the buffer."""
        return self._view(*self.header["tensors"][name])

    def metadata(self) -> dict[str, str]:
        """Return what a file of this rank would have as metadata."""
        found: dict[str, str] = self.header["metadata"]
        return found


@dataclass(frozen=True, slots=True)
class OnlyMetadata:
    """Another rank's file, of which nothing but the metadata is read."""

    found: Mapping[str, str]

    def keys(self) -> Collection[str]:
        """Return no name."""
        return ()

    def get_tensor(self, name: str) -> Tensor:
        """Raise LookupError: ranks take tensors from their own copies."""
        raise LookupError(f"{name} of another rank")

    def metadata(self) -> dict[str, str]:
        """Return the metadata."""
        return dict(self.found)
