"""Windows of evaluation: the tokens counted in each, and questions as windows."""

from __future__ import annotations

import pytest

from app.data.tokenizer import ByteTokenizer
from app.engine.decoding.scoring import Question, ScoredWindow, windows


def listed(length: int, context: int, stride: int) -> list[tuple[int, int, int]]:
    """(first token, what counts from where, end) of the windows of 0, 1, 2, …"""
    found = windows(range(length), context, stride)
    return [(each.tokens[0], each.tokens[each.first], each.tokens[-1] + 1) for each in found]


def test_windows_by_hand():
    assert listed(5, 8, 4) == [(0, 1, 5)]
    assert listed(10, 4, 2) == [(0, 1, 4), (2, 4, 6), (4, 6, 8), (6, 8, 10)]
    assert listed(7, 4, 3) == [(0, 1, 4), (3, 4, 7)]
    assert listed(1, 4, 2) == [] == listed(0, 4, 2)


@pytest.mark.parametrize("context", [2, 3, 8])
@pytest.mark.parametrize("length", [2, 7, 8, 9, 31])
def test_every_token_but_the_first_counts_once(length: int, context: int):
    for stride in range(1, context):
        found = list(windows(range(length), context, stride))
        counted = [token for each in found for token in each.tokens[each.first :]]
        assert counted == list(range(1, length))
        assert all(len(each.tokens) <= context and each.first >= 1 for each in found)
        # behind the first window, each sees what the stride leaves of the context
        assert all(each.first >= context - stride for each in found[1:])


def test_blanks_in_front_of_a_choice_are_its_own():
    first, second = Question("ab ", ("cd", "e"), 0).windows(ByteTokenizer())
    assert bytes(first.tokens) == b"ab cd" and bytes(first.tokens[first.first :]) == b" cd"
    assert bytes(second.tokens) == b"ab e" and second.counted == 2


@pytest.mark.parametrize("prompt", ["", " "])
def test_choices_without_a_prompt_follow_the_prefix(prompt: str):
    """All of their tokens count; blanks alone are no prompt."""
    question = Question(prompt, ("cd", "e"), 0)
    first, second = question.windows(ByteTokenizer(), 7)
    assert first == ScoredWindow((7, *f"{prompt}cd".encode()), 1)
    assert second == ScoredWindow((7, *f"{prompt}e".encode()), 1)
    assert question.windows(ByteTokenizer())[0].tokens[0] == ByteTokenizer().eod


def test_a_choice_that_begins_with_the_prefix_has_it_once():
    (found, _) = Question("", ("cd", "e"), 0).windows(ByteTokenizer(), ord("c"))
    assert found == ScoredWindow(tuple(b"cd"), 1)
