"""Lines of metrics.jsonl: one report each, in strict JSON, which has no NaN or Infinity."""

from __future__ import annotations

import json
from math import isfinite
from typing import Any

from app.engine.files.checked import LARGEST

NOT_FINITE = "not_finite"  # key of a line: metrics that are null there -> "NaN", "Infinity", …
MOST = 1e100  # largest number accepted: matplotlib fails on ranges beyond float64
SPELLED = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}  # Python's names -> JSON text
RATE = "tokens_per_s"  # present in every step's report, with `loss`


class BadLineError(ValueError):
    """Line that is not a valid report; the text says why."""


def line_of(metrics: dict[str, Any]) -> str:
    """Return the line of a report, with its newline.

    A non-finite number becomes null, and `not_finite` records which it was.
    """
    odd = {
        key: SPELLED[str(value)]
        for key, value in metrics.items()
        if isinstance(value, float) and not isfinite(value)
    }
    row = metrics | dict.fromkeys(odd) | ({NOT_FINITE: odd} if odd else {})
    return json.dumps(row, allow_nan=False) + "\n"


def row_of(line: str | bytes) -> dict[str, Any]:
    """Return the report of a line, with non-finite numbers restored.

    Also reads lines of earlier versions, which have bare NaN and Infinity, and rows with neither a
    loss nor a val_loss, which readers skip. Raises BadLineError.
    """
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        raise BadLineError("no JSON") from None
    if not isinstance(row, dict):
        raise BadLineError("no object")
    _restore(row, row.pop(NOT_FINITE, None))
    for key, value in row.items():
        if not _is_number(value):
            raise BadLineError(f"{key} is no number")
    if not isinstance(row.get("step"), int) or not 0 <= row["step"] <= LARGEST:
        raise BadLineError("step is no whole number")
    if "loss" in row and RATE not in row:
        raise BadLineError(f"{RATE} is missing")
    return row


def _restore(row: dict[str, Any], odd: object) -> None:
    """Put non-finite numbers back in place of null."""
    for key, text in odd.items() if isinstance(odd, dict) else ():
        if key in row and row[key] is None and text in SPELLED.values():
            row[key] = float(text)


def _is_number(value: object) -> bool:
    """Return whether this is a drawable or a non-finite number, and not a bool."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= MOST or (isinstance(value, float) and not isfinite(value))
