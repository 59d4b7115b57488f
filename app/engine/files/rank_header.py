"""Header of a rank file: what `safe_open` and the loading ranks rely on.

`app.engine.checkpoint.tensor_file` says how it lies in the file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from app.engine.files.checked import (
    FieldError,
    fields,
    inside,
    list_of,
    map_of,
    one_of,
    parse_strictly,
    text,
    tuple_of,
    whole,
)
from app.engine.files.manifest import check_cursor
from app.engine.files.names import (
    CURSOR,
    IMPORTED,
    MAIN,
    RANDOM_CPU,
    RANDOM_CUDA,
    SCALES,
    bias_name,
    part_name,
    scales_name,
)

METADATA = "__metadata__"
LENGTH = 8  # bytes before the header, which hold its length
LONGEST = 100_000_000  # bytes of a header that the safetensors library reads
BYTES = {"F32": 4, "BF16": 2, "F16": 2, "I64": 8, "U8": 1}  # by the format's names of types
FLOATS = ("F32", "BF16", "F16")
RANDOM_BYTES = 5056  # of torch's state on the CPU
CUDA_BYTES = 16  # and on a GPU
Json = dict[str, Any]

_TENSOR = fields(
    {
        "dtype": one_of(*BYTES),
        "shape": list_of(whole()),
        "data_offsets": tuple_of(whole(), whole()),
    }
)
_METADATA = fields({CURSOR: text}, format=text)


def read_header(path: Path) -> Json:
    """Return a file's header. Raises ValueError and OSError."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(LENGTH), "little")
        if size < LENGTH or length > min(size - LENGTH, LONGEST):
            raise ValueError(f"has {size} bytes, and its header does not fit in these")
        header: Json = parse_strictly(file.read(length))
    map_of(lambda field, value: None)("header", header)
    for name, entry in header.items():
        (_METADATA if name == METADATA else _TENSOR)(name, entry)
    _check_offsets(
        {name: entry for name, entry in header.items() if name != METADATA}, size - LENGTH - length
    )
    return header


def _check_offsets(tensors: Mapping[str, Json], size: int) -> None:
    """Check that the tensors' bytes lie one after the other, up to the end of the file."""
    reached = 0
    for name, entry in sorted(tensors.items(), key=lambda each: each[1]["data_offsets"]):
        begin, end = entry["data_offsets"]
        needed = prod(entry["shape"]) * BYTES[entry["dtype"]]
        if (begin, end) != (reached, reached + needed):
            must = f"[{reached}, {reached + needed}]"
            raise FieldError(inside(name, "data_offsets"), [begin, end], must)
        reached = end
    if reached != size:
        raise ValueError(f"has {size} bytes of tensors, and its header describes {reached}")


def check_header(header: Json, manifest: Json, rank: int, held: Mapping[str, int]) -> None:
    """Check that a rank's file has what the manifest says, and nothing else. Raises ValueError.

    `held` is the rank's entry of `held_parts`.
    """
    if METADATA not in header or CURSOR not in header[METADATA]:
        raise FieldError("", None, f"complete, and has no {METADATA}.{CURSOR}")
    try:
        check_cursor(parse_strictly(header[METADATA][CURSOR].encode()))
    except ValueError as error:
        raise ValueError(f"{CURSOR} of {METADATA}: {error}") from None
    wanted = _wanted(manifest, rank, held)
    for name, (shape, dtypes) in wanted.items():
        if name not in header:
            raise FieldError("", None, f"complete, and has no {name}")
        _check_tensor(name, header[name], shape, dtypes=dtypes)
    routers = set(map(bias_name, manifest["routers"]))
    scales = set(map(scales_name, manifest.get(SCALES, {})))
    for name in header.keys() - wanted.keys() - {METADATA}:
        if name in routers | scales:
            _check_tensor(name, header[name], None, dtypes=("F32",))
        elif name == RANDOM_CUDA:
            _check_tensor(name, header[name], [CUDA_BYTES], dtypes=("U8",))
        elif (parameter := name.rpartition(".")[0]) in held and IMPORTED not in manifest:
            dtypes = ("F32",) if name.endswith(".main") else ("F32", "BF16")
            _check_tensor(name, header[name], [held[parameter]], dtypes=dtypes)
        else:
            raise FieldError(name, header[name], "left out: the manifest has no such tensor")


def held_parts(manifest: Json) -> dict[int, dict[str, int]]:
    """Return, by rank, the parameters of which it has a part, and its elements."""
    found: dict[int, dict[str, int]] = {}
    for name, entry in manifest["parts"].items():
        for rank, _, _, part in entry["held"]:
            found.setdefault(rank, {})[name] = part[1] - part[0]
    return found


Wanted = tuple[list[int] | None, tuple[str, ...]]  # shape (None: any), and types of a tensor


def _wanted(manifest: Json, rank: int, held: Mapping[str, int]) -> dict[str, Wanted]:
    """Return the tensors that a rank's file must have."""
    wanted: dict[str, Wanted] = {
        part_name(name, MAIN): ([elements], FLOATS) for name, elements in held.items()
    }
    for name, holder in manifest["routers"].items():
        if holder == rank:
            wanted[bias_name(name)] = (None, ("F32",))
    for name, holder in manifest.get(SCALES, {}).items():
        if holder == rank:
            wanted[scales_name(name)] = (None, ("F32",))
    if IMPORTED not in manifest:
        wanted[RANDOM_CPU] = ([RANDOM_BYTES], ("U8",))
    return wanted


def _check_tensor(
    name: str, entry: Json, shape: list[int] | None, *, dtypes: tuple[str, ...]
) -> None:
    one_of(*dtypes)(inside(name, "dtype"), entry["dtype"])
    if shape is not None and entry["shape"] != shape:
        raise FieldError(inside(name, "shape"), entry["shape"], str(shape))
