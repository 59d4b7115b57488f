"""Shared by test_continued_settings.py and other tests."""

from __future__ import annotations

TINY = (
    "model=dense_tiny", "model.num_layers=1", "model.hidden_size=32", "model.num_heads=2",
    "model.num_kv_heads=2", "model.ffn_hidden_size=64", "data=text", "data.path=text.txt",
    "train.seq_len=32", "train.micro_batch=2", "train.global_batch=4", "train.eval_sequences=4",
    "train.sample_tokens=8", "train.device=cpu", "log=console", "checkpoint.interval=2",
    "optim.decay_steps=100", "optim.warmup_steps=1",
)  # fmt: skip
