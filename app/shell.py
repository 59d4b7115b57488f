"""Overrides as one types them: quoted for Hydra's grammar, and for a shell."""

from __future__ import annotations

import re
import shlex

# a value that Hydra reads as the text that it is: a number, null or true it would not
PLAIN = re.compile(r"(\.{0,2}/)?[A-Za-z_][A-Za-z0-9_./-]*")
EXPANDED = re.compile(r"""["$`\\!]""")  # what shells read within double quotes
NOT_TEXT = frozenset({"null", "true", "false", "nan", "inf"})


def quoted(value: object) -> str:
    """Return a value of an override that may hold commas, spaces, quotes and `${`, which then is
    no reference; backslashes count in front of a quote only.
    """
    escaped = re.sub(r"(\\+)('|$)", r"\1\1\2", literal(str(value))).replace("'", "\\'")
    return f"'{escaped}'"


def literal(text: str) -> str:
    """Return a text that OmegaConf reads as this text, where it would take `${` for a reference."""
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", text)


def shell_word(key: str, value: str) -> str:
    """Return an override of a text as one types it in a shell."""
    if PLAIN.fullmatch(value) and value.lower() not in NOT_TEXT:
        return f"{key}={value}"
    word = f"{key}={quoted(value)}"
    return shlex.quote(word) if EXPANDED.search(word) else f'"{word}"'
