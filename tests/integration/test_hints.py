"""Mistakes of people who come from other programs, composed in this process: the one line of
each, and that what it offers works when it is typed.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest

from app.cli.options.advice import Asked
from app.cli.options.arguments import Typed, flags_to_overrides
from app.cli.options.compose import load_typed, refuse_deletions
from app.cli.options.explained import COMPOSING, explained
from app.cli.options.unknown import no_such_flag, unknown_words
from app.errors import ConfigError

TABLE = Path(__file__).parent.parent / "golden/hints.txt"
CASES = re.findall(r"^\$ (.*)\n(.*)$", TABLE.read_text(), re.MULTILINE)


def refused(words: Sequence[str]) -> ConfigError:
    """The mistake in the arguments of train.py, with advice tried by all rules, for any host."""
    try:
        if error := no_such_flag(words):
            raise error
        refuse_deletions(Typed.parse(words))
        load_typed(Typed.parse(words))
    except COMPOSING as error:
        found = explained(error)
    else:
        raise AssertionError("no mistake")
    assert isinstance(found, ConfigError)
    return Asked(Typed.parse(flags_to_overrides(words)), load_typed).advised(found)


@pytest.mark.every(120)
@pytest.mark.parametrize(("typed", "said"), CASES, ids=[typed for typed, _ in CASES])
def test_a_hint_is_true_and_works_when_followed(typed: str, said: str):
    words = shlex.split(typed)
    error = refused(words)
    assert str(error) == said
    asked = Typed.parse(flags_to_overrides(words))
    right = tuple(word for word in asked.overrides if word not in unknown_words(asked))
    for alternative in error.alternatives if error.tried else ():
        override = error.override(alternative.candidates[0])
        load_typed(Typed(right).with_overrides(override))


def test_there_are_hints():
    assert len(CASES) >= 120 and len(dict(CASES)) == len(CASES)
