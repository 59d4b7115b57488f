"""Which of a test's many cases `make test` runs; `make test-all` runs the others too."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def sampled(cases: Iterable[Any], every: int) -> list[Any]:
    """The cases as pytest parameters; all but the first of each `every` carry the mark `full`."""
    return [_parameter(case, nth % every == 0) for nth, case in enumerate(cases)]


def chosen(cases: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """The cases as pytest parameters; all but those in `quick` carry the mark `full`."""
    listed = list(cases)
    assert all(case in listed for case in quick), "no such case"
    return [_parameter(case, case in quick) for case in listed]


def _parameter(case: Any, quick: bool) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=() if quick else pytest.mark.full)
