"""Embedding and head: tables with a row per token of the vocabulary."""

from __future__ import annotations

from app.config import ModelConfig
from app.plan.model.weight import Weight


def table(model: ModelConfig) -> Weight:
    """The embedding's, the head's, or that of both where they are tied."""
    return Weight((model.vocab_size, model.hidden_size), tp=0)
