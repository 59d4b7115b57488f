"""Which of a test's many cases `make test` runs; `make test-all` runs the others too."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
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


def each(cases: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a test to run many short cases in a loop; a failure names its case.

    The values of a case are the test's first arguments, its fixtures the others.
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        listed = [case if isinstance(case, tuple) else (case,) for case in cases]
        assert listed, "no case"
        parameters = [*inspect.signature(test).parameters.values()]

        def through(**fixtures: Any) -> None:
            for values in listed:
                try:
                    test(*values, **fixtures)
                except Exception as error:
                    error.add_note(f"case: {values}")
                    raise

        functools.update_wrapper(through, test)
        through.__signature__ = inspect.Signature(parameters[len(listed[0]) :])  # type: ignore[attr-defined]
        return through

    return decorate


def mark_beyond_cover(items: Sequence[pytest.Item]) -> None:
    """Mark `full` the cases that the mark `cover` or `every` of their test leaves out.

    `@pytest.mark.cover(1)` on a test with parameters keeps cases in which every value of every
    parameter occurs, `cover(2)` cases with every two values that occur together in the whole grid,
    `every(3)` the first of each three cases.
    """
    tests: dict[str, list[pytest.Function]] = {}
    for item in items:
        if _mark(item) is not None and not item.get_closest_marker("full"):
            assert isinstance(item, pytest.Function)
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in tests.values():
        mark = _mark(cases[0])
        assert mark is not None
        if mark.name == "every":
            kept = [*range(0, len(cases), *mark.args)]
        else:
            grid = [
                tuple((name, repr(value)) for name, value in case.callspec.params.items())
                for case in cases
            ]
            kept = covering(grid, *mark.args)
        for nth, case in enumerate(cases):
            if nth not in kept:
                case.add_marker(pytest.mark.full)


def _mark(item: pytest.Item) -> pytest.Mark | None:
    return item.get_closest_marker("cover") or item.get_closest_marker("every")


def covering(grid: Sequence[tuple[Any, ...]], strength: int) -> list[int]:
    """Return the numbers of few rows in which all combinations of `strength` values occur.

    Greedy: next comes the row with most new combinations, of equal ones the first.
    """
    new = [set(itertools.combinations(row, strength)) for row in grid]
    kept = []
    while most := max(map(len, new), default=0):
        kept.append(next(nth for nth, parts in enumerate(new) if len(parts) == most))
        found = set(new[kept[-1]])
        new = [parts - found for parts in new]
    return kept


def _parameter(case: Any, quick: bool) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=() if quick else pytest.mark.full)
