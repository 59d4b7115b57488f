"""Weights alone are loaded from every layout onto every other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from app.config import Run
from app.engine.checkpoint.load import Progress
from app.engine.decoding.trained import Saved, TrainedModel, without_gradients
from app.engine.files.checkpoints import complete_checkpoints
from app.engine.ranks.groups import create_groups
from app.errors import ConfigError
from app.planner.plan import Plan
from tests.cases import chosen
from tests.checkpoints import save_checkpoint
from tests.distributed import run_distributed
from tests.processes.decoding import MODELS, PROMPTS, alone, greedy, run_of
from tests.rounding import expect_alike
from tests.runs import engine_of

LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "tp 2": {"tp": 2},
    "ep 2": {"ep": 2, "dp": 2},
    "pp 2": {"pp": 2},
    "cp 2": {"cp": 2},
    "tp 2 pp 2": {"tp": 2, "pp": 2},
}
CASES = [(name, first, then) for name in MODELS for first in LAYOUTS for then in LAYOUTS
         if (MODELS[name].moe or "ep 2" not in (first, then))
         and (MODELS[name].linear_attention is None or "cp 2" not in (first, then))]  # fmt: skip
QUICK = [("moe", "tp 2", "one"), ("moe", "one", "ep 2"), ("dense", "pp 2", "tp 2"),
         ("latent", "tp 2 pp 2", "one")]  # fmt: skip


def save(rank: int, run: Run, folder: Path) -> None:
    engine = engine_of(run, rank)
    for _, router in engine.named_routers():  # learnt in training
        router.bias_E.copy_(torch.arange(len(router.bias_E)))
    save_checkpoint(folder, engine, run, Progress(1), cursor={"sequences": 0})


def load(rank: int, run: Run, folder: Path) -> tuple[Any, set[float]]:
    plan = Plan(run)
    saved = Saved.at(complete_checkpoints(folder)[-1])
    groups = create_groups(plan.layout, rank)
    with without_gradients(torch.device("cpu")):
        model = TrainedModel.load(saved, plan, groups, torch.device("cpu"))
        biases = {
            float(value)
            for chunk in model.chunks
            for name, buffer in chunk.named_buffers()
            if name.endswith("bias_E")
            for value in buffer
        }
        said = greedy(model)
        assert all(weight.is_inference() for chunk in model.chunks for weight in chunk.parameters())
    return said, biases


@pytest.mark.every(4)
@pytest.mark.parametrize(("name", "first", "then"), chosen(CASES, QUICK))
def test_checkpoint_of_any_layout_generates_same_text(
    name: str, first: str, then: str, tmp_path: Path
):
    before, run = run_of(name, **LAYOUTS[first]), run_of(name, **LAYOUTS[then])
    run_distributed(save, before.world_size, before, tmp_path)
    sequences, _, plain, exact = alone(name)
    for (said, found), biases in run_distributed(load, run.world_size, run, tmp_path):
        assert said == sequences
        expect_alike(found, plain, exact, case=then)
        moe = run.model.moe
        assert biases == (set(map(float, range(moe.num_experts))) if moe else set())
    assert len(PROMPTS) > 1


def test_a_broken_file_is_one_line(tmp_path: Path):
    run = run_of("moe", tp=2)
    run_distributed(save, 2, run, tmp_path)
    file = sorted(tmp_path.glob("step-*/rank-00001*"))[0]
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(AssertionError, match=r"checkpoint=.*rank-00001.* was changed after"):
        run_distributed(load, 2, run, tmp_path)
    file.unlink()
    with pytest.raises(ConfigError, match=r"^checkpoint=.*rank-00001.* is missing"):
        Saved.at(file.parent)
