"""Embedding and head: matrices with a row per token of the vocabulary."""

from __future__ import annotations

from app.config import ModelConfig
from app.plan.model.weight import Weight


def table(model: ModelConfig) -> Weight:
    """Return the weight of the embedding or of the head, or of both if tied."""
    return Weight((model.vocab_size, model.hidden_size), tp=0, linear=False)
