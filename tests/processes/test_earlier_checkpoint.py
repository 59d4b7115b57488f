"""A checkpoint of an earlier version has today's parameter names, and a run resumes from it."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from app.choices import Score
from app.config import ModelConfig
from app.engine.checkpoint.load import Progress, load_checkpoint
from app.engine.files.names import bias_name, part_name
from tests.checkpoints import verify_checkpoint
from tests.distributed import run_distributed
from tests.rounding import expect_sums
from tests.runs import STEADY, TINY_MOE, engine_of, make_run, train_steps
from tests.training import ROOT

# Of version 0.1.0, at commit b1d652f, after three steps on one rank.
SAVED = ROOT / "tests" / "golden" / "checkpoint" / "step-00000003"
MODEL = ModelConfig(
    num_layers=2,
    hidden_size=8,
    ffn_hidden_size=8,
    num_heads=2,
    num_kv_heads=1,
    vocab_size=16,
    qk_norm=True,
    moe=dataclasses.replace(
        TINY_MOE,
        num_experts=2,
        top_k=1,
        ffn_hidden_size=8,
        shared_ffn_hidden_size=8,
        shared_gate=True,
        score=Score.sigmoid,
        z_loss_coeff=0.0,
        bias_update_rate=0.01,
    ),
)
LOSSES = (2.778151750564575, 2.776557445526123, 2.777956008911133)  # of its next steps, then
TOKENS = 8 * 16  # of a step


def resume(rank: int) -> tuple[Progress, dict[str, Any], list[float]]:
    """Return a run's state after loading, by the names in the file, and its next losses."""
    run = make_run(MODEL, optim=STEADY)
    other = dataclasses.replace(run, train=dataclasses.replace(run.train, seed=99))
    engine = engine_of(other, rank)
    progress, _ = load_checkpoint(SAVED, verify_checkpoint(SAVED), engine)
    state = {
        part_name(piece.spec.name, key): value.flatten().numpy().copy()
        for piece in engine.optimizer.param_shards()
        for key, value in piece.state.items()
    }
    state |= {
        bias_name(name): router.bias_E.numpy().copy() for name, router in engine.named_routers()
    }
    losses = [loss for loss, _ in train_steps(run, engine, len(LOSSES), first=progress.step)]
    return progress, state, losses


def test_a_run_resumes_from_a_checkpoint_of_an_earlier_version():
    ((progress, state, losses),) = run_distributed(resume, 1)
    saved = load_file(SAVED / "rank-00000.safetensors")
    del saved["random.cpu"]
    assert progress.step == len(LOSSES)
    assert state.keys() == saved.keys()
    assert all(np.array_equal(state[name], value) for name, value in saved.items())
    found, wanted = (dict(enumerate(values)) for values in (losses, LOSSES))
    expect_sums(found, wanted, TOKENS)
