"""The planned memory against torch's allocator: the peak of a few training steps on one GPU."""

from __future__ import annotations

import dataclasses
import gc

import pytest
import torch

from app.choices import Dtype, Score
from app.config import ModelConfig, MoEConfig, PrecisionConfig, RecomputeConfig, Run, TrainConfig
from app.engine.build import build_engine
from app.engine.ranks.groups import create_groups, process_world
from app.engine.step.step import TrainingStep
from app.planner.plan import Plan
from tests.runs import batches_of, make_run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DENSE = ModelConfig(
    num_layers=4,
    hidden_size=1024,
    ffn_hidden_size=2816,
    num_heads=16,
    num_kv_heads=16,
    vocab_size=32768,
)
EXPERTS = MoEConfig(
    num_experts=32, top_k=4, ffn_hidden_size=512, shared_ffn_hidden_size=512, z_loss_coeff=0.001
)
MODELS = {
    "dense": DENSE,
    "tied_qk_norm": dataclasses.replace(DENSE, qk_norm=True, tie_embeddings=True),
    "softmax": dataclasses.replace(DENSE, moe=EXPERTS),
    "sigmoid": dataclasses.replace(
        DENSE, moe=dataclasses.replace(EXPERTS, score=Score.sigmoid, shared_gate=True)
    ),
}
STEPS = 3


def run_of(model: ModelConfig, dtype: Dtype, micro_batch: int, full: bool = False) -> Run:
    train = TrainConfig(
        seq_len=2048, micro_batch=micro_batch, global_batch=2 * micro_batch, deterministic=False
    )
    return make_run(
        model, train=train, precision=PrecisionConfig(dtype), recompute=RecomputeConfig(full)
    )


def peak_of(plan: Plan) -> int:
    """Bytes of tensors at the peak of building and training."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before, run = torch.cuda.memory_allocated(), plan.run
    with torch.cuda.stream(torch.cuda.Stream()), process_world(0, 1, torch.device("cuda:0")):
        engine = build_engine(plan, create_groups(plan.layout, 0), torch.device("cuda:0"))
        step = TrainingStep(engine)
        for n in range(STEPS):
            step(batches_of(run, n, 0), run.optim.lr, run.optim.weight_decay)
        torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("micro_batch", [1, 2])
@pytest.mark.parametrize("dtype", [Dtype.float32, Dtype.bfloat16], ids=lambda dtype: dtype.value)
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_the_peak_is_within_a_tenth_of_the_plan(model: ModelConfig, dtype: Dtype, micro_batch: int):
    plan = Plan(run_of(model, dtype, micro_batch))
    assert peak_of(plan) == pytest.approx(plan.busiest.allocated, rel=0.1)


def test_fewer_key_heads_in_bf16_and_full_recomputation():
    grouped = dataclasses.replace(MODELS["softmax"], num_kv_heads=4)
    for full in (False, True):
        plan = Plan(run_of(grouped, Dtype.bfloat16, 2, full=full))
        assert peak_of(plan) == pytest.approx(plan.busiest.allocated, rel=0.1)
