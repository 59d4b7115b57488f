"""Overrides that the Python interface is given: a list of what one types behind a program."""

from __future__ import annotations

from collections.abc import Sequence

from app.cli.options.arguments import PLACES, Typed, without_places
from app.cli.options.hydra_words import check_folders, check_plugins
from app.cli.options.unknown import no_such_flag
from app.errors import ConfigError


def given(overrides: Sequence[str]) -> list[str]:
    """Return the overrides as a list. Raises TypeError for anything but texts, such as one text,
    whose characters would be taken for overrides.
    """
    words = list(overrides)
    if isinstance(overrides, str) or not all(isinstance(word, str) for word in words):
        raise TypeError(f"overrides are a list of texts like 'train.steps=10', not {overrides!r}")
    return words


def typed_given(overrides: Sequence[str]) -> Typed:
    """Return the configuration that overrides ask for. Raises ConfigError for flags of programs,
    but for those of PLACES.
    """
    words, _ = without_places(overrides)
    if error := no_such_flag(overrides):
        raise error
    for word in words:
        if word.startswith("-"):
            rule = f"is for a command line; of flags a list of overrides has {', '.join(PLACES)}"
            raise ConfigError("option", word, rule)
    typed = Typed.parse(overrides)
    check_folders(typed.overrides, sweeps=False)
    check_plugins(typed.overrides)
    return typed


def given_data(overrides: Sequence[str]) -> list[str]:
    """Return overrides of the data that a loaded model scores. Raises ConfigError for others, which
    would change the model.
    """
    words = given(overrides)
    for word in words:
        if not word.startswith("data."):
            rule = "is no key of data; the model is loaded already"
            raise ConfigError("override", word, rule, advice="give it to graphfold.load")
    return words
