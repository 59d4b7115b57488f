"""Losses of tokens are those of whole forwards, at every layout."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from app.config import Run
from app.data.tokenizer import ByteTokenizer
from app.engine.decoding import scoring
from app.engine.decoding.decoder import Decoder
from app.engine.decoding.scoring import (
    Question,
    ScoredWindow,
    accuracy,
    perplexity,
    window_losses,
    windows,
)
from app.engine.step.engine import Engine
from tests.cases import chosen
from tests.distributed import run_distributed
from tests.parity import exact_engine, here
from tests.processes.decoding import LAYOUTS, PAIRS, run_of
from tests.rounding import Values, expect_alike, numbered

TEXTS = ([5, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8], [9, 7, 9], [3, 2])
WINDOWS = [window for text in TEXTS for window in windows(text, context=5, stride=2)]


def found_losses(engine: Engine) -> Values:
    """Rank 0 alone knows the windows."""
    told = WINDOWS if engine.groups.rank == 0 else []
    found = list(window_losses(Decoder(engine, 3, 0), told))
    assert [window for window, _ in found] == WINDOWS
    return numbered(lost for _, lost in found)


@torch.no_grad()
def by_hand(engine: Engine) -> Values:
    (chunk,) = engine.chunks
    found = []
    for window in WINDOWS:
        tokens_S = torch.tensor(window.tokens)
        context = chunk.context(torch.arange(len(tokens_S))[None], None)
        logits_SV = chunk.logits(chunk(tokens_S[None], context).x)[0]
        said_S = logits_SV.log_softmax(-1)[:-1].gather(1, tokens_S[1:, None])[:, 0]
        found.append(-said_S[window.first - 1 :].sum().item())
    return numbered(found)


def exactly(rank: int, run: Run) -> Values:
    with exact_engine(rank, run) as engine:
        return by_hand(engine)


QUICK = [("moe", "tp 2 ep 2"), ("latent", "pp 2"), ("dense", "cp 2"), ("moe", "ep 2")]


@pytest.mark.every(3)
@pytest.mark.parametrize(("name", "layout"), chosen([*PAIRS, ("moe", "")], [*QUICK, ("moe", "")]))
def test_losses_are_those_of_whole_forwards(name: str, layout: str):
    one = run_of(name)
    (plain,) = run_distributed(here, 1, one, by_hand)
    (exact,) = run_distributed(exactly, 1, one)
    run = run_of(name, **LAYOUTS.get(layout, {}))
    for found in run_distributed(here, run.world_size, run, found_losses):
        expect_alike(found, plain, exact, case=layout)


def scored(engine: Engine) -> tuple[float, float, int]:
    heard: list[int] = []
    found = perplexity(Decoder(engine, 2, 0), WINDOWS, heard.append)
    assert heard[-1] == found.tokens == sum(len(text) - 1 for text in TEXTS)
    return found.nats, found.perplexity, found.tokens


def test_perplexity_is_the_exponential_of_the_mean():
    run = run_of("dense")
    ((nats, found, tokens),) = run_distributed(here, 1, run, scored)
    (losses,) = run_distributed(here, 1, run, by_hand)
    assert nats == pytest.approx(sum(losses.values()), rel=1e-5)
    assert found == pytest.approx(math.exp(nats / tokens))


def test_accuracy_by_hand(monkeypatch: pytest.MonkeyPatch):
    questions = [
        Question("", ("xa", "xbbb"), 0),  # least as a whole
        Question("", ("xa", "xbbb"), 1),  # least per character
        Question("", ("xc", "xddd", "xe"), 2),
    ]
    nats = [3.0, 4.0, 3.0, 4.0, 2.0, 9.0, 1.0]

    def lost(decoder: object, told: list[ScoredWindow]) -> Iterator[tuple[ScoredWindow, float]]:
        yield from zip(told, nats, strict=True)

    monkeypatch.setattr(scoring, "window_losses", lost)
    heard: list[int] = []
    found = accuracy(None, questions, ByteTokenizer(), heard.append)
    assert (found.questions, found.plain, found.normalised) == (3, 2 / 3, 2 / 3)
    assert heard == list(range(1, 8))


def test_the_first_token_does_not_count():
    assert ScoredWindow((1, 2, 3), 1).counted == 2
