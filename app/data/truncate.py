"""Conversations longer than a sequence: what is kept of each, and a line about what is lost.

Shapes: D conversations.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from app.choices import Truncate
from app.data.marks import trained
from app.data.packing import Documents
from app.errors import ConfigError, Instead
from app.plan.formatting import count_of

KEY = "data.truncate"


@dataclass(frozen=True, slots=True)
class Truncated:
    """Conversations of at most S + 1 tokens, of which the first is not predicted."""

    documents: Documents
    said: str | None  # what was cut and dropped; None: nothing


def truncated(documents: Documents, seq_len: int, how: Truncate, of: str = "") -> Truncated:
    """Return conversations cut to S + 1 tokens, without those that have no trained token left.

    `of` names their source in messages. Raises ConfigError for `Truncate.error`, and if no
    conversation is left.
    """
    size = seq_len + 1
    long_D = documents.lengths_D > size
    if not long_D.any():
        return Truncated(documents, None)
    counts = f"{int(long_D.sum()):,} of {len(documents):,} conversations{of}"
    if how is Truncate.error:
        longest = int(documents.lengths_D.max())
        rule = f"{counts} are longer than train.seq_len={seq_len}; the longest needs {longest - 1}"
        near = (Truncate.right.value, Instead(f"train.seq_len={longest - 1}"))
        raise ConfigError(KEY, how, rule, nearest=near)
    kept = _cut(documents, size, how)
    had_D = _trained(documents, long_D)
    left_D = np.zeros_like(had_D) if how is Truncate.drop else _trained(kept, long_D)
    stays_D = ~long_D | (left_D > 0)
    if not stays_D.any():
        rule = f"{counts} are longer, and none has a trained token left with {KEY}={how.value}"
        raise ConfigError("train.seq_len", seq_len, rule, advice=f"raise it, or set {KEY}")
    kept = kept.select(stays_D)
    lost, trained_lost = int(documents.lengths_D.sum() - kept.lengths_D.sum()), had_D - left_D
    share = trained_lost.sum() / max(1, had_D.sum())
    said = f"{counts} are longer than train.seq_len={seq_len}: {KEY}={how.value} leaves out "
    said += f"{lost:,} tokens, {int(trained_lost.sum()):,} of them trained ({share:.1%} of theirs)"
    dropped = int((~stays_D).sum())
    if how is not Truncate.drop and dropped:
        said += f"; {count_of(dropped, 'conversation')} without a trained token left dropped"
    return Truncated(kept, said)


def _cut(documents: Documents, size: int, how: Truncate) -> Documents:
    found = documents.first(size)
    if how is not Truncate.left:
        return found
    return replace(found, start_D=documents.start_D + documents.lengths_D - found.lengths_D)


def _trained(documents: Documents, chosen_D: np.ndarray) -> np.ndarray:
    """Return the trained and predicted tokens of the chosen conversations, 0 of others: [D]."""
    found_D = np.zeros(len(documents), np.int64)
    for number in np.flatnonzero(chosen_D).tolist():
        tokens = documents.read(number, 1, int(documents.lengths_D[number]))
        found_D[number] = np.count_nonzero(trained(tokens))
    return found_D
