"""Lines of metrics.jsonl: strict JSON, which has no NaN and no Infinity, and one report each."""

from __future__ import annotations

import json
from math import isfinite
from typing import Any

NOT_FINITE = "not_finite"  # of a line: key -> NaN, Infinity or -Infinity, where the line has null
MOST = 1e100  # of numbers: matplotlib fails on ranges that a float cannot hold
SPELLED = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}  # by Python's names
RATE = "tokens_per_s"  # that the report of every step has, beside its loss


class BadLineError(ValueError):
    """A line that is no report; the text says why."""


def line_of(metrics: dict[str, Any]) -> str:
    """Return the line of a report, with its newline.

    A number that is not finite becomes null, and `not_finite` tells which it was.
    """
    odd = {
        key: SPELLED[str(value)]
        for key, value in metrics.items()
        if isinstance(value, float) and not isfinite(value)
    }
    row = metrics | dict.fromkeys(odd) | ({NOT_FINITE: odd} if odd else {})
    return json.dumps(row, allow_nan=False) + "\n"


def row_of(line: str | bytes) -> dict[str, Any]:
    """Return the report of a line, with the numbers that are not finite in their places.

    Lines of earlier versions, which spell these as bare words, are read too. A row with neither a
    loss nor a val_loss is one: its readers pass over it. Raises BadLineError.
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
    if not isinstance(row.get("step"), int) or row["step"] < 0:
        raise BadLineError("step is no whole number")
    if "loss" in row and RATE not in row:
        raise BadLineError(f"{RATE} is missing")
    return row


def _restore(row: dict[str, Any], odd: object) -> None:
    """Put numbers that are not finite back where the line has null."""
    for key, text in odd.items() if isinstance(odd, dict) else ():
        if key in row and row[key] is None and text in SPELLED.values():
            row[key] = float(text)


def _is_number(value: object) -> bool:
    """Whether this is a number that can be drawn, or one that is not finite, and no truth value."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= MOST or (isinstance(value, float) and not isfinite(value))
