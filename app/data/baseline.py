"""What counting alone predicts: the loss that a language model has to beat."""

from __future__ import annotations

import numpy as np

TRAIN_TOKENS = 20_000_000  # counted at most
STRENGTH = 20.0  # pseudo-counts given to the prediction from the shorter context
Table = tuple[np.ndarray, np.ndarray]  # sorted keys and their counts


def ngram_loss(train_tokens: np.ndarray, validation_tokens: np.ndarray, order: int) -> float:
    """Nats per token of an interpolated n-gram model (order 2: bigram, 3: trigram) on the
    validation tokens.

    p_n(w | h) = (c(h w) + a·p_{n-1}(w | h')) / (c(h) + a), where c counts training tokens, h' is h
    without its oldest token and p_0 is uniform over the ids (MacKay & Peto 1995); a = 20. Only the
    first TRAIN_TOKENS training tokens are counted; the first order - 1 validation tokens are
    context only. Raises ValueError when a key of `order` ids does not fit into 63 bits or a split
    is shorter than `order`.
    """
    vocab = int(max(train_tokens.max(initial=0), validation_tokens.max(initial=0))) + 1
    if vocab**order >= 1 << 63:
        raise ValueError(f"order={order}: {order} ids below {vocab} do not fit into 63 bits")
    if min(len(train_tokens), len(validation_tokens)) < order:
        raise ValueError(
            f"order={order}: {len(train_tokens)} and {len(validation_tokens)} tokens, each "
            f"split needs {order}"
        )
    tables = [np.unique(_keys(train_tokens[:TRAIN_TOKENS], order, vocab), return_counts=True)]
    while len(tables) <= order:
        tables.insert(0, _without_last(tables[0], vocab))
    grams, weights = np.unique(_keys(validation_tokens, order, vocab), return_counts=True)
    return float(-np.average(np.log(_probability(grams, tables, vocab)), weights=weights))


def _keys(tokens: np.ndarray, order: int, vocab: int) -> np.ndarray:
    """Every run of `order` tokens as one number, the oldest token in the highest place."""
    count = len(tokens) - order + 1
    keys = np.zeros(count, dtype=np.int64)
    for place in range(order):
        keys *= vocab
        keys += tokens[place : place + count]
    return keys


def _without_last(table: Table, vocab: int) -> Table:
    """Counts of the contexts in a table of runs: the runs without their newest token."""
    contexts, first = np.unique(table[0] // vocab, return_index=True)
    return contexts, np.add.reduceat(table[1], first)


def _probability(grams: np.ndarray, tables: list[Table], vocab: int) -> np.ndarray:
    """Probability of each run's newest token given the others; tables[n] counts n-token runs."""
    probability = np.full(len(grams), 1 / vocab)
    for order in range(1, len(tables)):
        runs = grams % vocab**order
        seen = _count(tables[order], runs)
        contexts = _count(tables[order - 1], runs // vocab)
        probability = (seen + STRENGTH * probability) / (contexts + STRENGTH)
    return probability


def _count(table: Table, keys: np.ndarray) -> np.ndarray:
    """How often each key was counted, 0 for those not in the table."""
    found = np.minimum(np.searchsorted(table[0], keys), len(table[0]) - 1)
    return np.where(table[0][found] == keys, table[1][found], 0)
