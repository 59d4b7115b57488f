"""Embedding and head: matrices with a row per token of the vocabulary."""

from __future__ import annotations

from app.config import ModelConfig
from app.plan.model.weight import Weight

ALIGNED = 8  # elements that make 16 bytes in bf16: GEMMs load so many of a row at once
ROW = 64  # elements that padded rows of logits are a multiple of: 128 bytes in bf16


def table(model: ModelConfig) -> Weight:
    """Return the weight of the embedding or of the head, or of both if tied."""
    return Weight((model.vocab_size, model.hidden_size), tp=0, linear=False)


def logits_stride(rows: int) -> int:
    """Return the elements from one token's logits to the next one's, given `rows` of the head.

    More than `rows` where rows of that length would not all begin at a multiple of 16 bytes, which
    the fast GEMMs need.
    """
    return rows if rows % ALIGNED == 0 else -(-rows // ROW) * ROW
