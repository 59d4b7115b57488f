"""A cached conversation answers as one that is computed anew, and computes only what is new."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch

from app.data.tokenizer import ByteTokenizer
from app.engine.decoding import conversation
from app.engine.decoding.conversation import CachedText, Speaker
from app.engine.decoding.decoder import Decoder
from app.engine.decoding.drawing import Sampling
from app.engine.step.engine import Engine
from app.errors import ConfigError
from tests.distributed import run_distributed
from tests.parity import here
from tests.processes.decoding import run_of

PLACES = 24
GREEDY = Sampling(temperature=0.0)
QUESTIONS = ([5, 1, 4], [2, 6], [7], [3, 3, 3])
SEED = 3


class Counting(Decoder):
    """Notes every forward."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.forwards: list[int] = []  # tokens of prompts; 1 for a step

    def prompts(self, prompts: Any, width: int = 0) -> torch.Tensor:
        """As ever."""
        self.forwards.append(len(prompts[0]))
        return super().prompts(prompts, width)

    def step(self, tokens: Any) -> torch.Tensor:
        """As ever."""
        self.forwards.append(1)
        return super().step(tokens)


def turns(engine: Engine, most_steps: int, sampling: Sampling) -> tuple[list[int], list[int]]:
    """All tokens of a conversation of two-token answers, each turn asking; forwards."""
    conversation.MOST_STEPS = most_steps
    decoder = Counting(engine, 1, PLACES)
    text = CachedText(decoder, engine.plan.run.model.vocab_size)
    generator = torch.Generator().manual_seed(SEED)
    said: list[int] = []
    for question in QUESTIONS:
        said += question
        said += islice(text.draw(said, 9, sampling, generator=generator), 2)
    return said, decoder.forwards


def both(engine: Engine) -> list[tuple[list[int], list[int]]]:
    sampling = Sampling(temperature=2.0)
    return [turns(engine, most, how) for how in (GREEDY, sampling) for most in (64, 0)]


@pytest.mark.parametrize("name", ["dense", "moe", "latent", "windows"])
def test_growing_text_is_answered_as_anew(name: str):
    (found,) = run_distributed(here, 1, run_of(name), both)
    (cached, forwards), (anew, prefills), (drawn, _), (drawn_anew, _) = found
    assert cached == anew and drawn == drawn_anew and len(cached) == 17
    # each answer: a step between its two tokens, and the second is part of the next question
    assert forwards == [3, 1, *(1 for question in QUESTIONS[1:] for _ in (*question, 0, 0))]
    assert prefills == [3, 1, 7, 1, 10, 1, 15, 1]


def limits(engine: Engine) -> tuple[list[int], list[int], list[int], list[int]]:
    decoder = Counting(engine, 1, PLACES)
    text = CachedText(decoder, 4)
    generator = torch.Generator().manual_seed(SEED)
    full = [*text.draw([1] * 20, 99, GREEDY, generator=generator)]
    decoder.forwards.clear()
    [*text.draw([1] * 5, 3, GREEDY, generator=generator)]  # a text that does not continue it
    other = [*decoder.forwards]
    decoder.forwards.clear()
    last = [*text.draw([2] * 23, 9, GREEDY, generator=generator)]  # longer, and another
    return full, other, last, decoder.forwards


def test_text_ends_where_the_context_ends():
    ((full, other, last, forwards),) = run_distributed(here, 1, run_of("dense"), limits)
    assert len(full) == 4 and len(last) == 1 and max(full) < 4, "of 24, and of the tokenizer's ids"
    assert other == [5, 1, 1, 1] and forwards == [23, 1]


def asked(engine: Engine, content: str) -> tuple[str, int]:
    text = CachedText(Decoder(engine, 1, PLACES), engine.plan.run.model.vocab_size)
    speaker = Speaker("it", text, ByteTokenizer(), None, ends=frozenset(), stop=())
    prompt = speaker.prompt([{"role": "user", "content": content}])
    answer = speaker.answer(prompt, 4, GREEDY, generator=torch.Generator())
    return "".join(answer.pieces()), len(answer.said.tokens)


def hello(engine: Engine) -> tuple[str, int]:
    return asked(engine, "\1\5\4")


def too_long(engine: Engine) -> str:
    with pytest.raises(ConfigError) as error:
        asked(engine, "a" * 24)
    return str(error.value)


def test_answers_are_pieces_of_text():
    ((text, tokens),) = run_distributed(here, 1, run_of("dense"), hello)
    assert tokens == 4 and len(text) >= 1
    (message,) = run_distributed(here, 1, run_of("dense"), too_long)
    assert message.endswith("has 24 tokens, and the context holds 24")
