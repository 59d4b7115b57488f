"""Conversations have the loss and gradients of torch's cross-entropy over their trained tokens,
however ranks and microbatches share the global batch.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from app.config import DataConfig, ModelConfig, ParallelConfig, Run, TrainConfig
from app.data.feed import make_marked_batch
from app.data.marks import ids_of_marked, marked, trained
from app.engine.step.engine import Engine
from app.engine.step.step import TrainingStep
from tests.distributed import run_distributed
from tests.parity import here
from tests.runs import STEADY, TINY, TINY_MOE, make_run, whole_gradients

END, LENGTH, SEQUENCES = 7, 32, 8
MODELS = {
    "dense": dataclasses.replace(TINY, moe=None),
    # without losses of the router, whose means are taken over microbatches
    "experts": dataclasses.replace(
        TINY, moe=dataclasses.replace(TINY_MOE, z_loss_coeff=0.0, aux_loss_coeff=0.0)
    ),
}
Found = tuple[float, dict[str, np.ndarray]]


def conversations() -> list[np.ndarray]:
    """Sequences of conversations with a few trained tokens, in some many and in one none."""
    generator, rows = np.random.default_rng(3), []
    for number in range(SEQUENCES):
        parts = []
        for size in (9, 13, LENGTH - 21):
            ids = generator.integers(0, TINY.vocab_size, size)
            parts.append(marked(ids, generator.random(size) < number / SEQUENCES))
        rows.append(np.concatenate(parts))
    return rows


def run_of(model: ModelConfig, **parallel: int) -> Run:
    return make_run(
        model,
        train=TrainConfig(steps=20, seq_len=LENGTH, micro_batch=2, global_batch=SEQUENCES),
        parallel=ParallelConfig(**({"dp": 1} | parallel)),
        data=DataConfig(document_mask=True),
        optim=STEADY,
    )


def by_step(engine: Engine) -> Found:
    """A training step's loss and gradients."""
    run, rows = engine.plan.run, conversations()
    share = SEQUENCES // run.dp
    own = rows[engine.groups.dp_rank * share :][:share]
    most = run.data.most_documents(LENGTH)
    batches = [make_marked_batch(own[at : at + 2], END, most) for at in range(0, share, 2)]
    facts, _ = TrainingStep(engine)(batches, STEADY.lr, 0.1)
    gradients = whole_gradients(engine)
    return facts.loss, {name: value.numpy() for name, value in gradients.items()}


def by_torch(engine: Engine) -> Found:
    """The same of one cross-entropy over the global batch, whose labels are made here."""
    rows = np.stack(conversations())
    said = trained(rows)
    ends = np.array([9, 22, LENGTH + 1])  # where conversations end; none predicts the next one
    said[:, ends[:-1]] = False
    ids = ids_of_marked(rows)
    labels = torch.from_numpy(np.where(said, ids, -100)[:, 1:])
    starts = np.repeat([0, 9, 22], np.diff([0, *ends]))[:LENGTH]
    positions = torch.from_numpy(np.arange(LENGTH) - starts).expand(SEQUENCES, -1)
    most = engine.plan.run.data.most_documents(LENGTH)
    assert most is not None
    ends_BD = torch.full((SEQUENCES, most), LENGTH, dtype=torch.int32)
    ends_BD[:, :2] = torch.tensor([9, 22])
    (chunk,) = engine.chunks
    context = chunk.context(positions, ends_BD)
    tokens = torch.from_numpy(ids[:, :-1].copy())
    logits = chunk.logits(chunk(tokens, context).x)
    loss = functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
    named = dict(chunk.named_parameters())
    gradients = torch.autograd.grad(loss, list(named.values()))
    whole = {spec.name: spec.param for shards in engine.optimizer.shards
             for shard in shards for spec in shard.buffer.specs}  # fmt: skip
    names = {id(param): name for name, param in whole.items()}
    found = zip(named.values(), gradients, strict=True)
    return loss.item(), {names[id(param)]: value.flatten().numpy() for param, value in found}


@pytest.mark.parametrize("parallel", [{}, {"dp": 2}, {"cp": 2}], ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_masked_losses_equal_torch_cross_entropy(model: str, parallel: dict[str, Any]):
    ((loss, gradients),) = run_distributed(here, 1, run_of(MODELS[model]), by_torch)
    run = run_of(MODELS[model], **parallel)
    for found_loss, found in run_distributed(here, run.world_size, run, by_step):
        assert found_loss == pytest.approx(loss, rel=1e-5)
        assert found.keys() == gradients.keys()
        for name, value in found.items():
            np.testing.assert_allclose(
                value.flatten(), gradients[name], rtol=1e-3, atol=2e-6, err_msg=name
            )
