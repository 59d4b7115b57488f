"""A conversation with a model: the text of its turns, and answers on a KV cache that is kept.

Shapes: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from app.data.chat_template import ChatTemplate, Message
from app.data.tokenizer import Tokenizer
from app.engine.decoding.decoder import Decoder
from app.engine.decoding.drawing import Sampling
from app.engine.decoding.texts import Continuation
from app.errors import ConfigError

CONVERSATION = "conversation"  # what an error is about that fills the context
MOST_NEW = 64  # tokens that extend a cache; of more than some 100 a prefill is faster


class CachedText:
    """Text of one process whose keys and values stay cached from turn to turn."""

    def __init__(self, decoder: Decoder, vocab: int) -> None:
        assert decoder.sequences == 1, "a conversation is one text"
        self.decoder = decoder
        self.vocab = vocab  # ids of the tokenizer: a padded embedding has more rows
        self.cached: list[int] = []

    @property
    def context(self) -> int:
        """Most tokens of the text."""
        return self.decoder.sizes.length

    def draw(
        self, prompt: Sequence[int], count: int, sampling: Sampling, *, generator: torch.Generator
    ) -> Iterator[int]:
        """Yield up to `count` tokens after the prompt, fewer where the context ends."""
        logits_1V = self._logits_after(prompt)
        for _ in range(min(count, self.context - len(prompt))):
            token = int(sampling.draw(logits_1V[:, : self.vocab], generator))
            yield token
            logits_1V = self._step(token)

    def _logits_after(self, prompt: Sequence[int]) -> Tensor:
        """Return the logits after a prompt, 1 × V: of what is not cached if the text only grew."""
        known = len(self.cached)
        new = prompt[known:]
        # The slots of a window are overwritten: nothing is cut, and no text wraps when extended.
        fits = 0 < len(new) <= MOST_NEW and len(prompt) <= self.decoder.slots
        if known and fits and self.cached == [*prompt[:known]]:
            self.cached = []
            logits_1V = self.decoder.extend(new)
            self.cached = [*prompt]
            return logits_1V
        self.cached = []  # an interrupted prefill leaves nothing that is of use
        logits_1V = self.decoder.prompts([prompt])
        self.cached = [*prompt]
        return logits_1V

    def _step(self, token: int) -> Tensor:
        logits_1V = self.decoder.step([token])
        self.cached.append(token)
        return logits_1V


@dataclass(frozen=True, slots=True)
class Speaker:
    """A model that answers: by its chat template, or without one by continuing the text."""

    name: str
    text: CachedText
    tokenizer: Tokenizer
    template: ChatTemplate | None
    ends: frozenset[int]  # tokens that end an answer
    stop: Sequence[str] = ()  # strings that end it

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens before the next answer.

        Raises ConfigError if they fill the context, or the template refuses the messages.
        """
        if self.template is None:
            text = "".join(message["content"] for message in messages)
        else:
            text = self.template.text(messages)
        found = [*map(int, self.tokenizer.encode(text))]
        if not found:
            raise ConfigError("messages", text, "hold no text")
        if len(found) >= self.text.context:
            rule = f"has {len(found)} tokens, and the context holds {self.text.context}"
            raise ConfigError(CONVERSATION, f"{text[:30]}…", rule)
        return found

    def answer(
        self,
        prompt: Sequence[int],
        count: int,
        sampling: Sampling,
        *,
        generator: torch.Generator,
        stop: Sequence[str] = (),
        ends: Collection[int] = (),
    ) -> Answer:
        """Return the answer to a prompt, of at most `count` tokens, not yet generated; it also ends
        before the strings `stop` and at the tokens `ends`.
        """
        tokens = self.text.draw(prompt, count, sampling, generator=generator)
        both = (*self.stop, *stop)
        return Answer(
            tokens, Continuation(self.tokenizer, both, prompt, ends=self.ends.union(ends))
        )


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer that is generated while its pieces are read; one that is left ends there."""

    tokens: Iterator[int]
    said: Continuation

    @property
    def shown(self) -> str:
        """Text of the pieces so far: of an answer that was left, without half of a character."""
        return self.said.said

    def pieces(self) -> Iterator[str]:
        """Yield the new text after each token, which may be empty."""
        for token in self.tokens:
            self.said.add(token)
            yield self.said.fresh()
            if self.said.ended:
                return
        yield self.said.fresh(last=True)
