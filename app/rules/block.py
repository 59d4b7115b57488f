"""Rules on blocks other than Llama's: norms, residuals and what layers with windows have."""

from __future__ import annotations

from app.choices import ActivationKind, BlockKind, LayerType, NormKind
from app.config import ModelConfig, Run
from app.errors import ConfigError, Instead


def check_block(run: Run) -> None:
    """Refuse keys of the model's blocks that do not fit together."""
    model = run.model
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
    if local is not None and len(set(model.layer_types)) < len(LayerType):
        rule = "is of layers with a sliding window among layers without: model.layer_types"
        raise ConfigError("model.local_rope_theta", local, rule, nearest=("null",))


def _check_sinks(model: ModelConfig) -> None:
    if model.sinks and model.norm is NormKind.rms_plus_one and model.qk_norm:
        rule = "cannot be combined with model.norm=rms_plus_one beside model.qk_norm=true"
        nearest = (False, Instead("model.qk_norm=false"))
        raise ConfigError("model.sinks", True, rule, nearest=nearest)
    if model.sinks and model.attention_softcap is not None:
        rule = "cannot be combined with model.attention_softcap"
        either = (False, Instead("model.attention_softcap=null"))
        raise ConfigError("model.sinks", True, rule, nearest=either)
