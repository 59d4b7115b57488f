"""Overrides as one types them: quoted for Hydra's grammar, and for a shell."""

from __future__ import annotations

import re
import shlex

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
    return shlex.quote(word) if EXPANDED.search(word) else f'"{word}"'
