"""Weights of a decoder layer: norm, attention, and a dense or mixture-of-experts body."""

from __future__ import annotations

from dataclasses import dataclass

from app.config import LayerSpec, ModelConfig
from app.plan.model.attention import (
    AttentionWeights,
    LatentAttentionWeights,
    attention_weights,
)
from app.plan.model.experts import MoEBodyWeights
from app.plan.model.mlp import MlpWeights
from app.plan.model.norm import NormWeights
from app.plan.model.weight import Part


@dataclass(frozen=True, slots=True)
class DenseBodyWeights(Part):
    """Norm and feed-forward of a dense layer."""

    norm: NormWeights
    mlp: MlpWeights

    @classmethod
    def of(cls, model: ModelConfig) -> DenseBodyWeights:
        """Build the weights of one layer."""
        mlp = MlpWeights.of(model.hidden_size, model.ffn_hidden_size)
        return cls(NormWeights.of_hidden(model), mlp)


@dataclass(frozen=True, slots=True)
class LayerWeights(Part):
    """All weights of a layer."""

    attn_norm: NormWeights
    attn: AttentionWeights | LatentAttentionWeights
    body: DenseBodyWeights | MoEBodyWeights

    @classmethod
    def of(cls, model: ModelConfig, spec: LayerSpec) -> LayerWeights:
        """Build a decoder layer of the model (`ModelConfig.layer_specs`)."""
        moe = model.moe if spec.routed else None
        return cls(
            NormWeights.of_hidden(model),
            attention_weights(spec.attention),
            DenseBodyWeights.of(model) if moe is None else MoEBodyWeights.of(model, moe),
        )
