"""Shared by test_init_from.py and other tests."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from app.config import ParallelConfig, Run, TrainConfig
from app.engine.build import build_engine
from app.engine.ranks.groups import create_groups
from app.engine.start.start import open_pretrained
from app.engine.step.engine import Engine
from app.hf.their_model import TheirModel
from app.planner.plan import Plan
from tests.hf_folders import KEY
from tests.runs import make_run, train_steps

LAYOUTS = {
    "tp2": {"tp": 2},
    "ep4": {"ep": 4, "dp": 4},
    "pp2·vpp2": {"pp": 2, "vpp": 2},
    "etp2": {"tp": 2, "etp": 2, "ep": 2, "dp": 2},
    "tp2·pp2·ep2": {"tp": 2, "pp": 2, "ep": 2, "etp": 1},
}


# of models with 3 and with 4 layers, for so many stages per rank
STAGES = {1: {3: "Ett|tL", 4: "Ett|ttL"}, 2: {3: "Et|t|t|L", 4: "Et|t|t|tL"}}


def run_from(folder: Path, layout: dict[str, int]) -> Run:
    model = dataclasses.replace(TheirModel.read(folder, KEY).model, init_from=str(folder))
    if model.moe:  # routers' losses are none of `transformers`' here
        model = dataclasses.replace(model, moe=dataclasses.replace(model.moe, aux_loss_coeff=0.0))
    if layout.get("pp") == 2:
        layout = {**layout, "layout": STAGES[layout.get("vpp", 1)][model.num_layers]}
    train = TrainConfig(steps=4, seq_len=16, micro_batch=1, global_batch=8)
    return make_run(model, parallel=ParallelConfig(**layout), train=train)


def engine_from(rank: int, run: Run) -> Engine:
    plan = Plan(run)
    groups = create_groups(plan.layout, rank)
    pretrained = open_pretrained(run, groups, rank)
    return build_engine(plan, groups, torch.device("cpu"), pretrained=pretrained)


def first_losses(rank: int, run: Run) -> list[tuple[float, float]]:
    return train_steps(run, engine_from(rank, run), 2)
