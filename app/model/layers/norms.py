"""Norms over hidden states, by kind."""

from __future__ import annotations

from app.config import ModelConfig
from app.model.layers.layers import RMSNorm
from app.plan.model.norm import NormWeights


def norm_of_hidden(model: ModelConfig) -> RMSNorm:
    """Build a norm over hidden states, of the kind that the model has."""
    return RMSNorm(NormWeights.of_hidden(model), model.norm_eps)
