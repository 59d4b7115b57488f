"""A field of a checkpoint is changed at random, with sums that fit: it is refused in one line."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.engine.checkpoint.load import Progress
from app.engine.checkpoint.synced import write_synced
from app.engine.files.checkpoints import CHECKPOINTS, MANIFEST, manifest_digest, read_whole_manifest
from app.engine.files.names import CURSOR
from app.engine.files.rank_header import LENGTH, METADATA
from app.errors import ConfigError
from tests.cases import chosen
from tests.checkpoints import save_checkpoint, verify_checkpoint
from tests.distributed import run_distributed
from tests.runs import TINY, engine_of, make_run

FILE = "rank-00000.safetensors"
BAD: tuple[Any, ...] = (
    None, True, -1, 0.5, 2**60, 2**80, -(2**70), "x", "../x", "/x", "", [], {}, [[]], {"x": 1},
    [-1, 2], "\ud800", "nan", 10**400,
)  # fmt: skip
SEEDS = range(100)
MUTATIONS = 30  # of a seed


def save(rank: int, folder: Path) -> None:
    run = make_run(TINY)
    cursor = {"sequences": 8, "stream": None}
    save_checkpoint(folder, engine_of(run, rank), run, progress=Progress(3, 3, 9), cursor=cursor)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / CHECKPOINTS
    run_distributed(save, 1, folder)
    return folder / "step-00000003"


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every field."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for key, each in inner:
        yield (*path, key)
        if isinstance(each, dict | list):
            yield from places(each, (*path, key))


def mutated(value: Any, draw: random.Random, bad: tuple[Any, ...] = BAD) -> tuple[Any, str]:
    """Return the value with one field changed, taken away, or added; and what was done."""
    changed = copy.deepcopy(value)
    path = draw.choice([path for path in places(value) if path[-1] not in ("sha256", "name")])
    above = changed
    for name in path[:-1]:
        above = above[name]
    match draw.randrange(4):
        case 0 if isinstance(above, dict):
            del above[path[-1]]
            return changed, f"{path} is missing"
        case 1 if isinstance(above, dict):
            above["added"] = draw.choice(bad)
            return changed, f"{path[:-1]} has an added field {above['added']!r}"
    above[path[-1]] = draw.choice(bad)
    return changed, f"{path} is {above[path[-1]]!r}"


def with_sums(checkpoint: Path, manifest: dict[str, Any], content: bytes) -> None:
    written = write_synced(checkpoint / FILE, lambda file: file.write(content))
    if isinstance(files := manifest.get("files"), dict) and isinstance(files.get(FILE), dict):
        files[FILE] |= {key: each for key, each in written.items() if key in files[FILE]}
    manifest["sha256"] = manifest_digest(manifest)
    (checkpoint / MANIFEST).write_text(json.dumps(manifest))


def outcome(checkpoint: Path) -> dict[str, Any] | str:
    """The manifest, or the one line that refuses it."""
    try:
        return read_whole_manifest(checkpoint) and verify_checkpoint(checkpoint)
    except ConfigError as error:
        assert "\n" not in str(error) and error.key == "resume"
        return str(error)


def split(content: bytes) -> tuple[dict[str, Any], bytes]:
    length = LENGTH + int.from_bytes(content[:LENGTH], "little")
    return json.loads(content[LENGTH:length]), content[length:]


def with_header(header: object, data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(LENGTH, "little") + text + data


@pytest.mark.parametrize("seed", chosen(list(SEEDS), [0]))
def test_changed_fields_are_refused_or_do_not_matter(seed: int, checkpoint: Path):
    """What is accepted has the values that the manifest then gives, and loses no weight."""
    draw = random.Random(seed)
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    content = (checkpoint / FILE).read_bytes()
    header, data = split(content)
    try:
        for number in range(MUTATIONS):
            other, forged = manifest, content
            if number % 3:
                other, what = mutated(manifest, draw)
            else:
                changed, what = mutated(header, draw)
                forged = with_header(changed, data)
                other = copy.deepcopy(manifest)
            with_sums(checkpoint, other, forged)
            found = outcome(checkpoint)
            if isinstance(found, dict):
                assert number % 3, f"the header is accepted, where {what}"
                kept = ("parts", "routers", "files", "layout", "format")
                assert all(found[key] == manifest[key] for key in kept), what
    finally:
        with_sums(checkpoint, copy.deepcopy(manifest), content)


FORGED: dict[str, Any] = {
    "files={}": lambda m: m.update(files={}),
    "step=-1": lambda m: m.update(step=-1),
    "step=true": lambda m: m.update(step=True),
    "tokens=9.0": lambda m: m.update(tokens=9.0),
    "files.../x": lambda m: m["files"].update({"../x": m["files"][FILE]}),
    "other=1": lambda m: m.update(other=1),
    "layout.world_size=2": lambda m: m["layout"].update(world_size=2),
    "config.train.seq_len=\"long\"": lambda m: m["config"]["train"].update(seq_len="long"),
}  # fmt: skip


def test_forged_manifests_name_the_field(checkpoint: Path):
    manifest, content = json.loads((checkpoint / MANIFEST).read_text()), b""
    content = (checkpoint / FILE).read_bytes()
    for says, forge in FORGED.items():
        other = copy.deepcopy(manifest)
        forge(other)
        with_sums(checkpoint, other, content)
        found = outcome(checkpoint)
        assert isinstance(found, str) and MANIFEST in found, says
        assert says.split("{")[0].rstrip("=") in found
    with_sums(checkpoint, manifest, content)
    assert isinstance(outcome(checkpoint), dict)


ODD_JSON = {
    "duplicate": b'{"format": 3, "format": 3}',
    "not finite": b'{"format": NaN}',
    "too large": b'{"format": 1e999}',
    "deep": b"[" * 100_000,
    "not UTF-8": b'{"\xff": 3}',
    "empty": b"",
}


def test_odd_json_is_refused_in_one_line(checkpoint: Path, tmp_path: Path):
    before = (checkpoint / MANIFEST).read_bytes()
    for text in ODD_JSON.values():
        (checkpoint / MANIFEST).write_bytes(text)
        assert isinstance(outcome(checkpoint), str)
    (checkpoint / MANIFEST).write_bytes(before)


def test_cursors_that_are_not_positions_are_refused(checkpoint: Path):
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    content = (checkpoint / FILE).read_bytes()
    header, data = split(content)
    for text in ("{", "[]", "{}", '{"sequences": -1}', '{"sequences": 8, "stream": {"rank": 0}}'):
        other = copy.deepcopy(header)
        other[METADATA][CURSOR] = text
        with_sums(checkpoint, copy.deepcopy(manifest), with_header(other, data))
        found = outcome(checkpoint)
        assert isinstance(found, str) and FILE in found and CURSOR in found
    with_sums(checkpoint, copy.deepcopy(manifest), content)
