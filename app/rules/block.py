"""Rules on blocks other than Llama's: norms, residuals and what layers with windows have."""

from __future__ import annotations

from app.choices import ActivationKind, BlockKind, LayerType, NormKind
from app.config import ModelConfig, Run
from app.errors import ConfigError, Instead

UNGATED_ONLY = frozenset((ActivationKind.gelu, ActivationKind.relu2))


def check_block(run: Run) -> None:
    """Refuse keys of the model's blocks that do not fit together."""
    model = run.model
    _check_gate(model)
    if model.moe is not None:
        usual = (("block", BlockKind.norm_before), ("activation", ActivationKind.silu))
        for name, value in usual:
            if getattr(model, name) is not value:
                rule = f"layers with experts have {value.value}"
                nearest = (value, Instead("model.moe=null"))
                raise ConfigError(f"model.{name}", getattr(model, name), rule, nearest=nearest)
    if model.mla is not None:
        for name in ("query_pre_attn_scalar", "attention_softcap"):
            if (held := getattr(model, name)) is not None:
                rule = "multi-head latent attention has scores of its own"
                raise ConfigError(f"model.{name}", held, rule, nearest=("null",))
    if model.qk_norm_whole and model.norm is NormKind.rms_plus_one:
        rule = "model.norm=rms_plus_one has norms of each head, not of all together"
        raise ConfigError(
            "model.qk_norm_whole", True, rule, nearest=(False, Instead("model.norm=rms"))
        )
    _check_sinks(model)
    local = model.local_rope_theta
    both = {LayerType.full_attention, LayerType.sliding_attention}
    if local is not None and not both <= set(model.layer_types):
        rule = "is of layers with a sliding window among layers without: model.layer_types"
        raise ConfigError("model.local_rope_theta", local, rule, nearest=("null",))


def _check_gate(model: ModelConfig) -> None:
    if not model.mlp_gate and model.moe is not None:
        rule, near = "models with experts have gates", (True, Instead("model.moe=null"))
        raise ConfigError("model.mlp_gate", False, rule, nearest=near)
    if model.mlp_gate and model.activation in UNGATED_ONLY:
        rule = "is the activation of feed-forwards without a gate"
        # experts have gates
        without = () if model.moe is not None else (Instead("model.mlp_gate=false"),)
        near = (ActivationKind.silu, *without)
        raise ConfigError("model.activation", model.activation, rule, nearest=near)


def _check_sinks(model: ModelConfig) -> None:
    if model.sinks and model.norm is NormKind.rms_plus_one and model.qk_norm:
        rule = "cannot be combined with model.norm=rms_plus_one beside model.qk_norm=true"
        nearest = (False, Instead("model.qk_norm=false"))
        raise ConfigError("model.sinks", True, rule, nearest=nearest)
    if model.sinks and model.attention_softcap is not None:
        rule = "cannot be combined with model.attention_softcap"
        either = (False, Instead("model.attention_softcap=null"))
        raise ConfigError("model.sinks", True, rule, nearest=either)
