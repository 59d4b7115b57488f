"""Both stages' copies of a tied table keep the same bits, in whatever order gradients are added."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from app.choices import Dtype, ScheduleName
from app.config import (
    OptimConfig,
    ParallelConfig,
    PrecisionConfig,
    Run,
    ScheduleConfig,
    TrainConfig,
)
from app.engine.step.engine import Engine
from app.optim import grad_buckets
from tests.distributed import run_distributed
from tests.runs import TINY, engine_of, make_run, train_steps

STEPS, DP, PP = 6, 3, 2
VOCABULARY = 50  # its table divides neither by three nor into whole blocks of 64
TIED = dataclasses.replace(TINY, num_layers=2, moe=None, tie_embeddings=True, vocab_size=VOCABULARY)
FP16 = PrecisionConfig(Dtype.float16, loss_scale=1024.0)
ALL_BF16 = PrecisionConfig(Dtype.bfloat16, Dtype.bfloat16)


def run_of(
    precision: PrecisionConfig | None = None,
    schedule: str = "auto",
    overlap: bool = True,
    vpp: int = 1,
    tp: int = 1,
) -> Run:
    optim = OptimConfig(
        lr=1e-2, warmup_steps=2, bucket_numel=1000, overlap_grads=overlap, overlap_params=overlap
    )
    return make_run(
        dataclasses.replace(TIED, num_layers=PP * vpp),
        parallel=ParallelConfig(world_size=DP * PP * tp, dp=DP, pp=PP, vpp=vpp, tp=tp),
        schedule=ScheduleConfig(ScheduleName(schedule)),
        precision=precision or PrecisionConfig(),
        optim=optim,
        train=TrainConfig(steps=STEPS, seq_len=16, micro_batch=1, global_batch=2 * DP),
    )


def add_in_another_order(engine: Engine) -> None:
    """From here on the last stage adds gradients from the last rank to the first."""
    chunks = zip(engine.chunks, engine.optimizer.shards, strict=True)
    backwards = {
        shard.grad.data_ptr() for chunk, shards in chunks if chunk.last for shard in shards
    }

    def reduce_scatter(
        shard: Tensor, buffer: Tensor, group: dist.ProcessGroup, wait: bool = True
    ) -> None:
        parts = [torch.empty_like(buffer) for _ in range(group.size())]
        dist.all_gather(parts, buffer, group=group)
        first, *others = reversed(parts) if shard.data_ptr() in backwards else parts
        for part in others:
            first += part
        shard.copy_(first.chunk(group.size())[group.rank()])

    grad_buckets.reduce_scatter = reduce_scatter  # this process is about to end


def train(rank: int, run: Run) -> list[dict[str, Any]]:
    """Return this rank's part of each copy: the table, and its shards of the optimizer state."""
    engine = engine_of(run, rank)
    add_in_another_order(engine)
    train_steps(run, engine, STEPS)
    engine.gather_all_params()
    found = []
    for chunk, shards in zip(engine.chunks, engine.optimizer.shards, strict=True):
        if chunk.embedding is not None:
            pieces = [
                piece
                for shard in shards
                for piece in shard.param_shards
                if piece.spec.param is chunk.embedding.weight
            ]
            state = [
                (piece.start, *(value.numpy() for value in piece.state.values()))
                for piece in pieces
            ]
            table = chunk.embedding.weight.detach().float().numpy()
            found.append(
                {
                    "last": chunk.last,
                    "tp": engine.groups.coords.tp[0],
                    "table": table,
                    "pieces": state,
                }
            )
    return found


def whole_state(copies: list[dict[str, Any]], run: Run) -> np.ndarray:
    """Main parameter and moments of one copy, from its data-parallel ranks: 3 × elements."""
    elements = VOCABULARY * TIED.hidden_size // run.parallel.tp
    whole = np.full((3, elements), np.nan, dtype=np.float32)
    for start, *values in (piece for copy in copies for piece in copy["pieces"]):
        whole[:, start : start + len(values[0])] = values
    assert not np.isnan(whole).any(), "a part is missing"
    return whole


def expect_same_copies(run: Run) -> None:
    copies = [copy for rank in run_distributed(train, run.world_size, run) for copy in rank]
    assert len(copies) == 2 * DP * run.parallel.tp
    for tp_rank in range(run.parallel.tp):
        here = [copy for copy in copies if copy["tp"] == tp_rank]
        states = [
            whole_state([copy for copy in here if copy["last"] == last], run)
            for last in (False, True)
        ]
        assert np.array_equal(*states), np.abs(states[0] - states[1]).max()
        assert all(np.array_equal(copy["table"], here[0]["table"]) for copy in here)


def test_copies_stay_equal_when_stages_add_in_another_order():
    expect_same_copies(run_of())


@pytest.mark.full
@pytest.mark.parametrize(
    "case",
    [
        {"overlap": False},
        {"precision": ALL_BF16},
        {"precision": FP16, "overlap": False},
        {"vpp": 2, "schedule": "interleaved"},
        {"vpp": 2, "schedule": "zero_bubble_v"},  # both copies on one rank
        {"schedule": "zero_bubble_h1", "precision": ALL_BF16},
        {"tp": 2},
    ],
    ids=str,
)
def test_copies_stay_equal_everywhere(case: dict[str, Any]):
    expect_same_copies(run_of(**case))
