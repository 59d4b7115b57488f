"""Shared by test_memory.py and other tests."""

from __future__ import annotations

import dataclasses
from typing import Any

from app.choices import Dtype
from app.config import (
    ModelConfig,
    MoEConfig,
    PrecisionConfig,
    Run,
    TrainConfig,
)
from app.plan.layout import ParallelLayout
from app.plan.memory.activations import (
    chunk_activations,
)
from app.plan.memory.rank_memory import RankMemory
from app.plan.stages import Stage
from app.planner.plan import Plan
from app.rules import check

DENSE = ModelConfig(
    num_layers=8, hidden_size=256, ffn_hidden_size=512, num_heads=8, num_kv_heads=8, vocab_size=1024
)


EXPERTS = MoEConfig(num_experts=16, top_k=4, ffn_hidden_size=128, shared_ffn_hidden_size=256)


MOE = dataclasses.replace(DENSE, moe=EXPERTS)


BF16 = PrecisionConfig(Dtype.bfloat16)


def run_of(model: ModelConfig = DENSE, **sections: Any) -> Run:
    chosen = {"train": TrainConfig(seq_len=512, micro_batch=2, global_batch=64), "precision": BF16}
    return check(Run(model, **(chosen | sections)))


def sizes(memory: RankMemory) -> dict[str, int]:
    return {part.name: part.bytes for part in memory.parts}


def parts_of(run: Run, rank: int = 0) -> dict[str, int]:
    return sizes(Plan(run).memory[rank])


def kept(run: Run, stage: Stage, **layout: int) -> dict[str, int]:
    grid = ParallelLayout(
        run.world_size,
        tp=run.parallel.tp,
        cp=run.parallel.cp,
        ep=run.parallel.ep,
        etp=run.parallel.etp,
        **layout,
    )
    return dict(chunk_activations(run, stage, grid).usual.kept)
