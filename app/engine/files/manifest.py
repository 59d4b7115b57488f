"""Schema of a checkpoint's manifest, and of the data cursor in its rank files."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterable, Mapping
from enum import Enum
from functools import partial
from itertools import combinations, pairwise
from math import prod
from typing import Any

from app.config import Run
from app.config.sources import SourceConfig
from app.engine.files.checked import (
    FieldError,
    Kind,
    anything,
    boolean,
    by_fields,
    digest,
    fields,
    inside,
    list_of,
    map_of,
    nullable,
    number,
    one_of,
    text,
    tuple_of,
    whole,
)
from app.engine.files.names import IMPORTED, LEFT_OUT, SCALES, rank_file
from app.plan.formatting import count_of
from app.version import VERSION

Json = dict[str, Any]
FORMAT = 3  # of the files; others are refused
END = "end_of_document"  # key of the data record
# fields of the configuration that are read, by section; of an imported model
NEEDS = {"model": (), "data": ("tokenizer",), "precision": ("params",), "train": ("seq_len",)}
IMPORTED_NEEDS = {"model": NEEDS["model"]}
SOURCE_NEEDS = ("label", "weight", "after_end", "path", "name")
MOST_ELEMENTS = 2**53  # of a parameter
count, positive, integer = whole(), whole(1), whole(-(2**53))

# Data cursor. A stream's own state is the library's.
_PLACE = fields(
    {"epoch": count, "block": count, "used": count, "source": nullable(map_of(anything))}
)
_LANE = fields({"used": count, "place": _PLACE, "leftover": list_of(count)})
_LANES = fields(
    {"block": nullable(positive), "due": list_of(count), "lanes": list_of(nullable(_LANE))}
)
# of an earlier version, in which every rank had a part of its own
_OWN_PART = fields({"dp_rank": count, "place": _PLACE, "leftover": list_of(count)}, dp=positive)
_STREAM = by_fields({"place": _OWN_PART}, _LANES)
_SOURCE = fields(
    {
        "used": count, "rate": positive, "credit": integer, "ended": boolean,
        "stream": nullable(_STREAM),
    }
)  # fmt: skip
_BLEND = fields({"sources": map_of(_SOURCE)})
_CURSOR = fields({"sequences": count}, stream=nullable(by_fields({"sources": _BLEND}, _STREAM)))

_RECORD = {
    "count": count, "bytes": count, "sum": text, "revision": nullable(text),
    "tokenizer": nullable(text), "files": nullable(list_of(tuple_of(text, count, text))),
}  # fmt: skip
_ONE_SOURCE = fields(_RECORD, exact=boolean)
_HELD = tuple_of(count, list_of(count), list_of(count), tuple_of(count, count))
_DEGREES = dict.fromkeys(("tp", "cp", "dp", "pp", "etp", "ep", "edp"), positive)
_MANIFEST = fields(
    {
        "format": one_of(FORMAT),
        "step": count,  # steps taken
        "updates": count,
        "tokens": count,
        "layout": fields({"world_size": positive}, **_DEGREES),
        "loss_scale": nullable(
            fields({"scale": number(2.0**-126), "clean": count, "tolerated": integer})
        ),
        "config": map_of(anything),
        "files": map_of(fields({"bytes": count, "sha256": digest(64), "dp_rank": count})),
        # parameter -> shape, and [rank, block's start, block's stop, part of the flat block]
        "parts": map_of(fields({"shape": list_of(positive), "held": list_of(_HELD)})),
        "routers": map_of(count),  # router -> rank whose file has its bias
        "sha256": digest(64),
    },
    **{
        "time": number(0),
        "data": nullable(
            fields(_RECORD, exact=boolean, parts=map_of(_ONE_SOURCE), **{END: text})
        ),
        VERSION: fields(
            {"version": text, "commit": nullable(text), "dirty": nullable(boolean)}
        ),
        IMPORTED: one_of("float32", "bfloat16", "float16"),
        SCALES: map_of(count),
        LEFT_OUT: map_of(whole(0, 2**64 - 1)),
    },
)  # fmt: skip


def check_manifest(manifest: Json) -> None:
    """Check every field but the configuration. Raises FieldError."""
    _MANIFEST("", manifest)
    if manifest["updates"] > manifest["step"]:
        raise FieldError("updates", manifest["updates"], f"at most step={manifest['step']}")
    layout = manifest["layout"]
    world = layout["world_size"]
    replicas = layout.get("dp", world)
    if IMPORTED not in manifest:
        fields({"world_size": positive, **_DEGREES})("layout", layout)
        degrees = prod(layout[name] for name in ("tp", "cp", "dp", "pp"))
        if degrees != world:
            raise FieldError("layout.world_size", world, f"tp·cp·dp·pp, {degrees}")
    _check_files(manifest["files"], world, replicas)
    for section in ("routers", SCALES):
        for name, rank in manifest.get(section, {}).items():
            whole(0, world - 1)(inside(section, name), rank)
    for name, entry in manifest["parts"].items():
        _check_part(inside("parts", name), entry, world)
        if name in manifest.get(LEFT_OUT, {}):
            raise FieldError(inside(LEFT_OUT, name), 0, "left out: `parts` has this weight")


def _check_files(files: Mapping[str, Json], world: int, replicas: int) -> None:
    """Check that every rank's file is listed, and no other one."""
    if missing := next((name for name in map(rank_file, range(world)) if name not in files), None):
        raise FieldError("", None, f"complete, and files has no {missing}")
    wanted = set(map(rank_file, range(world)))
    for name, entry in files.items():
        if name not in wanted:
            must = f"left out: the files of {count_of(world, 'rank')} are rank-00000.safetensors …"
            raise FieldError(inside("files", name), entry, must)
        whole(0, replicas - 1)(f"files.{name}.dp_rank", entry["dp_rank"])
    if [*files] != [rank_file(rank) for rank in range(world)]:
        raise FieldError("files", [*files], "in the order of ranks")


def _check_part(field: str, entry: Json, world: int) -> None:
    """Check that ranks hold every element of a parameter once."""
    shape = entry["shape"]
    if prod(shape) > MOST_ELEMENTS:
        raise FieldError(f"{field}.shape", shape, "of at most 2^53 elements")
    held: dict[tuple[tuple[int, int], ...], list[tuple[int, int]]] = {}
    ranks = [rank for rank, *_ in entry["held"]]
    if len(set(ranks)) < len(ranks):
        raise FieldError(f"{field}.held", entry["held"], "one part of each rank")
    for place, (rank, start, stop, (first, last)) in enumerate(entry["held"]):
        where = f"{field}.held[{place}]"
        whole(0, world - 1)(f"{where}[0]", rank)
        if not len(start) == len(stop) == len(shape):
            raise FieldError(where, [start, stop], f"a block of {len(shape)} dimensions")
        spans = tuple(zip(start, stop, strict=True))
        if any(not low <= high <= most for (low, high), most in zip(spans, shape, strict=True)):
            raise FieldError(where, [start, stop], f"a block of the shape {shape}")
        elements = prod(high - low for low, high in spans)
        if not first <= last <= elements:
            raise FieldError(f"{where}[3]", [first, last], f"a range of {elements} elements")
        held.setdefault(spans, []).append((first, last))
    blocks = [spans for spans in held if all(low < high for low, high in spans)]
    tiled = all(_tiles(held[spans], prod(high - low for low, high in spans)) for spans in blocks)
    total = sum(prod(high - low for low, high in spans) for spans in blocks)
    if not tiled or total != prod(shape) or not _apart(blocks):
        must = f"every element of the shape {shape} once"
        raise FieldError(f"{field}.held", entry["held"], must)


def _tiles(parts: Iterable[tuple[int, int]], end: int) -> bool:
    """Return whether ranges cover [0, end) once."""
    reached = 0
    for first, last in sorted(parts):
        if first != reached and first != last:
            return False
        reached = max(reached, last)
    return reached == end


def _apart(blocks: list[tuple[tuple[int, int], ...]]) -> bool:
    """Return whether blocks share no element.

    Blocks of a grid, as layouts make them, are told by the spans of each dimension: distinct blocks
    are apart if no two of these overlap.
    """
    if all(_disjoint(sorted(set(spans))) for spans in zip(*blocks, strict=True)):
        return True
    return not any(
        all(max(a[0], b[0]) < min(a[1], b[1]) for a, b in zip(one, other, strict=True))
        for one, other in combinations(blocks, 2)
    )


def _disjoint(spans: list[tuple[int, int]]) -> bool:
    return all(one[1] <= other[0] for one, other in pairwise(spans))


def check_config(config: Json, imported: bool) -> None:
    """Check the configuration, by present names, against the types of app.config. Keys that are not
    known were of other versions. Raises FieldError.
    """
    for section, names in (IMPORTED_NEEDS if imported else NEEDS).items():
        map_of(anything)(inside("config", section), config.get(section))
        for name in names:
            if name not in config[section]:
                raise FieldError("", None, f"complete, and has no config.{section}.{name}")
    for name, kind in typing.get_type_hints(Run).items():
        if name in config:
            _check_plain(kind, inside("config", name), config[name])
    data = config.get("data", {})
    for name in {"sources", "validation"} & data.keys():
        field = f"config.data.{name}"
        _check_plain(tuple[SourceConfig, ...], field, data[name])
        for place, each in enumerate(data[name]):
            if missing := [needed for needed in SOURCE_NEEDS if needed not in each]:
                raise FieldError(f"{field}[{place}]", each, f"complete, and has no {missing[0]}")


def _check_plain(kind: Any, field: str, value: Any) -> None:
    """Check that a value is of a type of app.config. Raises FieldError."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        (kind,) = (each for each in inner if each is not types.NoneType)
        if value is not None:
            _check_plain(kind, field, value)
    elif origin is tuple:
        list_of(partial(_check_plain, inner[0]))(field, value)
    elif isinstance(kind, type) and dataclasses.is_dataclass(kind):
        map_of(anything)(field, value)
        for name, each in typing.get_type_hints(kind).items():
            if name in value:
                _check_plain(each, inside(field, name), value[name])
    elif isinstance(kind, type) and issubclass(kind, Enum):
        one_of(*(each.value for each in kind))(field, value)
    else:
        _LEAVES.get(kind, anything)(field, value)


_LEAVES: dict[Any, Kind] = {
    int: integer, str: text, bool: boolean, float: number(-(2.0**53)),
}  # fmt: skip


def check_cursor(cursor: Any) -> None:
    """Check a data cursor. Raises FieldError."""
    _CURSOR("", cursor)
    stream = cursor.get("stream") or {}
    sources = stream.get("sources", {})
    credits = {label: each["credit"] for label, each in sources.items() if not each["ended"]}
    if sum(credits.values()):
        raise FieldError("stream.sources", credits, "of credits that add up to 0")
    for each in (stream, *(each["stream"] or {} for each in sources.values())):
        if "lanes" in each and len(each["lanes"]) != len(each["due"]):
            raise FieldError("stream.due", each["due"], f"a list of {len(each['lanes'])}")
