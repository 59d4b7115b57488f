"""Command lines of programs with options of their own: a source or none, options, overrides."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from app.cli.options.arguments import PLACES, without_places
from app.cli.options.unknown import like_key, no_such_flag, with_words
from app.data.faults import file_text
from app.errors import ConfigError, nearest
from app.programs import command_name

MOST_WHOLE = 2**63 - 1  # what torch takes for sizes and seeds


@dataclass(frozen=True, slots=True)
class Words:
    """Parsed arguments of a program."""

    source: Path  # a run or a checkpoint; unused by programs that take none
    options: tuple[tuple[str, str], ...]  # of the program itself, as typed
    overrides: tuple[str, ...]  # of the configuration

    @classmethod
    def parse(cls, arguments: Sequence[str], own: Collection[str]) -> Words:
        """Separate a program's own options from overrides. Raises ConfigError."""
        first = arguments[0] if arguments else ""
        if not first or first.startswith("-") or ("=" in first and not Path(first).exists()):
            rule = "the first argument is the folder of a run or a checkpoint"
            raise ConfigError("arguments", first, rule)
        source, *words = arguments
        options, overrides = [], []
        for word in words:
            key, separator, value = word.partition("=")
            if separator and key in own:
                options.append((key, value))
            elif separator and "." in key:
                overrides.append(word)
            else:
                rule = f"the options are {', '.join(f'{name}=' for name in own)}; all else is an "
                rule += "override of a key of the configuration"
                options_like = " or ".join(f"{name}=" for name in with_words(key, list(own)))
                guess = nearest(key, list(own)) or options_like or like_key(key)
                raise ConfigError("arguments", word, rule, guess=guess)
        return cls(Path(source), tuple(options), tuple(overrides))

    @classmethod
    def of_flags(cls, arguments: Sequence[str], own: Sequence[str], program: str) -> Words:
        """Separate a program's own flags, as `--size 300` or `--size=300`, from overrides and
        Hydra's flags for folders of options. Raises ConfigError.
        """
        words, places = without_places(arguments)
        options, overrides = list[tuple[str, str]](), list[str]()
        rest = iter(words)
        for word in rest:
            key, equals, value = word.partition("=")
            if key in own:
                options.append((key, value if equals else _behind(key, rest, own)))
                continue
            if key.startswith("-") or not (equals or key.startswith("~")):
                raise _no_such_option(word, overrides=words, own=own, program=program)
            overrides.append(word)
        return cls(Path(), tuple(options), (*places, *overrides))

    def all(self, key: str) -> tuple[str, ...]:
        """Return every value of an option."""
        return tuple(value for name, value in self.options if name == key)

    def texts(self, key: str) -> tuple[str, ...]:
        """Return every value of an option that is text, not a path: as UTF-8, whatever the locale
        has made of its bytes.
        """
        return tuple(map(_as_utf8, self.all(key)))

    def text(self, key: str) -> str | None:
        """Return the last value of an option, None if it is not given."""
        return next(reversed(self.all(key)), None)

    def whole(self, key: str, default: int, least: int = 1, most: int = MOST_WHOLE) -> int:
        """Return the last value of an option as a whole number. Raises ConfigError."""
        text = self.text(key)
        if text is None:
            return default
        if not text.isdecimal():
            near = least if text.removeprefix("-").isdecimal() else default
            rule = f"must be a whole number from {least} on"
            raise ConfigError(key, text, rule, nearest=near)
        digits = text.lstrip("0") or "0"
        if len(digits) > len(str(most)) or int(digits) > most:
            raise ConfigError(key, text, f"must be at most {most}", nearest=most)
        if int(digits) < least:
            rule = f"must be a whole number from {least} on"
            raise ConfigError(key, text, rule, nearest=least)
        return int(digits)

    def number(self, key: str, default: float) -> float:
        """Return the last value of an option as a finite number. Raises ConfigError."""
        text = self.text(key)
        try:
            found = default if text is None else float(text)
        except ValueError:
            found = math.nan
        if not math.isfinite(found):
            raise ConfigError(key, text, "must be a number", nearest=default)
        return found

    def choice(self, key: str, choices: Sequence[str]) -> str:
        """Return the last value of an option, one of `choices`; the first if it is not given.
        Raises ConfigError.
        """
        text = self.text(key)
        if text is not None and text not in choices:
            rule = f"must be {' or '.join(choices)}"
            raise ConfigError(key, text, rule, guess=nearest(text, choices))
        return text or choices[0]


def _behind(flag: str, rest: Iterator[str], own: Sequence[str]) -> str:
    value = next(rest, "")
    if not value or value.partition("=")[0] in own:
        raise ConfigError(flag, "", "must be followed by its value")
    return value


def _no_such_option(
    word: str, *, overrides: Sequence[str], own: Sequence[str], program: str
) -> ConfigError:
    """Return the error for a flag or word that a program lacks: its own flag that may be meant, or
    what another program's flag is here.
    """
    key = word.partition("=")[0]
    last = f"--{key.rpartition('-')[2]}"  # --size of --vocab-size
    guess = last if last in own else nearest(key, own)
    if guess is None and (error := no_such_flag(overrides, (*own, *PLACES))):
        return error
    rule = (
        f"the options are {', '.join(own)}; all else is key=value: {command_name(program)} --help"
    )
    return ConfigError("option", word, rule, guess=guess)


def _as_utf8(argument: str) -> str:
    """Return an argument that a locale without UTF-8 has left undecoded; one that is no UTF-8 as it
    is.
    """
    try:
        return os.fsencode(argument).decode()
    except UnicodeError:
        return argument


def check_characters(key: str, value: object, text: str, where: str = "") -> None:
    """Raise ConfigError for lone surrogates, from arguments that are not UTF-8 or from escapes of
    JSON: tokenizers take none.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        rule = f"{where}is no UTF-8: it holds half of a character"
        raise ConfigError(key, value, rule) from None


def text_lines(path: Path) -> list[str]:
    """Return the lines of a UTF-8 file without its byte order mark. Only newlines and carriage
    returns end a line: JSON strings may contain U+2028. Raises Fault and OSError.
    """
    text = file_text(path.read_bytes())
    return text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
