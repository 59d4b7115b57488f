"""What follows a batch of prompts: tokens of all of them together, and the text of each.

Shapes: B sequences, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import InitVar, dataclass, field

import torch

from app.data.tokenizer import Tokenizer
from app.engine.decoding.decoder import Decoder
from app.engine.decoding.drawing import Sampling, or_nobody, unless_nobody
from app.engine.decoding.replicas import Replicas

UNFINISHED = "�"  # what a character is read as of which not all bytes are there yet
CHARACTER = 4  # most tokens that a character has
CONTEXT = 32  # tokens whose text may still depend on the next one's; more than any character has


def drawn_tokens(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    count: int,
    *,
    sampling: Sampling,
    seed: int,
    vocab: int,
    ended: Callable[[], bool],
) -> Iterator[list[int]]:
    """A token of each sequence, by and by: `count` times, or until all have `ended`. All ranks call
    it with the same prompts, B for each replica; each yields the same.

    Only the first `vocab` ids are drawn: a padded embedding has more rows than the tokenizer has
    ids. Equal seeds give equal tokens on devices of one kind.
    """
    replicas = Replicas(decoder.model.groups, decoder.sequences)
    generator = torch.Generator(device=decoder.model.device).manual_seed(seed)
    logits_BV = decoder.prompts(replicas.own(prompts), max(map(len, prompts)))
    for nth in range(count):
        drawn_B = sampling.draw(
            logits_BV[:, :vocab], generator, replicas.first, together=replicas.together
        )
        tokens = unless_nobody(replicas.gathered(or_nobody(drawn_B, ended())))
        if tokens is None:
            return
        yield tokens
        if nth + 1 < count:
            logits_BV = decoder.step(replicas.own(tokens))


@dataclass(slots=True)
class Continuation:
    """The text that follows one prompt, as far as it has come.

    It is read together with the prompt: whether a token begins with a blank, or completes a
    character, is for decoders a matter of the tokens before it.
    """

    tokenizer: Tokenizer
    stop: Sequence[str] = ()  # texts before which it ends
    prompt: InitVar[Sequence[int]] = ()
    ends: Collection[int] = ()  # tokens that end it, besides the end of a document
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    ended: bool = False  # by a stop text or a token
    said: str = ""  # what `fresh` has given out
    window: list[int] = field(default_factory=list)  # tokens that are read with the next one
    given: str = ""  # text at the begin of the window that is the prompt's
    settled_text: str = ""  # in front of the window, behind the prompt

    def __post_init__(self, prompt: Sequence[int]) -> None:
        self.window = _tail(self.tokenizer, prompt)
        self.given = self.tokenizer.decode(self.window)

    def add(self, token: int) -> None:
        """Take the next token; nothing once the text has ended."""
        if self.ended:
            return
        if token == self.tokenizer.eod or token in self.ends:
            self.ended = True
            return
        self.tokens.append(token)
        self.window.append(token)
        self.text = self.settled_text + behind(self.tokenizer, self.given, self.window)
        if len(self.window) >= 2 * CONTEXT and len(self.tokens) >= CONTEXT:
            self._settle()
        found = [at for stop in self.stop if (at := self.text.find(stop)) >= 0]
        if found:
            self.text = self.text[: min(found)]
            self.ended = True

    def fresh(self, last: bool = False) -> str:
        """What can be shown that has not been: without what a stop text may begin with, and
        without a character that is not complete, unless this is the `last` call.
        """
        sure = self.text
        if not (last or self.ended):
            sure = self._before_stop(self.text.rstrip(UNFINISHED))
        elif sure.endswith(UNFINISHED) and not sure.startswith(self.said):
            # bytes as tokens: with the last character incomplete, those before it read as broken
            sure = self.said + UNFINISHED
        new = sure[len(self.said) :]
        self.said += new
        return new

    def _settle(self) -> None:
        """Read no more than the last tokens again: the time of a token must not grow with the text.

        Not where they are read otherwise without those before them, as in the middle of a
        character; then the next call tries again.
        """
        last = self.tokenizer.decode(self.window[-CONTEXT:])
        if self.text.endswith(last) and not last.startswith(UNFINISHED):
            self.window = self.window[-CONTEXT:]
            self.given = ""
            self.settled_text = self.text.removesuffix(last)

    def _before_stop(self, text: str) -> str:
        """A text without an end that may be the beginning of a stop text."""
        longest = max((len(stop) for stop in self.stop), default=0)
        for begin in range(max(0, len(text) - longest + 1), len(text)):
            if any(stop.startswith(text[begin:]) for stop in self.stop):
                return text[:begin]
        return text


def behind(tokenizer: Tokenizer, given: str, ids: Sequence[int]) -> str:
    """The text of tokens behind what the first of them were read as by themselves, `given`.

    Of a character of which only some bytes are there, one UNFINISHED.
    """
    text = tokenizer.decode(ids)
    if text.startswith(given):
        return text[len(given) :]
    if text.endswith(UNFINISHED):
        for incomplete in range(1, min(CHARACTER, len(ids))):
            before = tokenizer.decode(ids[:-incomplete])
            if before.startswith(given):
                return before[len(given) :] + UNFINISHED
    return text[_common(given, text) :]


def _common(one: str, other: str) -> int:
    """Characters that two texts begin with alike."""
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _tail(tokenizer: Tokenizer, prompt: Sequence[int]) -> list[int]:
    """The last tokens of a prompt, as many as are read as they are in the whole of it."""
    whole = tokenizer.decode(prompt)
    for size in range(CONTEXT, min(CONTEXT + CHARACTER, len(prompt))):
        text = tokenizer.decode(prompt[-size:])
        if text and whole.endswith(text) and not text.startswith(UNFINISHED):
            return [*prompt[-size:]]
    return [*prompt]
