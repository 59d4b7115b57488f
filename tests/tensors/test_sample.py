"""The sample at the end of a run reads its prompt and what follows together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from app.data.feed import IGNORED, Batch
from app.data.tokenizer import ByteTokenizer, Tokenizer
from app.engine.decoding import generate
from tests.tensors.continuation import spaced


def sampled(
    tokenizer: Tokenizer,
    prompt: list[int],
    drawn: list[int],
    patch: pytest.MonkeyPatch,
    end: int | None = None,
) -> str | None:
    train = SimpleNamespace(sample_tokens=len(drawn), seq_len=8, seed=1)
    engine: Any = SimpleNamespace(plan=SimpleNamespace(run=SimpleNamespace(train=train)))
    patch.setattr(generate, "sample_tokens", lambda *_, **__: iter(drawn))
    return generate.sample_text(engine, tokenizer, prompt, end=end, aloud=False)


def test_blank_behind_the_prompt_is_written(monkeypatch: pytest.MonkeyPatch):
    tokenizer = spaced()
    given, drawn = tokenizer.encode("the cat"), tokenizer.encode("so ran")
    assert sampled(tokenizer, given, drawn, monkeypatch) == "the cat▶ so ran"


def test_character_is_completed_behind_the_prompt(monkeypatch: pytest.MonkeyPatch):
    ids = [*"aß".encode()]
    assert sampled(ByteTokenizer(), ids[:2], ids[2:], monkeypatch) == "a▶ß"


def test_sample_of_a_conversation_is_its_first_answer(monkeypatch: pytest.MonkeyPatch):
    """Positions 0 to 2 ask, 3 and 4 answer, and 5 begins the next conversation."""
    tokens = torch.tensor([[*b"ask?a.ask?"]])
    labels = torch.tensor([[*[IGNORED] * 3, *b"a.", *[IGNORED] * 3, *b"a."]])
    batch = Batch(tokens, labels, torch.zeros_like(tokens), ends_BD=None)
    prompt, end = generate.begun(batch, marked=True)
    assert (bytes(prompt), end) == (b"ask?", ord("."))
    assert generate.begun(batch, marked=False) == ([*b"ask?a"], None)
    answered = sampled(ByteTokenizer(), prompt, [*b"yes. no."], monkeypatch, end)
    assert answered == "ask?▶yes."
