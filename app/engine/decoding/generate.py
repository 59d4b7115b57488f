"""Generate a short sample from the model during training; all ranks draw the same tokens.

Shapes: V vocabulary.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator
from itertools import takewhile

import torch

from app.data.feed import IGNORED, Batch
from app.data.tokenizer import Tokenizer
from app.engine.decoding.decoder import Decoder
from app.engine.decoding.drawing import Sampling, agreed
from app.engine.decoding.texts import UNFINISHED, text_after
from app.engine.step.engine import Engine
from app.telling import telling

SAMPLING = Sampling(temperature=0.7)
SECONDS = 4.0  # limit on the time of a sample


def begun(batch: Batch, marked: bool) -> tuple[list[int], int | None]:
    """Return the tokens that a sample continues, and the token that ends it; None: its length does.

    They are the first half of a sequence; of a `marked` one, which begins with a conversation, all
    before the first answer, which its last token ends.
    """
    tokens, labels = batch.tokens_BS[0].tolist(), batch.labels_BS[0].tolist()
    first = next((place for place, label in enumerate(labels) if label != IGNORED), 0)
    if not (marked and first):
        return tokens[: max(1, len(tokens) // 2)], None
    answer = takewhile(lambda label: label != IGNORED, labels[first:])
    return tokens[: first + 1], deque(answer, maxlen=1).pop()


def sample_text(
    engine: Engine, tokenizer: Tokenizer, prompt: list[int], end: int | None = None, *, aloud: bool
) -> str | None:
    """Return text that continues a prompt, up to token `end`; None if train.sample_tokens=0. All
    ranks call it.

    With `aloud` this rank prints progress if sampling takes long.
    """
    run = engine.plan.run
    drawn: list[int] = []
    count = run.train.sample_tokens
    if not count:
        return None
    tokens = sample_tokens(
        engine,
        prompt,
        count,
        window=run.train.seq_len,
        vocab=tokenizer.vocab_size,
        seed=run.train.seed,
        seconds=SECONDS,
    )
    far = f"of {count} tokens, {SECONDS:g} s at most"
    with telling("sampling", lambda: f"{len(drawn)} {far}", aloud=aloud, ended="ended"):
        for token in tokens:
            drawn.append(token)
            if token == end:
                break
    # a character that the prompt leaves incomplete is completed by what follows
    given = tokenizer.decode(prompt).rstrip(UNFINISHED)
    return f"{given}▶{text_after(tokenizer, given, [*prompt, *drawn])}"


def sample_tokens(
    engine: Engine,
    prompt: list[int],
    count: int,
    *,
    window: int,
    vocab: int,
    seed: int,
    seconds: float = math.inf,
) -> Iterator[int]:
    """Yield tokens that continue `prompt`, drawn at a fixed temperature given `window` tokens.

    Yields `count` tokens, or fewer after about `seconds`. Until the window is full a token costs
    one decoding step on the key-value cache; after that the window slides, every cached position
    changes, and a token costs a forward of the window. Only the first `vocab` ids are drawn: a
    padded embedding has more rows than the tokenizer has ids.
    """
    until = time.monotonic() + seconds
    engine.gather_all_params()
    decoder = Decoder(engine, 1, min(window, len(prompt) + count))
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    for nth in range(count):
        if nth and len(tokens) <= window:  # the last token extends the cache by one position
            logits_1V = decoder.step(tokens[-1:])
        else:
            logits_1V = decoder.prompts([tokens[-window:]])
        drawn_1 = SAMPLING.draw(logits_1V[:, :vocab], generator)
        drawn = agreed(engine.groups, drawn_1, ended=time.monotonic() >= until)
        if drawn is None:
            return
        tokens += drawn
        yield tokens[-1]
