"""Weights of a decoder layer: norms, attention, and a dense or mixture-of-experts body."""

from __future__ import annotations

from dataclasses import dataclass

from app.choices import BlockKind
from app.config import LayerSpec, ModelConfig
from app.plan.model.attention import AnyAttentionWeights, attention_weights
from app.plan.model.experts import MoEBodyWeights
from app.plan.model.mlp import MlpWeights
from app.plan.model.norm import NormWeights
from app.plan.model.weight import Part, Weight

# blocks with a norm before attention, before the feed-forward, behind each
BEFORE_ATTENTION = frozenset(BlockKind) - {BlockKind.norm_after}
BEFORE_BODY = BEFORE_ATTENTION - {BlockKind.parallel}
BEHIND = frozenset((BlockKind.norm_after, BlockKind.norm_around))


def _norm(model: ModelConfig, having: frozenset[BlockKind]) -> NormWeights | None:
    """Return the weights of a norm over hidden states if the model's block is among `having`."""
    return NormWeights.of_hidden(model) if model.block in having else None


@dataclass(frozen=True, slots=True)
class DenseBodyWeights(Part):
    """Feed-forward of a dense layer, with the norms before and behind it that its block has."""

    norm: NormWeights | None
    mlp: MlpWeights
    out_norm: NormWeights | None

    @classmethod
    def of(cls, model: ModelConfig) -> DenseBodyWeights:
        """Build the weights of one layer."""
        mlp = MlpWeights.of(
            model.hidden_size, model.ffn_hidden_size, bias=model.mlp_bias, gate=model.mlp_gate
        )
        return cls(_norm(model, BEFORE_BODY), mlp, _norm(model, BEHIND))


@dataclass(frozen=True, slots=True)
class AheadWeights(Part):
    """What a layer of multi-token prediction has around it: norms of its two inputs, the projection
    of both to hidden states, and the norm before the head.
    """

    embedding_norm: NormWeights
    hidden_norm: NormWeights
    proj: Weight
    norm: NormWeights

    @classmethod
    def of(cls, model: ModelConfig) -> AheadWeights:
        """Build the weights of one layer; each rank holds all of the projection."""
        norm, width = NormWeights.of_hidden(model), model.hidden_size
        return cls(norm, norm, Weight((width, 2 * width)), norm)


@dataclass(frozen=True, slots=True)
class LayerWeights(Part):
    """All weights of a layer."""

    attn_norm: NormWeights | None  # before attention
    attn: AnyAttentionWeights
    attn_out_norm: NormWeights | None  # behind attention
    body: DenseBodyWeights | MoEBodyWeights
    ahead: AheadWeights | None  # of a layer that predicts a further token

    @classmethod
    def of(cls, model: ModelConfig, spec: LayerSpec) -> LayerWeights:
        """Build a layer of the model (`ModelConfig.layer_specs`)."""
        moe = model.moe if spec.routed else None
        return cls(
            _norm(model, BEFORE_ATTENTION),
            attention_weights(spec.attention),
            _norm(model, BEHIND),
            DenseBodyWeights.of(model) if moe is None else MoEBodyWeights.of(model, moe),
            AheadWeights.of(model) if spec.predicts else None,
        )
