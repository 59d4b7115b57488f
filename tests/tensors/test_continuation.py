"""Text as it comes: what is shown, and where it ends."""

from __future__ import annotations

import random

import pytest

from app.data.tokenizer import ByteTokenizer
from app.engine.decoding.texts import Continuation

BYTES = ByteTokenizer()


def shown(tokens: list[int], *stop: str) -> tuple[list[str], Continuation]:
    """What each token adds, and what the end does."""
    text = Continuation(BYTES, stop)
    parts = []
    for token in tokens:
        text.add(token)
        parts.append(text.fresh())
    return [*parts, text.fresh(last=True)], text


def test_characters_are_shown_when_they_are_complete():
    parts, text = shown(list("aß€".encode()))
    assert parts == ["a", "", "ß", "", "", "€", ""] and not text.ended


def test_what_is_broken_at_the_end_is_shown_then():
    parts, _ = shown([*b"a", 0xC3])
    assert parts == ["a", "", "�"]


def test_the_end_of_a_document_ends_a_text():
    parts, text = shown([*b"ab", BYTES.eod, *b"cd"])
    assert "".join(parts) == "ab" == text.text and text.ended and text.tokens == [*b"ab"]


def test_a_stop_text_is_never_shown_in_part():
    parts, text = shown(list(b"one<two</x>four"), "</x>", "zzz")
    assert "".join(parts) == "one<two" == text.text and text.ended
    assert parts[3] == "" and parts[4] == "<t", "held back until it is none"


@pytest.mark.parametrize("seed", range(20))
def test_what_is_shown_is_the_text(seed: int):
    draw = random.Random(seed)
    letters = "aab€ß"
    text = "".join(draw.choices(letters, k=30))
    stop = ["".join(draw.choices(letters, k=draw.randint(1, 4))) for _ in range(2)]
    parts, found = shown(list(text.encode()), *stop)
    # two stops may overlap: the one that is complete first ends the text
    ends = [(at + len(each), at) for each in stop if (at := text.find(each)) >= 0]
    wanted = text[: min(ends)[1]] if ends else text
    assert "".join(parts) == found.text == wanted
