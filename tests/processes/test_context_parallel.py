"""Sequences cut over ranks: the cut of Megatron-Core, attention across it, documents, and the order
of what moves.

Shapes: B sequences, S tokens per sequence.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from app.choices import CpComm
from app.config import DataConfig, ModelConfig, ParallelConfig, Run, TrainConfig
from app.data.feed import Batch, make_batch
from app.engine.decoding.generate import sample_tokens
from app.engine.step.engine import Engine
from app.engine.step.step import TrainingStep
from app.model.layers.layer_groups import (
    in_parts,
    in_sequence,
    own_tokens,
    ulysses_to_heads,
    ulysses_to_tokens,
)
from tests.distributed import run_distributed
from tests.oracle import oracle
from tests.parity import alone, here
from tests.processes.layouts import GRID
from tests.rounding import Values, expect_alike
from tests.runs import STEADY, engine_of, make_run, whole_gradients

GOLDEN = oracle("numerics")
DENSE = dataclasses.replace(GRID, moe=None, num_layers=2)
END, LENGTH = 7, 32  # token that ends a document, tokens of a sequence


@pytest.mark.parametrize("case", GOLDEN["cp_zigzag_positions"], ids=lambda case: f"cp{case['cp']}")
def test_tokens_of_a_rank_equal_golden(case: dict[str, Any]):
    assert [
        own_tokens(case["seq"], case["cp"], rank).tolist() for rank in range(case["cp"])
    ] == case["positions"]


@pytest.mark.parametrize("case", GOLDEN["batch_on_cp_rank"], ids=lambda case: f"cp{case['cp']}")
def test_a_batch_is_cut_like_golden(case: dict[str, Any]):
    for rank, wanted in enumerate(case["ranks"]):
        places, rows = own_tokens(case["seq"], case["cp"], rank), len(wanted["tokens"])
        tokens = torch.arange(rows * case["seq"]).view(rows, -1)
        assert (
            tokens[:, places].tolist() == wanted["tokens"]
            and places.tolist() == wanted["mask_rows"]
        )


@pytest.mark.parametrize("ranks", [2, 4])
def test_sequence_and_parts_undo_each_other(ranks: int):
    whole = torch.arange(3 * 16 * 2).view(3, 16, 2)
    parts = in_parts(whole, ranks)
    for rank, part in enumerate(parts):
        assert torch.equal(part, whole[:, own_tokens(16, ranks, rank)])
    assert torch.equal(in_sequence(parts), whole)


def trades(rank: int) -> tuple[Any, Any]:
    """Return the heads of a rank after the all-to-all, and its tokens after the way back.

    Starts from its part of consecutive numbers.
    """
    ranks = dist.get_world_size()
    whole = torch.arange(2 * 16 * ranks * 3.0).view(2, 16, ranks, 3)
    own = whole[:, own_tokens(16, ranks, rank)]
    mine = ulysses_to_heads(own, dist.group.WORLD)
    return torch.equal(mine, whole[:, :, rank]), torch.equal(
        ulysses_to_tokens(mine, dist.group.WORLD), own
    )


@pytest.mark.parametrize("ranks", [2, 4])
def test_heads_are_traded_for_tokens_and_back(ranks: int):
    assert run_distributed(trades, ranks) == [(True, True)] * ranks


def documents(step: int, mb: int, size: int) -> Batch:
    """Sequences with documents of all lengths, also ones that reach across the parts of several
    ranks.
    """
    generator = np.random.default_rng([step, mb])
    rows = generator.integers(0, DENSE.vocab_size, (size, LENGTH + 1))
    rows[rows == END] = 0
    rows[0, generator.integers(0, LENGTH, 4)] = END
    return make_batch(list(rows), END)


def masked(cp: int = 1, tp: int = 1, comm: CpComm = CpComm.all_gather) -> Run:
    train = TrainConfig(steps=20, seq_len=LENGTH, micro_batch=2, global_batch=4)
    parallel, data = (
        ParallelConfig(cp=cp, tp=tp, dp=1, cp_comm_type=comm),
        DataConfig(document_mask=True),
    )
    return make_run(DENSE, train=train, parallel=parallel, data=data, optim=STEADY)


def apart(engine: Engine) -> tuple[Values, Values]:
    """Losses of two steps over documents kept apart, and the gradients of the last one."""
    step, losses = TrainingStep(engine), {}
    for n in range(2):
        facts, _ = step([documents(n, mb, 2) for mb in range(2)], STEADY.lr, 0.1)
        losses[n] = facts.loss
    return losses, {name: value.numpy() for name, value in whole_gradients(engine).items()}


@pytest.mark.every(6)
@pytest.mark.parametrize("comm", CpComm, ids=lambda comm: comm.value)
@pytest.mark.parametrize(("cp", "tp"), [(2, 1), (4, 1), (2, 2)])
def test_documents_stay_apart_across_ranks(cp: int, tp: int, comm: CpComm):
    plain, exact = alone(masked(), apart)
    run = masked(cp, tp, comm)
    for found in run_distributed(here, run.world_size, run, apart):
        for kind in zip(found, plain, exact, strict=True):
            expect_alike(*kind)


def sampled(rank: int, parallel: ParallelConfig, model: ModelConfig) -> list[int]:
    run = make_run(
        model,
        parallel=parallel,
        train=TrainConfig(steps=20, seq_len=LENGTH, micro_batch=1, global_batch=4),
    )
    facts = dict(window=10, vocab=model.vocab_size, seed=1)
    return list(sample_tokens(engine_of(run, rank), [1, 2, 3], 12, **facts))


@pytest.mark.every(2)
@pytest.mark.parametrize(
    "degrees", [dict(tp=2), dict(cp=2), dict(tp=2, cp=2), dict(pp=2, tp=2)], ids=str
)
def test_every_layout_samples_the_same_text(degrees: dict[str, int]):
    # far from uniform, so that rounding does not decide
    model = dataclasses.replace(DENSE, init_std=0.3)
    (alone,) = run_distributed(sampled, 1, ParallelConfig(), model)
    parallel = ParallelConfig(**degrees, dp=1)
    found = run_distributed(sampled, math.prod(degrees.values()), parallel, model)
    assert found == [alone] * len(found) and len(set(alone)) > 4
