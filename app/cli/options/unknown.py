"""Errors for unknown names: names of other programs, misspellings, and neither."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from app.cli.options.arguments import Typed, foreign_flags, hydra_flags, key_of
from app.cli.options.keys import all_keys, is_section
from app.cli.options.other_names import OtherName, exact_row, row_of
from app.cli.processes.home import CONF
from app.config.renamed import new_key, removed
from app.errors import ConfigError, Instead, letters, near_names
from app.programs import command_name, with_names

MOST_GUESSED = 3  # keys that a name may equally well be a slip of
MEASURED = "hardware.profile."  # written by calibrate, typed by nobody


def no_such_key(key: str, value: str, where: str = "") -> ConfigError:
    """Return the error for an unknown key: its name here, the key that it may misspell, or where
    keys are listed. `where` names the file that has it, for which no override helps.
    """
    rule = f"there is no such key{where}"
    if (gone := removed(key)) is not None:
        return gone.refused(value)
    if (new := new_key(key)) != key:
        return ConfigError(key, value, f"is {new} now{where}", guess=new)
    row = None if where else exact_row(key)
    if row is None and (same := _same_letters(key)):
        return ConfigError(key, value, rule, guess=same)
    if row is None and (slip := _slip_of(key)):
        return ConfigError(key, value, rule, guess=slip)
    row = row or (None if where else row_of(key))
    if row is not None:
        return _of_row(key, value, row)
    alone = None if where else _same_leaf(key)
    if alone is not None and value:
        return ConfigError(key, value, f"is {alone} here", nearest=Instead(f"{alone}={value}"))
    guess = alone or like_key(key)
    advice = None if guess else f"{command_name('train')} --cfg all prints the keys"
    return ConfigError(key, value, rule, guess=guess, advice=advice)


def no_such_flag(arguments: Sequence[str], known: Sequence[str] = ()) -> ConfigError | None:
    """Return the error for the first flag of another program, or key of ours behind dashes; None
    without one. `known` are the program's own flags, if not Hydra's.
    """
    for _, override, typed in foreign_flags(arguments, known or hydra_flags()):
        key, _, value = override.partition("=")
        key = new_key(key)
        meant = None if (row := exact_row(key)) is None else row.choice(value)
        if is_known(key) and not meant:
            rule = "keys are typed without dashes, as key=value"
            near = Instead(f"{key}={value}") if value else None
            return ConfigError("option", typed, rule, nearest=near)
        if meant:
            rule = f"is {' '.join(meant)} here"
            return ConfigError("option", typed, rule, nearest=Instead(*meant))
        if row_of(key) or _same_leaf(key):
            found = no_such_key(key, value)
            return ConfigError(
                "option",
                typed,
                found.rule,
                nearest=found.nearest,
                guess=found.guess,
                advice=found.advice,
            )
    return None


def like_key(word: str) -> str | None:
    """Return the keys that a word may misspell, joined by "or": the first of these searches that
    finds 1 to MOST_GUESSED keys. Same letters; similar spelling in its section; all of its words in
    its section; its last part in another section; similar spelling in every part; similar last part
    elsewhere. None if no search does.
    """
    if same := _same_letters(word):
        return same
    section, _, leaf = word.rpartition(".")
    keys = [key for key in all_keys() if word.startswith(MEASURED) or not key.startswith(MEASURED)]
    inside = [key for key in keys if key.rpartition(".")[0] == section]
    near = near_names(leaf, _leaves(keys))
    for found in (
        [f"{section}.{name}" if section else name for name in near_names(leaf, _leaves(inside))],
        list(with_words(leaf, [key for key in inside if not section or not is_section(key)])),
        [key for key in keys if key.rpartition(".")[2] == leaf],
        [key for key in keys if _near_parts(word, key)],
        [key for key in keys if key.rpartition(".")[2] in near],
    ):
        if 0 < len(found) <= MOST_GUESSED:
            return " or ".join(found)
    return None


def refused_value(key: str, value: str, rule: str, guess: str | None) -> ConfigError:
    """Return the error for a value that a key or group lacks; without a guess, with the meaning of
    the value in another program: float16 is fp16.
    """
    row = None if guess else exact_row(key)
    if row is None:
        return ConfigError(key, value, rule, guess=guess)
    if not row.ours:
        note = with_names(row.note).replace("*", value, 1) if value else None
        return ConfigError(key, value, rule, advice=note)
    found = row.choice(value)
    return ConfigError(key, value, rule, nearest=Instead(*found) if found else None)


def translated(word: str) -> tuple[str, ...]:
    """Return the overrides that replace one with an unknown key, empty if none is known."""
    key, value = key_of(word), word.partition("=")[2]
    if is_known(key):
        return found if (row := exact_row(key)) and (found := row.choice(value)) else (word,)
    slip = None if exact_row(key) else _same_letters(key) or _slip_of(key)
    if slip is None and (row := row_of(key)):
        return row.overrides(value)
    alone = slip or _same_leaf(key)
    return (f"{alone}={value}",) if alone and value else ()


def unknown_words(typed: Typed) -> tuple[str, ...]:
    """Return the overrides with unknown keys or values of another program."""
    return tuple(
        word
        for word in typed.overrides
        if not is_known(key_of(word)) or translated(word) not in ((), (word,))
    )


def is_known(key: str) -> bool:
    """Return whether a name is a key, a group of options, or Hydra's own."""
    return key in all_keys() or key.startswith("hydra") or (CONF / key).is_dir()


def _of_row(key: str, value: str, row: OtherName) -> ConfigError:
    told = with_names(row.note)
    note = f" ({told})" if told else ""
    if not row.ours:
        return ConfigError(key, value, f"there is no such key: {told}")
    if found := row.overrides(value):
        called = row.key or " ".join(found)
        return ConfigError(key, value, f"is {called} here{note}", nearest=Instead(*found))
    options = dict.fromkeys(each.replace("*", "…") for _, each in row.choices)
    called = row.key or " or ".join(options)
    return ConfigError(key, value, f"is {called} here{note}")


def _same_letters(word: str) -> str | None:
    found = [key for key in all_keys() if letters(word) == letters(key)]
    return found[0] if len(found) == 1 and found[0] != word else None


def _same_leaf(word: str) -> str | None:
    """Return the only key that ends in the last part of a word, None if there are more or none."""
    leaf = word.rpartition(".")[2]
    found = [key for key in all_keys() if key.rpartition(".")[2] == leaf]
    found = [key for key in found if not key.startswith(MEASURED)]
    return found[0] if len(found) == 1 and found[0] != word else None


def _leaves(keys: Sequence[str]) -> list[str]:
    return [key.rpartition(".")[2] for key in keys]


def with_words(leaf: str, keys: Sequence[str]) -> Iterator[str]:
    """Yield the keys that contain all words of a name, and the fewest others."""
    words = set(re.split("[-_]", leaf))
    having = {key: set(key.rpartition(".")[2].split("_")) for key in keys}
    having = {key: found for key, found in having.items() if words <= found}
    least = min(map(len, having.values()), default=0)
    yield from (key for key, found in having.items() if len(found) == least)


def _near_parts(word: str, key: str) -> bool:
    """Return whether every part of a dotted name is near that of a key, or has its letters."""
    ours, theirs = key.split("."), word.split(".")
    return len(ours) == len(theirs) and all(
        sorted(one) == sorted(other) or near_names(other, [one])
        for one, other in zip(ours, theirs, strict=True)
    )


def _slip_of(word: str) -> str | None:
    """Return the one dotted key that a dotted name misspells, None where there is none: the last
    part may be another program's name, as in model.n_layers.
    """
    leaf = word.rpartition(".")[2]
    found = [key for key in all_keys() if "." in word and _near_parts(word, key)]
    if len(found) != 1 or found[0] == word:
        return None
    return found[0] if found[0].endswith(f".{leaf}") or exact_row(leaf) is None else None
