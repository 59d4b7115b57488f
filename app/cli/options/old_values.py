"""Values of keys that have another name now: they are accepted, and a line names the new one."""

from __future__ import annotations

from app.choices import CloneAlgorithm
from app.cli.options.arguments import Typed, key_of

# key and value before -> value now; the enumeration has the value before as an alias
OLD_VALUES = {("model.moe.echo.algorithm", "exact"): CloneAlgorithm.target_search.value}


def old_value_lines(typed: Typed) -> list[str]:
    """Return a line for each override that is typed with a value's former name."""
    lines = []
    for word in typed.overrides:
        key, value = key_of(word), word.partition("=")[2]
        if new := OLD_VALUES.get((key, value)):
            lines.append(f"{word}: the value is called {new} now; type {key}={new}")
    return lines
