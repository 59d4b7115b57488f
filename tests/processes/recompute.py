"""Shared by test_recompute.py and other tests."""

from __future__ import annotations

from typing import Any

import torch

from app.config import Run
from tests.runs import engine_of, train_steps, whole_gradients, whole_parameters


def steps(rank: int, run: Run) -> dict[str, Any]:
    torch.manual_seed(0)
    engine = engine_of(run, rank)
    losses = train_steps(run, engine, 2)
    found = whole_gradients(engine) | {
        f"{name}.value": value for name, value in whole_parameters(engine).items()
    }
    return {"losses": losses} | {name: value.numpy().tobytes() for name, value in found.items()}
