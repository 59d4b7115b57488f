from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from app.data import baseline
from app.data.baseline import ngram_loss


def slow_loss(train: list[int], validation: list[int], order: int) -> float:
    """The formula, one token at a time."""
    counts = {
        n: Counter(tuple(train[i : i + n]) for i in range(len(train) - order + 1))
        for n in range(order + 1)
    }
    vocab = max(train + validation) + 1

    def probability(run: tuple[int, ...]) -> float:
        if not run:
            return 1 / vocab
        longer, shorter = counts[len(run)][run], counts[len(run) - 1][run[:-1]]
        return (longer + baseline.STRENGTH * probability(run[1:])) / (shorter + baseline.STRENGTH)

    runs = [tuple(validation[i : i + order]) for i in range(len(validation) - order + 1)]
    return -sum(math.log(probability(run)) for run in runs) / len(runs)


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_equals_the_formula(order: int):
    generator = np.random.default_rng(0)
    train = (generator.integers(0, 4, 500) ** 2).astype(np.uint16)
    validation = generator.integers(0, 11, 200).astype(np.uint16)
    assert ngram_loss(train, validation, order) == pytest.approx(
        slow_loss(train.tolist(), validation.tolist(), order), rel=1e-12
    )


def test_probabilities_sum_to_one():
    """Over all next tokens of one context."""
    train = np.array([0, 1, 2, 0, 1, 3, 0, 1, 2, 4])
    losses = [ngram_loss(train, np.array([0, 1, w]), 3) for w in range(5)]
    assert sum(math.exp(-loss) for loss in losses) == pytest.approx(1, rel=1e-12)


def test_learns_a_cycle_and_large_ids():
    train = np.tile(np.array([5, 120_000, 7]), 4000)
    assert ngram_loss(train, train[:300], 3) < 0.1
    with pytest.raises(ValueError, match="order=4: 4 ids below 120001 do not fit"):
        ngram_loss(train, train, 4)
    with pytest.raises(ValueError, match="2 and 12000 tokens, each split needs 3"):
        ngram_loss(train[:2], train, 3)


def test_counts_only_the_first_tokens(monkeypatch: pytest.MonkeyPatch):
    train = np.random.default_rng(0).integers(0, 9, 1000)
    monkeypatch.setattr(baseline, "TRAIN_TOKENS", 400)
    assert ngram_loss(train, train, 2) == ngram_loss(train[:400], train, 2)
