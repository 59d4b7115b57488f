"""Generate continuations of a batch of prompts: tokens for all together, and the text of each.

Shapes: B sequences, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import InitVar, dataclass, field

import torch

from app.data.tokenizer import Tokenizer
from app.engine.decoding.decoder import Decoder
from app.engine.decoding.drawing import Sampling, or_ended, unless_ended
from app.engine.decoding.replicas import Replicas

UNFINISHED = "�"  # decoders return this for a character whose bytes are incomplete
CHARACTER = 4  # maximum tokens of a character
CONTEXT = 32  # tokens whose text may still change with the next one; more than CHARACTER


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
    """Yield a token of each sequence, `count` times or until all have `ended`.

    All ranks call it with the same prompts, B for each replica, and yield the same tokens.

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
        tokens = unless_ended(replicas.gathered(or_ended(drawn_B, ended())))
        if tokens is None:
            return
        yield tokens
        if nth + 1 < count:
            logits_BV = decoder.step(replicas.own(tokens))


@dataclass(slots=True)
class Continuation:
    """Text generated so far after one prompt.

    It is decoded together with the end of the prompt: the tokens before decide whether a token
    begins with a blank or completes a character.
    """

    tokenizer: Tokenizer
    stop: Sequence[str] = ()  # texts before which it ends
    prompt: InitVar[Sequence[int]] = ()
    ends: Collection[int] = ()  # tokens that end it, besides the end of a document
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    ended: bool = False  # by a stop text or a token
    said: str = ""  # returned by `fresh` so far
    window: list[int] = field(default_factory=list)  # tokens decoded together with the next one
    given: str = ""  # text of the prompt at the start of the window
    settled_text: str = ""  # generated text before the window

    def __post_init__(self, prompt: Sequence[int]) -> None:
        self.window = _tail(self.tokenizer, prompt)
        self.given = self.tokenizer.decode(self.window)

    def add(self, token: int) -> None:
        """Append the next token; no-op once the text has ended."""
        if self.ended:
            return
        if token == self.tokenizer.eod or token in self.ends:
            self.ended = True
            return
        self.tokens.append(token)
        self.window.append(token)
        self.text = self.settled_text + text_after(self.tokenizer, self.given, self.window)
        if len(self.window) >= 2 * CONTEXT and len(self.tokens) >= CONTEXT:
            self._settle()
        found = [at for stop in self.stop if (at := self.text.find(stop)) >= 0]
        if found:
            self.text = self.text[: min(found)]
            self.ended = True

    def fresh(self, last: bool = False) -> str:
        """Return new text that can be shown.

        Holds back a possible beginning of a stop text and an incomplete character, unless this is
        the `last` call.
        """
        sure = self.text
        if not (last or self.ended):
            sure = self._before_stop(self.text.rstrip(UNFINISHED))
        elif sure.endswith(UNFINISHED) and not sure.startswith(self.said):
            # With byte tokens an incomplete last character makes those before it decode as broken.
            sure = self.said + UNFINISHED
        new = sure[len(self.said) :]
        self.said += new
        return new

    def _settle(self) -> None:
        """Shrink the window to its last tokens, so that the time per token stays constant.

        Skipped if these decode differently without those before them, as in the middle of a
        character; the next call tries again.
        """
        last = self.tokenizer.decode(self.window[-CONTEXT:])
        if self.text.endswith(last) and not last.startswith(UNFINISHED):
            self.window = self.window[-CONTEXT:]
            self.given = ""
            self.settled_text = self.text.removesuffix(last)

    def _before_stop(self, text: str) -> str:
        """Return the text without an ending that may begin a stop text."""
        longest = max((len(stop) for stop in self.stop), default=0)
        for begin in range(max(0, len(text) - longest + 1), len(text)):
            if any(stop.startswith(text[begin:]) for stop in self.stop):
                return text[:begin]
        return text


def text_after(tokenizer: Tokenizer, given: str, ids: Sequence[int]) -> str:
    """Return the text of `ids` after `given`, the text of the first of them alone.

    An incomplete character at the end becomes one UNFINISHED.
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
    """Return the length of the common prefix of two texts."""
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _tail(tokenizer: Tokenizer, prompt: Sequence[int]) -> list[int]:
    """Return the last tokens of a prompt, enough to decode as they do within the whole prompt."""
    whole = tokenizer.decode(prompt)
    for size in range(CONTEXT, min(CONTEXT + CHARACTER, len(prompt))):
        text = tokenizer.decode(prompt[-size:])
        if text and whole.endswith(text) and not text.startswith(UNFINISHED):
            return [*prompt[-size:]]
    return [*prompt]
