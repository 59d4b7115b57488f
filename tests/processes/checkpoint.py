"""Shared by test_checkpoint.py and other tests."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from app.choices import Dtype, Score
from app.config import CheckpointConfig, ModelConfig, ParallelConfig, PrecisionConfig, Run
from app.engine.checkpoint.load import Progress
from app.engine.step.engine import Engine
from tests.checkpoints import cursor_of, save_checkpoint
from tests.runs import TINY, TINY_MOE, make_run

SIGMOID = dataclasses.replace(TINY_MOE, score=Score.sigmoid, bias_update_rate=0.01)


MODELS = {
    "dense": dataclasses.replace(TINY, moe=None, tie_embeddings=True),
    "moe": TINY,
    "bias": dataclasses.replace(TINY, moe=SIGMOID),
}


def run_of(
    model: ModelConfig, dp: int = 1, ep: int = 1, params: Dtype = Dtype.float32, seed: int = 1
) -> Run:
    run = make_run(
        model,
        parallel=ParallelConfig(world_size=dp, dp=dp, ep=ep),
        precision=PrecisionConfig(params),
    )
    return dataclasses.replace(run, train=dataclasses.replace(run.train, seed=seed))


def save(folder: Path, run: Run, engine: Engine, progress: Progress, keep_last: int = 2) -> Path:
    cursor = cursor_of(8 * progress.step, engine.groups.rank)
    kept = dataclasses.replace(run, checkpoint=CheckpointConfig(keep_last=keep_last))
    return save_checkpoint(folder, engine, kept, progress=progress, cursor=cursor)
