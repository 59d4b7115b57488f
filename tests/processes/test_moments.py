"""AdamW's moments in bf16: stored rounded, updated in fp32, the same in every layout, saved as they
are.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from app.choices import Dtype, MomentDtype, OptimizerKind
from app.config import OptimConfig, ParallelConfig, PrecisionConfig, Run
from app.engine.files.checkpoints import newest_checkpoint
from app.engine.step.engine import Engine
from app.errors import ConfigError
from app.plan.sharding.optimizers import moved_bytes
from app.planner.plan import Plan
from tests.distributed import run_distributed
from tests.parity import OneProcess, few_steps
from tests.runs import STEADY, TINY, engine_of, make_run, train_steps
from tests.training import composed, corpus_in, losses, train_rank

NARROW = dataclasses.replace(STEADY, moments=MomentDtype.bf16)
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp 2": {"dp": 2},
    "ep 2": {"dp": 2, "ep": 2},
    "pp 2": {"pp": 2},
}


def state(engine: Engine, key: str) -> list[torch.Tensor]:
    """Main parameters, or moments by their name, of all shards."""
    return [
        shard.main.clone() if key == "main" else shard.moments[key].clone()
        for shards in engine.optimizer.shards
        for shard in shards
    ]


def first_update(rank: int, runs: tuple[Run, Run]) -> None:
    """The first update is that of fp32 moments, bit for bit, and leaves these rounded."""
    wide, narrow = (engine_of(run) for run in runs)
    for run, engine in zip(runs, (wide, narrow), strict=True):
        train_steps(run, engine, 1)
    for ours, theirs in zip(state(narrow, "main"), state(wide, "main"), strict=True):
        assert torch.equal(ours, theirs)
    for name in ("exp_avg", "exp_avg_sq"):
        for ours, theirs in zip(state(narrow, name), state(wide, name), strict=True):
            assert ours.dtype is torch.bfloat16 and torch.equal(ours, theirs.bfloat16())
            assert theirs.any()
    # from then on they differ: the second update is computed from rounded moments
    for run, engine in zip(runs, (wide, narrow), strict=True):
        train_steps(run, engine, 1, first=1)
    pairs = list(zip(state(narrow, "main"), state(wide, "main"), strict=True))
    assert not all(torch.equal(ours, theirs) for ours, theirs in pairs)
    for ours, theirs in pairs:  # a moment is off by 2^-8 at most, the update by twice as much
        assert float((ours - theirs).abs().max()) <= NARROW.lr * 2**-6


def test_moments_are_stored_rounded():
    run_distributed(first_update, 1, (make_run(optim=STEADY), make_run(optim=NARROW)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_equal_one_process(layout: str):
    model = dataclasses.replace(TINY, num_layers=4)
    run = make_run(model, optim=NARROW, parallel=ParallelConfig(**LAYOUTS[layout]))
    one = OneProcess.of(dataclasses.replace(run, parallel=ParallelConfig()), 3)
    for found in run_distributed(few_steps, run.world_size, run, 3):
        one.expect(found)


@pytest.mark.parametrize("stored", MomentDtype)
def test_resumed_at_another_layout(stored: MomentDtype, tmp_path: Path):
    """Moments in the checkpoint are read in either type; with the same one no bit changes."""
    words = (*corpus_in(tmp_path / "corpus"), "train.steps=6", "checkpoint.interval=3")

    def train(folder: str, ranks: int, *more: str, told: dict[int, int]) -> dict[int, float]:
        settings = (*words, f"run_dir={tmp_path}/{folder}", f"parallel.dp={ranks}", *more)
        run_distributed(train_rank, ranks, composed(settings, ranks), told)
        return losses(tmp_path / folder)

    narrow = "optim.moments=bf16"
    whole = train("whole", 2, narrow, told={})
    train("part", 2, f"optim.moments={stored.value}", told={0: 3})
    assert newest_checkpoint(tmp_path / "part").name == "step-00000003"
    resumed = train("part", 2, narrow, "resume=auto", told={})
    assert (resumed == whole) == (stored is MomentDtype.bf16)
    assert resumed[6] == pytest.approx(whole[6], rel=1e-3)


def test_their_memory_and_passes_are_planned():
    precision = PrecisionConfig(Dtype.bfloat16)
    for name in OptimizerKind:
        wide, narrow = (
            Plan(make_run(optim=OptimConfig(name, moments=each), precision=precision))
            for each in MomentDtype
        )
        own = [
            sum(part.bytes for part in plan.memory[0].parts if part.name == "optimizer")
            for plan in (wide, narrow)
        ]
        assert own[0] > own[1]
        if name is OptimizerKind.adamw:
            assert own[0] * 8 == own[1] * 12
    kind, optim = OptimizerKind.adamw, OptimConfig(moments=MomentDtype.bf16)
    assert moved_bytes(kind, OptimConfig()) - moved_bytes(kind, optim) == 8


def test_averages_that_bf16_cannot_hold_are_refused():
    with pytest.raises(ConfigError, match=r"optim\.beta2=0\.999: changes too little per step"):
        OptimConfig(beta2=0.999, moments=MomentDtype.bf16)
    OptimConfig(beta2=0.999)
    OptimConfig(beta2=1 - 2**-7, moments=MomentDtype.bf16)
