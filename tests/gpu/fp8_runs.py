"""Shared by test_fp8_runs.py and other tests."""

from __future__ import annotations

from app.config import (
    ModelConfig,
)

FOUR = ModelConfig(
    num_layers=4,
    hidden_size=256,
    ffn_hidden_size=512,
    num_heads=4,
    num_kv_heads=2,
    vocab_size=512,
)
