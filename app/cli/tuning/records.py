"""Record of measured combinations: a JSONL file that an interrupted search reads again."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from app.errors import ConfigError
from app.own_files import open_own, write_whole

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


def read_record(path: Path, head: Sequence[str]) -> dict[str, Measurement]:
    """Return what a record holds, by key; begin the record if there is none.

    head: what its measurements are of. Raises ConfigError for a record of something else, and for a
    line that cannot be read; a last line without its end is left out, and cut off the file.
    """
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps({"of": list(head)}) + "\n")
        return {}
    text = path.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        write_whole(path, whole)
    first, *rows = whole.splitlines() or ["{}"]
    of = _values(path, 1, first).get("of") or ["something else"]
    if of != list(head):
        rule = f"holds measurements of {' '.join(of)}"
        raise ConfigError("out", path.parent, rule, advice="choose another folder")
    found: dict[str, Measurement] = {}
    for number, row in enumerate(rows, 2):
        values = _values(path, number, row)
        try:
            values |= {"state": State(values["state"]), "steps_ms": tuple(values["steps_ms"])}
            each = Measurement(**values)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError("out", path, f"line {number} is no measurement") from error
        # several ranks may tell why one has failed: out of memory is the reason of others
        if each.key not in found or each.state is State.no_memory:
            found[each.key] = each
    return found


def _values(path: Path, number: int, row: str) -> dict[str, Any]:
    try:
        values = json.loads(row)
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise ConfigError("out", path, f"line {number} is no JSON object")
    return values
