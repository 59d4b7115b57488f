"""Shared by test_engine.py and other tests."""

from __future__ import annotations

import dataclasses

import torch

from app.choices import ActivationKind, BlockKind, LayerType, NormKind
from app.config import Run
from app.engine.build import build_engine
from app.engine.ranks.groups import create_groups
from app.engine.step.engine import Engine
from app.planner.plan import Plan
from tests.runs import LATENT, TINY

DENSE = dataclasses.replace(TINY, moe=None)
WINDOWS = dataclasses.replace(
    DENSE,
    sliding_window=4,
    layer_types=(LayerType.sliding_attention, LayerType.full_attention),
    no_rope_layers=(1, 0),
)
AROUND = dataclasses.replace(
    WINDOWS,
    block=BlockKind.norm_around,
    norm=NormKind.rms_plus_one,
    activation=ActivationKind.gelu_tanh,
    embedding_scale=0.0,
    qk_norm=True,
    attention_softcap=2.0,
    logit_softcap=30.0,
    local_rope_theta=1e3,
    no_rope_layers=(),
)
PARALLEL = dataclasses.replace(
    WINDOWS, block=BlockKind.parallel, norm=NormKind.layer, logit_scale=0.5
)
MODELS = {
    "moe": TINY,
    "dense": DENSE,
    "windows": WINDOWS,
    "latent": LATENT,
    "around": AROUND,
    "parallel": PARALLEL,
}


def engine_on(run: Run, device: str) -> Engine:
    """An engine whose weights are those of the CPU's generator, on any device."""
    plan = Plan(run)
    engine = build_engine(plan, create_groups(plan.layout, 0), torch.device(device))
    generator = torch.Generator().manual_seed(0)
    norms = 0.0 if run.model.norm is NormKind.rms_plus_one else 1.0
    for piece in engine.optimizer.param_shards():
        start = 0.0 if piece.spec.decay else norms
        piece.main.copy_(torch.randn(piece.main.shape, generator=generator) * 0.05 + start)
    engine.optimizer.restored(updates=0)
    return engine
