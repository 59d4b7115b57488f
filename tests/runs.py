"""Small runs for tests: a `Run` from a few overrides, an engine, and a few training steps on
fixed data.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
import torch.distributed as dist

from app.config import MLAConfig, ModelConfig, MoEConfig, OptimConfig, Run, TrainConfig, YarnConfig
from app.data.feed import Batch, make_batch
from app.engine.build import build_engine
from app.engine.ranks.groups import create_groups
from app.engine.step.engine import Engine
from app.engine.step.step import TrainingStep
from app.fp8.linear import Fp8Layers
from app.plan.sharding.reshard import Slice
from app.planner.plan import Plan
from app.rules import check

TINY_MOE = MoEConfig(
    num_experts=8,
    top_k=2,
    ffn_hidden_size=16,
    shared_ffn_hidden_size=16,
    first_k_dense=1,
    z_loss_coeff=0.001,
)
END = 0  # token that ends a document where documents are kept apart
TINY = ModelConfig(
    num_layers=3,
    hidden_size=32,
    ffn_hidden_size=48,
    num_heads=4,
    num_kv_heads=2,
    vocab_size=64,
    moe=TINY_MOE,
)
# with multi-head latent attention
LATENT = dataclasses.replace(
    TINY,
    num_kv_heads=TINY.num_heads,
    mla=MLAConfig(
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=6,
    ),
    yarn=YarnConfig(factor=4.0, original_length=8, mscale_all_dim=0.7),
)


# AdamW divides a gradient by its own size plus eps: with a larger eps, one near zero does not turn
# rounding into a step.
STEADY = OptimConfig(lr=1e-3, warmup_steps=2, eps=1e-5)

# Two microbatches, where no pipeline needs more in flight: the host's work is what takes the time.
TWO_MICROBATCHES = TrainConfig(steps=20, seq_len=16, micro_batch=2, global_batch=4)


def make_run(model: ModelConfig = TINY, **sections: Any) -> Run:
    """A checked run; keyword arguments replace whole sections."""
    chosen = {
        "optim": OptimConfig(lr=1e-2, warmup_steps=2),
        "train": TrainConfig(steps=20, seq_len=16, micro_batch=2, global_batch=8),
    }
    return check(Run(model, **(chosen | sections)))


def engine_of(run: Run, rank: int = 0) -> Engine:
    """The engine of one rank on CPU, inside an initialised process group."""
    plan = Plan(run)
    return build_engine(plan, create_groups(plan.layout, rank), torch.device("cpu"))


def fp8_of(engine: Engine) -> Fp8Layers:
    """The FP8 layers of an engine that has some."""
    found = engine.state(Fp8Layers)
    assert found is not None
    return found


def batches_of(run: Run, step: int, dp_rank: int) -> list[Batch]:
    """This replica's microbatches of one step: the union over replicas is the same for every dp."""
    size, length = run.train.micro_batch, run.train.seq_len
    found = []
    for m in range(run.num_microbatches):
        generator = torch.Generator().manual_seed(step * 1000 + m * run.dp + dp_rank)
        rows = torch.randint(0, run.model.vocab_size, (size, length + 1), generator=generator)
        labels = rows[:, 1:].clone()
        # uneven valid counts
        labels[torch.rand(labels.shape, generator=generator) < 0.1 * (m * run.dp + dp_rank)] = -100
        most = run.data.most_documents(length)
        if most is not None:
            ends = torch.rand(rows.shape, generator=generator) < 0.2
            found.append(make_batch([*rows.masked_fill(ends, END).numpy()], END, most))
            continue
        found.append(
            Batch(
                rows[:, :-1].contiguous(),
                labels,
                torch.arange(length).expand(size, length),
                ends_BD=None,
            )
        )
    return found


def train_steps(run: Run, engine: Engine, steps: int, first: int = 0) -> list[tuple[float, float]]:
    """(loss, gradient norm) of `steps` optimizer steps at the peak learning rate."""
    training_step, seen = TrainingStep(engine), []
    for step in range(first, first + steps):
        facts, _ = training_step(
            batches_of(run, step, engine.groups.dp_rank), run.optim.lr, run.optim.weight_decay
        )
        seen.append((facts.loss, facts.grad_norm))
    return seen


def whole_parameters(engine: Engine) -> dict[str, torch.Tensor]:
    """Every parameter of the model, put together from the blocks of all ranks; the same on every
    rank.
    """
    for chunk in range(len(engine.chunks)):
        engine.optimizer.gather_params(chunk)
    specs = [
        spec
        for shards in engine.optimizer.shards
        for shard in shards
        for spec in shard.buffer.specs
    ]
    held = [
        (spec.name, Slice(spec.block), spec.param.detach().flatten())
        for spec in specs
        if spec.counted
    ]
    return _put_together(held)


def whole_gradients(engine: Engine) -> dict[str, torch.Tensor]:
    """The last step's gradient of every parameter of the model, put together from all shards;
    the same on every rank.
    """
    pieces = [piece for piece in engine.optimizer.param_shards() if piece.spec.counted]
    return _put_together(
        [
            (p.spec.name, Slice(p.spec.block, (p.start, p.start + p.grad.numel())), p.grad)
            for p in pieces
        ]
    )


def _put_together(held: list[tuple[str, Slice, torch.Tensor]]) -> dict[str, torch.Tensor]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(
        found, [(name, place, values.float().numpy()) for name, place, values in held]
    )
    whole: dict[str, torch.Tensor] = {}
    left: dict[str, torch.Tensor] = {}  # 1 where no part lies; gradients in fp16 may be NaN
    for name, place, values in (piece for rank in found for piece in rank):
        part, numel = torch.from_numpy(values), math.prod(place.block.shape)
        _put(part, place, whole.setdefault(name, torch.zeros(numel, dtype=part.dtype)))
        _put(torch.zeros_like(part), place, left.setdefault(name, torch.ones(numel)))
    assert not any(each.any() for each in left.values()), "a part is missing"
    return {name: whole[name] for name in sorted(whole)}


def _put(part: torch.Tensor, place: Slice, target: torch.Tensor) -> None:
    """Write a part to its place in a flat tensor."""
    box = target.view(place.block.shape)
    box = box[tuple(map(slice, place.block.start, place.block.stop))]
    flat = box.reshape(-1)  # a copy where the block is not contiguous
    flat[slice(*place.bounds)] = part
    if flat.data_ptr() != box.data_ptr():
        box.copy_(flat.view_as(box))


def with_model(run: Run, **changes: Any) -> Run:
    """The run with other fields of its model."""
    return dataclasses.replace(run, model=dataclasses.replace(run.model, **changes))
