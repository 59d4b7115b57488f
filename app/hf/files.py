"""Weights of a folder of safetensors files, or else of `pytorch_model.bin`, read by region.

Only the requested region of a memory-mapped file is copied, so a rank needs no memory beyond its
weights and the part being read. Weights in FP8, with a scale per block, row or tensor, and in MXFP4
are dequantized.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from app.errors import ConfigError
from app.hf import fp8, mxfp4
from app.hf.file_names import INDEX, ONE_FILE, PICKLE, PICKLE_INDEX
from app.hf.pickles import PickledTensors, PickleFault
from app.hf.quantisation import MXFP4, SECTION, Quantisation
from app.hf.wrapped import plain_name

WEIGHTS = (".safetensors", ".gguf", ".pth")  # suffixes of weight files, for a message
LFS = b"version https://git-lfs"
FP8 = "F8_E4M3"
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
READABLE = (*DTYPES, FP8)
SCALES = "_scale_inv", "_scale"  # suffixes of the tensor with the scales of an FP8 weight
# scales of quantised activations, keys and values, which are not quantised here
ACTIVATIONS = re.compile(r"\.(input_scale|activation_scale|output_scale|[kv]_scale)$")
Region = tuple[tuple[int, int], ...]  # (start, stop) for each dimension


class TensorFiles:
    """Weights of a model's folder by name; `key` is the option that names the folder, for messages.

    Every method raises ConfigError if a tensor or file is missing, broken, or of the wrong type or
    shape.
    """

    def __init__(self, folder: Path, key: str, quantised: Quantisation | None = None) -> None:
        self.folder = folder
        self.key = key
        self.quantised = quantised
        self.index = INDEX
        self._opened: dict[str, safe_open | PickledTensors] = {}
        self._known: dict[str, frozenset[str]] = {}  # opened file -> its tensors
        self._names: dict[str, str] = {}  # tensor -> its name in the file, where that differs
        self._stored: dict[str, str] = {}  # tensor -> file
        self._stored |= self._listed()
        self._scale_of = {  # FP8 weight -> its scales
            weight: name
            for suffix in reversed(SCALES)
            for name in self._stored
            if name.endswith(suffix) and (weight := name.removesuffix(suffix)) in self._stored
        }
        blocks = (name for name in self._stored if name.endswith(mxfp4.BLOCKS))
        packed = {name.removesuffix(mxfp4.BLOCKS): name for name in blocks}
        self._packed = {each: name for each, name in packed.items() if each not in self._stored}
        beside = {*self._scale_of.values(), *self._packed.values()}
        beside |= {each + mxfp4.SCALES for each in self._packed}
        files = {name: file for name, file in self._stored.items() if name not in beside}
        files |= {each: self._stored[name] for each, name in self._packed.items()}
        # scales of activations
        self.left_out = {name for name in files if quantised and ACTIVATIONS.search(name)}
        self.file_of = files  # weight -> file

    def refusal(self, what: str, advice: str | None = None) -> ConfigError:
        """Return the error that says what is wrong with the files."""
        return ConfigError(self.key, self.folder, what, advice=advice)

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Refuse a weight that has another shape, or a type that weights cannot have."""
        if self.quantised and not (self._packed or self._scale_of):
            what = f"has {SECTION} in config.json, and no weight is quantised"
            raise self.refusal(what, f"take {SECTION} out of it if that is right")
        if name in self._packed:
            self._check_packed(name, shape)
            return
        kind = self._checked(name, [*shape], READABLE)
        if kind == FP8:
            self._check_scales(name, shape)
        elif name in self._scale_of:
            short = self._scale_of[name].rpartition(".")[2]
            raise self._refused(name, f"is of type {kind}, and has a {short} as weights of {FP8}")

    def dtype(self, name: str) -> torch.dtype:
        """Return a weight's type; bfloat16 if it is quantised, as other programs convert it."""
        stored = self._packed.get(name, name)
        return DTYPES.get(self._slice(stored).get_dtype(), torch.bfloat16)

    def read(self, name: str, region: Region) -> Tensor:
        """Read a region of a checked weight into host memory: as in the file, FP8 as fp32, MXFP4 as
        bf16.
        """
        if name in self._packed:
            around = mxfp4.blocks_of(region)
            blocks = self._part(self._packed[name], (*around, (0, mxfp4.BYTES)))
            scales = self._part(name + mxfp4.SCALES, around)
            return mxfp4.dequantised(blocks, scales, region[1])
        part = self._part(name, region)
        return part if part.dtype != torch.float8_e4m3fn else self._scaled(part, name, region)

    def _part(self, name: str, region: Region) -> Tensor:
        try:
            part = self._slice(name)[tuple(slice(*bounds) for bounds in region)]
        except (SafetensorError, OSError, ValueError) as error:
            raise self._refused(name, f"cannot be read: {error}") from None
        assert isinstance(part, Tensor)
        return part

    def _checked(self, name: str, shape: list[int], kinds: Sequence[str]) -> str:
        """Return the type of a tensor that has this shape and one of these types."""
        found = self._slice(name)
        if (have := list(found.get_shape())) != shape:
            raise self._refused(name, f"has the shape {have} instead of {shape}")
        kind: str = found.get_dtype()
        if kind not in kinds:
            raise self._refused(name, f"is of type {kind}, not {', '.join(kinds)}")
        return kind

    def _listed(self) -> dict[str, str]:
        """Return tensor -> file, from the single file or else the index, like `transformers`."""
        for one, self.index in (ONE_FILE, INDEX), (PICKLE, PICKLE_INDEX):
            if (self.folder / one).is_file():
                return dict.fromkeys(sorted(self._tensors(one)), one)
            if (self.folder / self.index).is_file():
                return self._indexed()
        others = sorted(each.name for each in self.folder.glob("*") if each.suffix in WEIGHTS)
        beside = f", but {others[0]}" if others else ""
        raise self.refusal(f"has neither {ONE_FILE} nor {INDEX}{beside}")

    def _indexed(self) -> dict[str, str]:
        try:
            index = json.loads((self.folder / self.index).read_text(encoding="utf-8"))
            listed = index["weight_map"]
            assert isinstance(listed, dict)
        except (OSError, ValueError, KeyError, TypeError, AssertionError):
            raise self.refusal(f"{self.index} cannot be read, or has no weight_map") from None
        for name, file in listed.items():
            if not isinstance(file, str) or Path(file).name != file:
                what = f"{name} is said to be in {file!r}, no file beside it"
                raise self.refusal(f"{self.index}: {what}")
        for file in sorted(set(listed.values())):
            if not (self.folder / file).is_file():
                first = next(name for name, place in listed.items() if place == file)
                raise self.refusal(f"{file} is missing, which has {first}")
        return {self._named(name): file for name, file in listed.items()}

    def _named(self, stored: str) -> str:
        """Return the name of a tensor, which files of text and images have another one for."""
        if (name := plain_name(stored)) != stored:
            self._names[name] = stored
        return name

    def _open(self, file: str) -> safe_open | PickledTensors:
        if file not in self._opened:
            path = self.folder / file
            pickled = self.index == PICKLE_INDEX
            try:
                self._opened[file] = PickledTensors(path) if pickled else safe_open(path, "pt")
            except (SafetensorError, PickleFault, OSError) as error:
                raise self.refusal(f"{file} {self._fault(file, error)}") from None
        return self._opened[file]

    def _fault(self, file: str, error: Exception) -> str:
        with suppress(OSError), (self.folder / file).open("rb") as opened:
            if opened.read(len(LFS)) == LFS:
                return "is a pointer of git-lfs in the place of the file; git lfs pull brings it"
        if isinstance(error, PickleFault):
            return str(error)
        return f"is truncated or no safetensors file: {error}"

    def _tensors(self, file: str) -> frozenset[str]:
        if file not in self._known:
            found = frozenset(map(self._named, self._open(file).keys()))
            for name in sorted(found & self._stored.keys()):
                if (other := self._stored[name]) != file:
                    raise self.refusal(f"{name} is in {file}, and {self.index} says in {other}")
            self._known[file] = found
        return self._known[file]

    def _slice(self, name: str) -> Any:
        file = self._stored[name]
        if name not in self._tensors(file):
            raise self.refusal(f"{self.index} names {file} for {name}, which is not in it")
        return self._open(file).get_slice(self._names.get(name, name))

    def _refused(self, name: str, what: str) -> ConfigError:
        return self.refusal(f"{self._stored[name]}: {name} {what}")

    def _check_packed(self, name: str, shape: tuple[int, ...]) -> None:
        blocks = self._packed[name]
        if self.quantised is None or self.quantised.method != MXFP4:
            raise self._refused(blocks, f"is of MXFP4 without {SECTION} of {MXFP4} in config.json")
        if (scales := name + mxfp4.SCALES) not in self._stored:
            raise self._refused(blocks, f"is without {scales.rpartition('.')[2]}")
        if not mxfp4.fits(shape):
            raise self._refused(blocks, f"cannot hold a weight of the shape {list(shape)}")
        for each, want in zip((blocks, scales), mxfp4.shapes(shape), strict=True):
            self._checked(each, want, ("U8",))

    def _check_scales(self, name: str, shape: tuple[int, ...]) -> None:
        if name not in self._scale_of:
            short = f"{name.rpartition('.')[2]}{SCALES[0]}"
            raise self._refused(name, f"is of type {FP8} without {short}")
        if self.quantised is None or not self.quantised.extents or len(shape) != 2:
            raise self._refused(name, f"is of type {FP8} without a block size in config.json")
        scales, extents = self._scale_of[name], self.quantised.extents
        have: list[int] = list(self._slice(scales).get_shape())
        fits = fp8.extent_of(have, shape, extents) is not None
        want = have if fits else fp8.scales_shapes(shape, extents[0])[0]
        self._checked(scales, want, [*DTYPES])

    def _scaled(self, part: Tensor, name: str, region: Region) -> Tensor:
        """Return a checked FP8 weight's region times its scales."""
        assert self.quantised is not None
        found = self._slice(self._scale_of[name])
        have, shape = found.get_shape(), self._slice(name).get_shape()
        extent = fp8.extent_of(have, shape, self.quantised.extents)
        assert extent is not None
        around = fp8.scales_of(region, extent)[: len(have)]  # a tensor's scale may be a number
        return fp8.scaled(part, self._part(self._scale_of[name], around), region, extent)
