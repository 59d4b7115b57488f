"""Record of measured combinations: a JSONL file that an interrupted search reads again."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from app.engine.files.checked import (
    FieldError,
    fields,
    list_of,
    nullable,
    number,
    one_of,
    text,
    unreadable,
)
from app.errors import ConfigError
from app.own_files import open_own, read_regular, write_whole

RECORD = "measured.jsonl"


class State(Enum):
    """End of a measurement."""

    measured = "measured"
    refused = "refused"  # by a rule that only the host reveals
    no_memory = "out of memory"
    failed = "failed"
    timed_out = "timed out"


@dataclass(frozen=True, slots=True)
class Measurement:
    """One measured combination, or why it has no time."""

    key: str  # of the combination
    state: State
    reason: str | None = None  # None if measured
    step_ms: float | None = None  # median of the steps; None if not measured
    steps_ms: tuple[float, ...] = ()
    peak_gib: float | None = None  # tensors of the rank with most; None on the CPU

    def line(self) -> str:
        """Return it as a line of the record."""
        return json.dumps(asdict(self) | {"state": self.state.value}) + "\n"

    def append(self, path: Path) -> None:
        """Append it to a record, as one write, so that lines of several ranks stay whole."""
        file = open_own(path, append=True)
        try:
            os.write(file, self.line().encode())
        finally:
            os.close(file)


_TIME = number(0)
_MEASUREMENT = fields(
    {"key": text, "state": one_of(*(state.value for state in State)), "steps_ms": list_of(_TIME)},
    reason=nullable(text),
    step_ms=nullable(_TIME),
    peak_gib=nullable(_TIME),
)


def read_record(path: Path, head: Sequence[str]) -> dict[str, Measurement]:
    """Return what a record holds, by key; begin the record if there is none.

    head: what its measurements are of. Raises ConfigError for a record of something else, and for a
    line that cannot be read; a last line without its end is left out, and cut off the file.
    """
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps({"of": list(head)}) + "\n")
        return {}
    try:
        content = read_regular(path)
    except OSError as error:
        raise unreadable(path, error, "choose another folder") from error
    kept = content[: content.rfind(b"\n") + 1]
    if kept != content:
        write_whole(path, kept)
    first, *rows = kept.splitlines() or [b"{}"]
    of = _values(path, 1, first).get("of")
    if of != list(head):
        told = " ".join(map(str, of)) if isinstance(of, list) and of else "something else"
        rule = f"holds measurements of {told}"
        raise ConfigError("out", path.parent, rule, advice="choose another folder")
    found: dict[str, Measurement] = {}
    for line, row in enumerate(rows, 2):
        values = _values(path, line, row)
        try:
            _MEASUREMENT("", values)
        except FieldError as error:
            raise ConfigError("out", path, f"line {line} is no measurement") from error
        values |= {"state": State(values["state"]), "steps_ms": tuple(values["steps_ms"])}
        each = Measurement(**values)
        # several ranks may tell why one has failed: out of memory is the reason of others
        if each.key not in found or each.state is State.no_memory:
            found[each.key] = each
    return found


def _values(path: Path, line: int, row: bytes) -> dict[str, Any]:
    try:
        values = json.loads(row)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise ConfigError("out", path, f"line {line} is no JSON object")
    return values
