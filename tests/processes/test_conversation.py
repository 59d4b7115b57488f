"""A cached conversation answers as one that is computed anew, and computes only what is new."""

from __future__ import annotations

from collections.abc import Sequence
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
SHORT = ([5], [2], [7])  # in front of two answers they fit a window of 4
SEED = 3


class Counting(Decoder):
    """Notes every forward."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.forwards: list[int] = []  # tokens of prompts, negative of extensions; 1 for a step

    def prompts(self, prompts: Any, width: int = 0) -> torch.Tensor:
        """As ever."""
        self.forwards.append(len(prompts[0]))
        return super().prompts(prompts, width)

    def extend(self, tokens: Any) -> torch.Tensor:
        """As ever."""
        self.forwards.append(-len(tokens))
        return super().extend(tokens)

    def step(self, tokens: Any) -> torch.Tensor:
        """As ever."""
        self.forwards.append(1)
        return super().step(tokens)


def turns(
    engine: Engine, questions: Sequence[list[int]], most_new: int, sampling: Sampling
) -> tuple[list[int], list[int]]:
    """All tokens of a conversation of two-token answers, each turn asking; forwards."""
    conversation.MOST_NEW = most_new
    decoder = Counting(engine, 1, PLACES)
    text = CachedText(decoder, engine.plan.run.model.vocab_size)
    generator = torch.Generator().manual_seed(SEED)
    said: list[int] = []
    for question in questions:
        said += question
        said += islice(text.draw(said, 9, sampling, generator=generator), 2)
    return said, decoder.forwards


def both(engine: Engine) -> list[tuple[list[int], list[int]]]:
    questions = SHORT if engine.plan.run.model.sliding_window else QUESTIONS
    sampling = Sampling(temperature=2.0)
    return [turns(engine, questions, most, how) for how in (GREEDY, sampling) for most in (64, 0)]


@pytest.mark.every(2)
@pytest.mark.parametrize("name", ["dense", "moe", "latent", "static", "windows", "sinks"])
def test_growing_text_is_answered_as_anew(name: str):
    (found,) = run_distributed(here, 1, run_of(name), both)
    (cached, forwards), (anew, prefills), (drawn, _), (drawn_anew, _) = found
    assert cached == anew and drawn == drawn_anew
    # the second token of an answer is added with the next question
    if name in ("windows", "sinks"):
        assert (forwards, prefills) == ([1, 1, -2, 1, 7, 1], [1, 1, 4, 1, 7, 1])
    else:
        assert forwards == [3, 1, -3, 1, -2, 1, -4, 1]
        assert prefills == [3, 1, 7, 1, 10, 1, 15, 1]


def extended(engine: Engine) -> list[torch.Tensor]:
    whole, parts = Decoder(engine, 1, PLACES), Decoder(engine, 1, PLACES)
    prompt = [5, 1, 4, 2, 6, 3, 7, 7, 1]
    parts.prompts([prompt[:3]])
    return [whole.prompts([prompt]), [parts.extend(prompt[3:5]), parts.extend(prompt[5:])][1],
            whole.step([2]), parts.step([2])]  # fmt: skip


@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}], ids=["tp 2", "pp 2"])
def test_extension_equals_a_prefill_at_layouts(layout: dict[str, int]):
    for found in run_distributed(here, 2, run_of("dense", **layout), extended):
        for anew, kept in (found[:2], found[2:]):
            torch.testing.assert_close(kept, anew, rtol=1e-3, atol=1e-3)


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
