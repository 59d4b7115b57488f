"""What follows a batch of prompts: tokens of all of them together, and the text of each.

Shapes: B sequences, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from app.data.tokenizer import Tokenizer
from app.engine.decoding.decoder import Decoder
from app.engine.decoding.drawing import Sampling, or_nobody, unless_nobody
from app.engine.decoding.replicas import Replicas

UNFINISHED = "�"  # what a character is read as of which not all bytes are there yet
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
    """The text that follows one prompt, as far as it has come."""

    tokenizer: Tokenizer
    stop: Sequence[str] = ()  # texts before which it ends
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    ended: bool = False  # by a stop text, or as the document ends
    shown: int = 0  # characters that `fresh` has given out
    settled: int = 0  # tokens whose text is known
    settled_text: str = ""

    def add(self, token: int) -> None:
        """Take the next token; nothing once the text has ended."""
        if self.ended:
            return
        if token == self.tokenizer.eod:
            self.ended = True
            return
        self.tokens.append(token)
        self.text = self.settled_text + self.tokenizer.decode(self.tokens[self.settled :])
        if len(self.tokens) >= self.settled + 2 * CONTEXT:
            self._settle()
        ends = [at for stop in self.stop if (at := self.text.find(stop)) >= 0]
        if ends:
            self.text = self.text[: min(ends)]
            self.ended = True

    def fresh(self, last: bool = False) -> str:
        """What can be shown that has not been: without what a stop text may begin with, and
        without a character that is not complete, unless this is the `last` call.
        """
        sure = self.text
        if not (last or self.ended):
            sure = self._before_stop(self.text.rstrip(UNFINISHED))
        begin = self.shown
        self.shown = max(len(sure), begin)
        return sure[begin:]

    def _settle(self) -> None:
        """Read no more than the last tokens again: the time of a token must not grow with the text.

        Not where they are read otherwise without those before them, as in the middle of a
        character; then the next call tries again.
        """
        last = self.tokenizer.decode(self.tokens[-CONTEXT:])
        if self.text.endswith(last) and not last.startswith(UNFINISHED):
            self.settled = len(self.tokens) - CONTEXT
            self.settled_text = self.text.removesuffix(last)

    def _before_stop(self, text: str) -> str:
        """A text without an end that may be the beginning of a stop text."""
        longest = max((len(stop) for stop in self.stop), default=0)
        for begin in range(max(0, len(text) - longest + 1), len(text)):
            if any(stop.startswith(text[begin:]) for stop in self.stop):
                return text[:begin]
        return text
