"""Tensors of a folder of safetensors files, read by region.

Pickles are never read. Only the requested region of a memory-mapped file is copied, so a rank needs
no memory beyond its weights and the part being read. FP8 weights with a scale per block
(DeepSeek-V3) are dequantized.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from app.errors import ConfigError
from app.hf.file_names import INDEX, ONE_FILE, PICKLES

WEIGHTS = (".safetensors", ".gguf")  # suffixes of weight files, for a message
LFS = b"version https://git-lfs"
FP8 = "F8_E4M3"
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
READABLE = (*DTYPES, FP8)
SCALES = "_scale_inv"  # suffix of the tensor with the scales of an FP8 weight
Region = tuple[tuple[int, int], ...]  # (start, stop) for each dimension


class TensorFiles:
    """Tensors of a model's folder by name; `key` is the option that names the folder, for messages.

    Every method raises ConfigError if a tensor or file is missing, broken, or of the wrong type or
    shape.
    """

    def __init__(self, folder: Path, key: str, block: tuple[int, int] | None = None) -> None:
        self.folder = folder
        self.key = key
        self.block = block  # rows and columns that share a scale in FP8 weights
        self._opened: dict[str, safe_open] = {}
        self._known: dict[str, frozenset[str]] = {}  # opened file -> its tensors
        self.file_of: dict[str, str] = {}
        self.file_of |= self._listed()

    def refusal(self, what: str) -> ConfigError:
        """Return the error that says what is wrong with the files."""
        return ConfigError(self.key, self.folder, what)

    def names(self) -> Iterator[str]:
        """Yield the names of all tensors except scales of FP8 weights."""
        return (name for name in self.file_of if not self._is_scale(name))

    def _is_scale(self, name: str) -> bool:
        return name.endswith(SCALES) and name.removesuffix(SCALES) in self.file_of

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Refuse a tensor that has another shape, or a type that weights cannot have."""
        found = self._slice(name)
        if tuple(found.get_shape()) != shape:
            have, want = (list(each) for each in (found.get_shape(), shape))
            raise self._refused(name, f"has the shape {have} instead of {want}")
        if found.get_dtype() not in READABLE:
            raise self._refused(name, f"is of type {found.get_dtype()}, not {', '.join(READABLE)}")
        if found.get_dtype() == FP8:
            self._check_scales(name, shape)

    def dtype(self, name: str) -> torch.dtype:
        """Return a tensor's type; bfloat16 for FP8, as other programs convert it."""
        return DTYPES.get(self._slice(name).get_dtype(), torch.bfloat16)

    def read(self, name: str, region: Region) -> Tensor:
        """Read a region of a checked tensor into host memory: as in the file, FP8 as fp32."""
        found = self._slice(name)
        try:
            part = found[tuple(slice(*bounds) for bounds in region)]
        except (SafetensorError, OSError, ValueError) as error:
            raise self._refused(name, f"cannot be read: {error}") from None
        assert isinstance(part, Tensor)
        return part if found.get_dtype() != FP8 else part.float() * self._scales(name, region)

    def _listed(self) -> dict[str, str]:
        """Return tensor -> file, from the single file or else the index, like `transformers`."""
        if (self.folder / ONE_FILE).is_file():
            return dict.fromkeys(sorted(self._tensors(ONE_FILE)), ONE_FILE)
        if (self.folder / INDEX).is_file():
            return self._indexed()
        pickles = [name for name in PICKLES if (self.folder / name).exists()]
        if pickles:
            what = f"has {pickles[0]} but no safetensors, and pickles are not read"
            raise self.refusal(what)
        others = sorted(each.name for each in self.folder.glob("*") if each.suffix in WEIGHTS)
        beside = f", but {others[0]}" if others else ""
        raise self.refusal(f"has neither {ONE_FILE} nor {INDEX}{beside}")

    def _indexed(self) -> dict[str, str]:
        try:
            index = json.loads((self.folder / INDEX).read_text(encoding="utf-8"))
            listed = index["weight_map"]
            assert isinstance(listed, dict)
        except (OSError, ValueError, KeyError, TypeError, AssertionError):
            raise self.refusal(f"{INDEX} cannot be read, or has no weight_map") from None
        for name, file in listed.items():
            if not isinstance(file, str) or Path(file).name != file:
                raise self.refusal(f"{INDEX}: {name} is said to be in {file!r}, no file beside it")
        for file in sorted(set(listed.values())):
            if not (self.folder / file).is_file():
                first = next(name for name, place in listed.items() if place == file)
                raise self.refusal(f"{file} is missing, which has {first}")
        return listed

    def _open(self, file: str) -> safe_open:
        if file not in self._opened:
            try:
                self._opened[file] = safe_open(self.folder / file, "pt")
            except (SafetensorError, OSError) as error:
                raise self.refusal(f"{file} {self._fault(file, error)}") from None
        return self._opened[file]

    def _fault(self, file: str, error: Exception) -> str:
        with suppress(OSError), (self.folder / file).open("rb") as opened:
            if opened.read(len(LFS)) == LFS:
                return "is a pointer of git-lfs in the place of the file; git lfs pull brings it"
        return f"is truncated or no safetensors file: {error}"

    def _tensors(self, file: str) -> frozenset[str]:
        if file not in self._known:
            found = frozenset(self._open(file).keys())
            for name in sorted(found & self.file_of.keys()):
                if (other := self.file_of[name]) != file:
                    raise self.refusal(f"{name} is in {file}, and {INDEX} says in {other}")
            self._known[file] = found
        return self._known[file]

    def _slice(self, name: str) -> Any:
        file = self.file_of[name]
        if name not in self._tensors(file):
            raise self.refusal(f"{INDEX} names {file} for {name}, which is not in it")
        return self._open(file).get_slice(name)

    def _refused(self, name: str, what: str) -> ConfigError:
        return self.refusal(f"{self.file_of[name]}: {name} {what}")

    def _check_scales(self, name: str, shape: tuple[int, ...]) -> None:
        if name + SCALES not in self.file_of:
            raise self._refused(name, f"is of type {FP8} without {name.split('.')[-1]}{SCALES}")
        if self.block is None or len(shape) != 2:
            raise self._refused(name, f"is of type {FP8} without a block size in config.json")
        want = [-(-size // block) for size, block in zip(shape, self.block, strict=True)]
        have = self._slice(name + SCALES).get_shape()
        if list(have) != want:
            raise self._refused(name + SCALES, f"has the shape {have} instead of {want}")

    def _scales(self, name: str, region: Region) -> Tensor:
        """Return the scale of every element of a region."""
        assert self.block is not None
        blocks = zip(region, self.block, strict=True)
        around = [(low // size, -(-high // size)) for (low, high), size in blocks]
        scales: Tensor = self._slice(name + SCALES)[tuple(slice(*each) for each in around)]
        scales = scales.float()
        for dim, ((low, high), size) in enumerate(zip(region, self.block, strict=True)):
            first = low // size * size
            scales = scales.repeat_interleave(size, dim).narrow(dim, low - first, high - low)
        return scales
