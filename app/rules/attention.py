"""Rules on the library that computes attention."""

from __future__ import annotations

from app.choices import AttentionBackendKind, Device, Dtype
from app.config import Run
from app.errors import ConfigError, Instead

KEY = "train.attention_backend"
ON_CPU = "Transformer Engine computes on GPUs, and this run does on a CPU"
MULTIPLE, WIDEST = 8, 256  # of the width of a head, for cuDNN


def check_attention(run: Run) -> None:
    """Refuse Transformer Engine's attention where it has no kernel."""
    asked = run.train.attention_backend
    if asked is not AttentionBackendKind.transformer_engine:
        return
    torch = AttentionBackendKind.torch
    if run.train.device is Device.cpu:
        raise ConfigError(KEY, asked, ON_CPU, nearest=torch)
    if run.precision.params is Dtype.float32:
        rule = "attends in 16 bits, and parameters are float32"
        raise ConfigError(KEY, asked, rule, nearest=(torch, Instead("precision=bf16")))
    if run.model.attention_softcap is not None:
        rule = "has no kernel for scores with model.attention_softcap"
        raise ConfigError(KEY, asked, rule, nearest=torch)
    if run.data.document_mask and run.train.deterministic:
        rule = "sums gradients in no fixed order under data.document_mask=true"
        raise ConfigError(KEY, asked, rule, nearest=(torch, Instead("train.deterministic=false")))
    width = run.model.head_width
    if width % MULTIPLE or width > WIDEST:
        rule = f"takes heads whose width is a multiple of {MULTIPLE}, {WIDEST} at most, not {width}"
        raise ConfigError(KEY, asked, rule, nearest=torch)
