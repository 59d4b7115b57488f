"""Overrides as one types them: quoted for Hydra's grammar, and for a shell."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterable

# values that Hydra reads as text; it would read others as a number, null or true
PLAIN = re.compile(r"(\.{0,2}/)?[A-Za-z_][A-Za-z0-9_./-]*")
EXPANDED = re.compile(r"""["$`\\!]""")  # characters that shells expand within double quotes
NOT_TEXT = frozenset({"null", "true", "false", "nan", "inf"})


def quoted(value: object) -> str:
    """Return an override's value quoted for Hydra.

    It may hold commas, spaces, quotes and `${`, which then is no reference. Backslashes count only
    in front of a quote.
    """
    escaped = re.sub(r"(\\+)('|$)", r"\1\1\2", literal(str(value))).replace("'", "\\'")
    return f"'{escaped}'"


def literal(text: str) -> str:
    """Return a text with `${` escaped, so that OmegaConf reads no reference."""
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", text)


def shell_word(key: str, value: str) -> str:
    """Return an override of a text as typed in a shell."""
    if PLAIN.fullmatch(value) and value.lower() not in NOT_TEXT:
        return f"{key}={value}"
    word = f"{key}={quoted(value)}"
    if not _printable(word):
        return _in_bytes(word)
    return shlex.quote(word) if EXPANDED.search(word) else f'"{word}"'


def shell_line(words: Iterable[str]) -> str:
    """Return words as one types them in a shell, each read as it is."""
    return " ".join(shlex.quote(each) if _printable(each) else _in_bytes(each) for each in words)


def _printable(text: str) -> bool:
    """Return whether stdout has all characters of a text."""
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _in_bytes(word: str) -> str:
    """Return a word that stdout cannot print by its bytes, as bash, zsh and ksh read it:
    `$'run_dir=\\xc3\\xbc'`.
    """
    try:
        content = os.fsencode(word)
    except UnicodeEncodeError:  # read from a file, where the locale lacks the character
        content = word.encode(errors="surrogateescape")
    readable = range(ord(" "), ord("~") + 1)
    shown = (
        chr(byte) if byte in readable and byte not in b"'\\" else f"\\x{byte:02x}"
        for byte in content
    )
    return f"$'{''.join(shown)}'"
