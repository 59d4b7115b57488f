"""Dropout of adapters on a GPU: the same bits in graphs, with recomputation, and when resumed."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from app.choices import Dtype, GraphImpl, GraphScope, Recompute
from app.config import CudaGraphConfig, LoraConfig, PrecisionConfig, RecomputeConfig, Run
from app.engine.files.checkpoints import CHECKPOINTS, newest_checkpoint
from tests.gpu.in_process import trained_alone
from tests.runs import TINY, make_run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
STEPS = 8
LORA = LoraConfig(rank=8, dropout=0.25)
PARTS = (GraphScope.attn, GraphScope.mlp)
SAME_BITS: dict[str, dict[str, object]] = {
    "graphs of parts": {"cuda_graph": CudaGraphConfig(GraphImpl.local, PARTS, warmup_steps=2)},
    "graph of a step": {"cuda_graph": CudaGraphConfig(GraphImpl.full_iteration, warmup_steps=2)},
    "graph of a step and update": {
        "cuda_graph": CudaGraphConfig(GraphImpl.full_iteration, warmup_steps=2, optimizer=True)
    },
    "whole layers again": {"recompute": RecomputeConfig(full=True)},
    "graph with activations again": {
        "cuda_graph": CudaGraphConfig(GraphImpl.full_iteration, warmup_steps=2),
        "recompute": RecomputeConfig(phases=(Recompute.norm, Recompute.mlp_act)),
    },
}


def run_with(lora: LoraConfig = LORA, **sections: object) -> Run:
    dense = dataclasses.replace(TINY, moe=None)
    return make_run(dense, precision=PrecisionConfig(params=Dtype.bfloat16), lora=lora, **sections)


@pytest.fixture(scope="module")
def eager() -> list[list[float]]:
    return trained_alone(run_with(), steps=STEPS)


@pytest.mark.parametrize("name", SAME_BITS)
def test_graphs_and_recomputation_drop_the_same(eager: list[list[float]], name: str):
    assert trained_alone(run_with(**SAME_BITS[name]), steps=STEPS) == eager


def test_a_resumed_run_drops_the_same(eager: list[list[float]], tmp_path: Path):
    first = trained_alone(run_with(), steps=4, save_to=tmp_path / CHECKPOINTS)
    path = newest_checkpoint(tmp_path)
    assert first + trained_alone(run_with(), steps=STEPS, resume=path) == eager
    assert trained_alone(run_with(dataclasses.replace(LORA, dropout=0.0)), steps=4) != eager[:4]
