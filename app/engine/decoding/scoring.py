"""Score texts with a model: token losses in windows, perplexity, multiple choice.

Shapes: B windows of P tokens, C choices of a question.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch

from app.data.tokenizer import Tokenizer
from app.engine.decoding.decoder import Decoder
from app.engine.decoding.replicas import Replicas
from app.engine.ranks.agreement import rank_zero_says


@dataclass(frozen=True, slots=True)
class ScoredWindow:
    """Window of tokens, of which those from index `first` on are scored."""

    tokens: tuple[int, ...]
    first: int  # at least 1: the first token has no context
    trained: tuple[bool, ...] | None = None  # which tokens are scored from there on; None: all

    @property
    def counted(self) -> int:
        """Number of scored tokens."""
        if self.trained is not None:
            return sum(self.trained[self.first :])
        return len(self.tokens) - self.first

    def sum(self, nats_P: torch.Tensor) -> torch.Tensor:
        """Return the sum over the scored tokens, of a value for each token."""
        found = nats_P[self.first : len(self.tokens)]
        if self.trained is not None:
            return found[torch.tensor(self.trained[self.first :])].sum()
        return found.sum()


def windows(
    tokens: Sequence[int], context: int, stride: int, trained: Sequence[bool] | None = None
) -> Iterator[ScoredWindow]:
    """Yield windows of at most `context` tokens that score each token but the first once; of
    conversations, the `trained` ones.

    Each window begins `stride` tokens after the one before; tokens scored already are its context.
    """
    counted = 1
    for begin in range(0, len(tokens), stride):
        end = min(begin + context, len(tokens))
        if counted < end:
            said = None if trained is None else tuple(trained[begin:end])
            window = ScoredWindow(tuple(tokens[begin:end]), counted - begin, said)
            if window.counted:
                yield window
        counted = max(counted, end)
        if end == len(tokens):
            return


def window_losses(
    decoder: Decoder, requested: Iterable[ScoredWindow]
) -> Iterator[tuple[ScoredWindow, float]]:
    """Yield rank 0's `requested` windows and their nats; all ranks call it."""
    replicas = Replicas(decoder.model.groups, decoder.sequences)
    source = iter(requested)
    padding = ScoredWindow((0,), 1)

    def batch() -> list[ScoredWindow]:
        return list(islice(source, replicas.together))

    while found := rank_zero_says(replicas.groups, batch):
        width = max(len(window.tokens) for window in found)
        own = replicas.own([*found, *[padding] * (replicas.together - len(found))])
        nats_BP = decoder.losses([window.tokens for window in own], width).double().cpu()
        lost_B = torch.stack([
            window.sum(nats_P)
            for window, nats_P in zip(own, nats_BP, strict=True)
        ])  # fmt: skip
        yield from zip(found, replicas.gathered(lost_B).tolist(), strict=False)


@dataclass(frozen=True, slots=True)
class Perplexity:
    """Loss over all scored tokens."""

    nats: float
    tokens: int

    @property
    def per_token(self) -> float:
        """Nats per token."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        """Exponential of the nats per token."""
        return math.exp(self.per_token)


def perplexity(
    decoder: Decoder, requested: Iterable[ScoredWindow], progress: Callable[[int], None]
) -> Perplexity:
    """Compute the perplexity over rank 0's `requested` windows; all ranks call it.

    `progress` is called with the number of tokens scored so far.
    """
    nats: list[float] = []
    tokens = 0
    for window, lost in window_losses(decoder, requested):
        nats.append(lost)
        tokens += window.counted
        progress(tokens)
    return Perplexity(math.fsum(nats), tokens)


@dataclass(frozen=True, slots=True)
class Question:
    """Multiple-choice question: a prompt and possible continuations, one of them right."""

    prompt: str
    choices: tuple[str, ...]
    answer: int  # index of the right choice

    def windows(self, tokenizer: Tokenizer, prefix: int | None = None) -> list[ScoredWindow]:
        """Return a window per choice, with all tokens of the choice scored.

        Blanks at the end of the prompt count with the choice: tokenizers join them to the next
        word. Without a prompt, the choice follows the token `prefix` (None: end of text), unless
        it begins with that.
        """
        prefix = tokenizer.eod if prefix is None else prefix
        prompt = self.prompt.rstrip()
        given = len(tokenizer.encode(prompt))
        found = []
        for choice in self.choices:
            tokens = tuple(map(int, tokenizer.encode(self.prompt + choice)))
            if not given and tokens[:1] != (prefix,):
                tokens = (prefix, *tokens)
            found.append(ScoredWindow(tokens, max(1, given)))
        return found


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Shares of questions whose right choice has the lowest loss."""

    questions: int
    plain: float  # loss of the whole choice
    normalised: float  # loss per character of the choice


def accuracy(
    decoder: Decoder,
    questions: Sequence[Question],
    tokenizer: Tokenizer,
    progress: Callable[[int], None],
    *,
    prefix: int | None = None,
) -> Accuracy:
    """Compute the accuracy over questions; all ranks call it with the same ones.

    `progress` is called with the number of choices scored so far. `prefix`: see
    `Question.windows`.
    """
    all_windows = [
        window for question in questions for window in question.windows(tokenizer, prefix)
    ]
    nats = []
    for _, lost in window_losses(decoder, all_windows):
        nats.append(lost)
        progress(len(nats))
    plain = normalised = at = 0
    for question in questions:
        lost_C = nats[at : at + len(question.choices)]
        at += len(question.choices)
        lengths = [len(choice) for choice in question.choices]
        shares = [lost / length for lost, length in zip(lost_C, lengths, strict=True)]
        plain += _least(lost_C) == question.answer
        normalised += _least(shares) == question.answer
    return Accuracy(len(questions), plain / len(questions), normalised / len(questions))


def _least(values: Sequence[float]) -> int:
    return min(range(len(values)), key=values.__getitem__)
