"""What is said about slow paths, and what a GPU cannot capture."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from app.choices import Dtype, GraphImpl, GraphScope
from app.config import CudaGraphConfig, PrecisionConfig, TrainConfig
from app.engine import fast_paths
from app.engine.fast_paths import check_capturable, graphs_line, slow_paths
from app.errors import ConfigError
from tests.runs import TINY, make_run

GPU, CPU = torch.device("cuda"), torch.device("cpu")
FAST = TrainConfig(seq_len=16, micro_batch=2, global_batch=8, deterministic=False)
BF16 = PrecisionConfig(Dtype.bfloat16)


def test_a_line_for_each_slow_path(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fast_paths, "moves_tiles", lambda device: True)
    assert list(slow_paths(make_run(train=FAST, precision=BF16), GPU)) == []
    assert list(slow_paths(make_run(), CPU)) == []
    monkeypatch.setattr(fast_paths, "triton", None)
    monkeypatch.setattr(fast_paths, "moves_tiles", lambda device: False)
    slow = dict(slow_paths(make_run(precision=PrecisionConfig(Dtype.float16)), GPU))
    assert list(slow) == ["kernels", "attention", "experts", "gradients"]
    assert all(len(line) < 150 and "\n" not in line for line in slow.values()), slow
    dense = dataclasses.replace(TINY, moe=None)
    assert list(dict(slow_paths(make_run(dense), GPU))) == ["kernels", "attention"]
    assert "gradients" not in dict(slow_paths(make_run(), GPU))  # fp32 is added to fp32


WHOLE = CudaGraphConfig(GraphImpl.full_iteration)


def test_experts_in_other_types_are_not_captured():
    for graph in (
        WHOLE,
        CudaGraphConfig(GraphImpl.local),
        CudaGraphConfig(GraphImpl.local, (GraphScope.moe,)),
    ):
        with pytest.raises(ConfigError, match="precision=bf16 or cuda_graph=partial"):
            check_capturable(make_run(cuda_graph=graph), GPU)
        check_capturable(make_run(cuda_graph=graph), CPU)
        check_capturable(make_run(cuda_graph=graph, precision=BF16), GPU)
    check_capturable(
        make_run(
            cuda_graph=CudaGraphConfig(GraphImpl.local, (GraphScope.attn, GraphScope.moe_router))
        ),
        GPU,
    )
    check_capturable(make_run(dataclasses.replace(TINY, moe=None), cuda_graph=WHOLE), GPU)


def test_what_is_captured_is_said():
    attention = make_run(
        cuda_graph=CudaGraphConfig(GraphImpl.local, (GraphScope.attn,), warmup_steps=2)
    )
    assert graphs_line(attention, GPU) == "attn, captured in step 3 of this process"
    assert graphs_line(make_run(cuda_graph=CudaGraphConfig(GraphImpl.local)), GPU).startswith(
        "whole layers, captured in step 4"
    )
    assert "stand-in" in graphs_line(make_run(cuda_graph=WHOLE), CPU)
