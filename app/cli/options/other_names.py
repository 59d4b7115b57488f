"""Names of our keys in other programs: other_names.txt, for hints and docs/other-names.md.

A row is `names | ours | note`. `ours` is a key, which takes the value as typed (`key*60` takes it
60 times), or a list of `value>overrides`, where `*` is any value; empty: there is no such thing
here, and the note says what there is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from app.cli.processes.home import CONF

TABLE = Path(__file__).with_suffix(".txt")
TRUE, FALSE = ("true", "1", "yes", "on", ""), ("false", "0", "no", "off")


@dataclass(frozen=True, slots=True)
class OtherName:
    """Names of one setting in another program, and the overrides that replace it here."""

    names: tuple[str, ...]
    ours: str  # as in TABLE
    note: str

    @property
    def choices(self) -> tuple[tuple[str, str], ...]:
        """Pairs of a typed value (`*`: any) and overrides; empty for a plain key."""
        pairs = (each.partition(">") for each in self.ours.split(", ") if ">" in each)
        return tuple((value.strip(), overrides.strip()) for value, _, overrides in pairs)

    @property
    def key(self) -> str | None:
        """Key that takes the value as typed, None where there is none."""
        return None if not self.ours or self.choices else self.ours.partition("*")[0]

    def choice(self, value: str) -> tuple[str, ...]:
        """Return the overrides of a value that the table lists, empty for any other."""
        return self.overrides(value) if value.lower() in dict(self.choices) else ()

    def overrides(self, value: str) -> tuple[str, ...]:
        """Return the overrides for a value, empty if the table does not cover it."""
        if self.key is not None:
            factor = self.ours.partition("*")[2]
            return (f"{self.key}={_times(value, factor)}",) if value else ()
        word = "true" if value.lower() in TRUE else value.lower()
        word = "false" if value.lower() in FALSE else word
        known = dict(self.choices)
        found = known.get(word, known.get(value.lower(), ""))
        if not found and value and word not in ("true", "false"):
            found = known.get("*", "").replace("*", value)
        return tuple(found.split())


def _times(value: str, factor: str) -> str:
    return f"{float(value) * int(factor):g}" if factor and re.fullmatch(r"[\d.]+", value) else value


@cache
def rows() -> tuple[tuple[str, tuple[OtherName, ...]], ...]:
    """Return the rows of the table by program."""
    sections: dict[str, list[OtherName]] = {}
    for line in filter(None, TABLE.read_text(encoding="utf-8").splitlines()):
        if line.startswith("# "):
            sections[line[2:]] = listed = []
            continue
        names, ours, note = (cell.strip() for cell in line.split("|"))
        listed.append(OtherName(tuple(names.split()), ours, note))
    return tuple((program, tuple(listed)) for program, listed in sections.items())


@cache
def _by_name() -> dict[str, OtherName]:
    return {name: row for _, listed in rows() for row in listed for name in row.names}


def exact_row(name: str) -> OtherName | None:
    """Return the row of a whole name, with dashes or underscores; None where there is none."""
    return _by_name().get(name.lstrip("-+~").replace("-", "_").lower())


def row_of(name: str) -> OtherName | None:
    """Return the row of a name as typed, with dashes or underscores, or else of one of its parts:
    of a section that has nothing like it here (lora in lora.rank), or the last one. None if no
    known program has it.
    """
    section, _, last = name.rpartition(".")
    if whole := exact_row(name):
        return whole
    first = section.partition(".")[0]
    if first and not (CONF / first).is_dir() and (row := exact_row(first)) and not row.ours:
        return row
    alone = not section or not (CONF / last).is_dir()  # data in parallel.data is no group
    return exact_row(last) if alone else None


def page() -> Iterator[str]:
    """Yield the lines of the tables of docs/other-names.md; Megatron-LM has a page of its own."""
    for program, listed in rows()[1:]:
        yield from ("", f"## {program}", "", "| there | here | |", "|---|---|---|")
        for row in listed:
            names = ", ".join(f"`{name}`" for name in row.names)
            ours = f"`{row.key}`" if row.key else ", ".join(map(_told, row.choices))
            yield f"| {names} | {ours or '—'} | {row.note.replace('=*', '=…')} |"


def _told(choice: tuple[str, str]) -> str:
    value, overrides = choice
    return f"{value}: `{overrides}`" if value != "*" else f"`{overrides.replace('*', '…')}`"


if __name__ == "__main__":
    print("\n".join(page()).lstrip("\n"))
