"""Shared by test_fp8_state.py and other tests."""

from __future__ import annotations

import dataclasses

from app.choices import GraphImpl
from app.config import CudaGraphConfig
from tests.runs import TINY

DENSE = dataclasses.replace(TINY, num_layers=2, ffn_hidden_size=64, moe=None)


STEPS, WARMUP = 5, 1


WHOLE = CudaGraphConfig(GraphImpl.full_iteration, warmup_steps=WARMUP)
