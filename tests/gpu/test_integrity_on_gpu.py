"""Replays on a GPU: equal bits without a fault, also captured, and a flipped bit is seen."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from app.choices import Dtype, GraphImpl
from app.config import CudaGraphConfig, PrecisionConfig, Run
from app.engine.build import build_engine
from app.engine.integrity.bits import bits_of
from app.engine.integrity.check import IntegrityCheck
from app.engine.ranks.groups import create_groups
from app.engine.step.step import TrainingStep
from app.planner.plan import Plan
from tests.gpu.in_process import easy_batches, one_gpu
from tests.gpu.programs import GPUS
from tests.gpu.programs import losses as losses_of_run
from tests.gpu.test_recovery_on_gpu import WHOLE
from tests.processes.captured import MODELS
from tests.runs import TWO_MICROBATCHES, make_run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
GRAPHS = {
    "eager": CudaGraphConfig(),
    "full iteration": CudaGraphConfig(GraphImpl.full_iteration, warmup_steps=1),
    "update": CudaGraphConfig(GraphImpl.full_iteration, warmup_steps=1, optimizer=True),
    "layer": CudaGraphConfig(GraphImpl.local, warmup_steps=1),
}
LAYOUTS = {
    "dp": "parallel.dp=2",
    "ep": "parallel.dp=2 parallel.ep=2",
    "ep, one graph": f"parallel.dp=2 parallel.ep=2 {WHOLE}",
    "tp": "parallel=tp2",
    "pp, partial graphs": "parallel=pp2 cuda_graph=partial",
}


def losses(run: Run, device: torch.device, checks: bool) -> list[tuple[float, float]]:
    plan = Plan(run)
    engine = build_engine(plan, create_groups(plan.layout, 0), device)
    step, found = TrainingStep(engine), []
    check = IntegrityCheck(step, 1)
    for n in range(5):
        batches = easy_batches(run, n, 0)
        report, _ = step(batches, 1e-3, 0.0)
        found.append((report.loss, report.grad_norm))
        if checks:
            assert check.after(n + 1, batches) is None
    if checks:
        weight = next(engine.chunks[0].in_order[1].parameters()).data
        once = check.replay(batches[: check.replay.count()], 1)
        weight.view(-1)[:1].view(torch.uint8)[-1] ^= 64  # a bit of the exponent
        assert check.replay(batches[: check.replay.count()], 1).sums != once.sums
    engine.release()
    return found


@pytest.mark.parametrize("model", ["dense", "moe"])
@pytest.mark.parametrize("graph", GRAPHS)
def test_checks_change_no_bit_on_a_gpu(model: str, graph: str):
    with one_gpu() as device:
        run = make_run(
            MODELS[model],
            cuda_graph=GRAPHS[graph],
            train=TWO_MICROBATCHES,
            precision=PrecisionConfig(Dtype.bfloat16),
        )
        assert losses(run, device, checks=True) == losses(run, device, checks=False)


@pytest.mark.skipif(GPUS < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("name", LAYOUTS)
def test_checks_change_no_bit_on_two_gpus(name: str, tmp_path: Path):
    words = ("precision=bf16", "train.steps=6", *LAYOUTS[name].split())
    plain = losses_of_run(tmp_path / "plain", *words)
    assert losses_of_run(tmp_path / "checked", *words, "train.replay_every=2") == plain


def test_sums_are_those_of_the_cpu():
    with one_gpu() as device:
        values = torch.randn(100_003, generator=torch.Generator().manual_seed(1))
        for dtype in (torch.float32, torch.bfloat16):
            cast = values.to(dtype)
            assert int(bits_of(cast)) == int(bits_of(cast.to(device)))
