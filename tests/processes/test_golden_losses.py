"""Losses of five steps as they have been: a change that moves them must say so by changing tests/golden/losses_*.txt."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from app.choices import Score
from app.config import ModelConfig, Run
from app.engine.step import TrainingStep
from tests.distributed import run_distributed
from tests.runs import TINY, TINY_MOE, batches_of, engine_of, make_run, train_steps

GOLDEN = Path(__file__).parent.parent / "golden"
BIASED = dataclasses.replace(TINY, moe=dataclasses.replace(TINY_MOE, score=Score.sigmoid, bias_update_rate=0.01))
MODELS = {"moe": TINY, "dense": dataclasses.replace(TINY, moe=None), "biased": BIASED}


def five_losses(rank: int, run: Run) -> list[float]:
    return [loss for loss, _ in train_steps(run, engine_of(run, rank), 5)]


@pytest.mark.parametrize("name", MODELS)
def test_losses_are_what_they_were(name: str):
    expected = [float(line) for line in (GOLDEN / f"losses_{name}.txt").read_text().split()]
    assert run_distributed(five_losses, 1, make_run(MODELS[name]))[0] == pytest.approx(expected, rel=1e-5)


def biases_around_a_skipped_step(rank: int, model: ModelConfig) -> list[torch.Tensor]:
    run = make_run(model)
    engine = engine_of(run, rank)
    step, seen = TrainingStep(engine), []
    for poison in (0.0, float("nan"), 0.0):
        engine.chunks[0].norm.weight.data[0] += poison
        step(batches_of(run, 0, 0), run.optim.lr, 0.1)
        seen.append(torch.stack([router.bias_E.clone() for _, _, router in engine.routers()]))
        engine.chunks[0].norm.weight.data.nan_to_num_(1.0)
    return [bias.numpy() for bias in seen]


def test_the_selection_bias_stands_still_on_a_skipped_step():
    first, skipped, third = run_distributed(biases_around_a_skipped_step, 1, BIASED)[0]
    assert (first != 0).any() and (first == skipped).all() and (third != skipped).any()
