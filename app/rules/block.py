"""Rules on blocks other than Llama's: norms, residuals and what layers with windows have."""

from __future__ import annotations

from app.choices import BlockKind, LayerType
from app.config import Run
from app.errors import ConfigError, Instead


def check_block(run: Run) -> None:
    """Refuse keys of the model's blocks that do not fit together."""
    model = run.model
    if model.moe is not None and model.block is not BlockKind.norm_before:
        rule = "layers with experts have norms before attention and experts only"
        near = (BlockKind.norm_before, Instead("model.moe=null"))
        raise ConfigError("model.block", model.block, rule, nearest=near)
    local = model.local_rope_theta
    if local is not None and len(set(model.layer_types)) < len(LayerType):
        rule = "is of layers with a sliding window among layers without: model.layer_types"
        raise ConfigError("model.local_rope_theta", local, rule, nearest=("null",))
