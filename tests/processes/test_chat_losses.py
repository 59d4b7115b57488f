"""Conversations have the loss and gradients of torch's cross-entropy over their trained tokens,
however ranks and microbatches share the global batch.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from app.config import DataConfig, ModelConfig, ParallelConfig, Run, TrainConfig
from app.data.feed import make_marked_batch
from app.data.marks import ids_of_marked, marked, trained
from app.engine.step.engine import Engine
from app.engine.step.records import StepReport
from app.engine.step.step import TrainingStep
from tests.cases import chosen
from tests.distributed import run_distributed
from tests.hf_folders import save_random
from tests.parity import here
from tests.processes.init_from import engine_from, run_from
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
        parallel=ParallelConfig(**({"dp": 1} | parallel), first=parallel.get("pp", 1) - 1 or None),
        data=DataConfig(document_mask=True),
        optim=STEADY,
    )


def by_step(engine: Engine) -> Found:
    """A training step's loss and gradients."""
    facts = first_step(engine, conversations(), END)
    gradients = whole_gradients(engine)
    return facts.loss, {name: value.numpy() for name, value in gradients.items()}


def first_step(engine: Engine, rows: list[np.ndarray], boundary: int | None) -> StepReport:
    """Train on this rank's share of a global batch."""
    run = engine.plan.run
    share, size = SEQUENCES // run.dp, run.train.micro_batch
    own = rows[engine.groups.dp_rank * share :][:share]
    most = run.data.most_documents(run.train.seq_len)
    batches = [
        make_marked_batch(own[at : at + size], boundary, most) for at in range(0, share, size)
    ]
    facts, _ = TrainingStep(engine)(batches, STEADY.lr, 0.1)
    return facts


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


PARALLEL: list[dict[str, int]] = [
    {}, {"dp": 2}, {"cp": 2}, {"tp": 2}, {"pp": 2}, {"dp": 2, "cp": 2},
]  # fmt: skip
CASES = [(model, parallel) for model in MODELS for parallel in PARALLEL]


@pytest.mark.parametrize(
    ("model", "parallel"), chosen(CASES, [("dense", {"dp": 2}), ("experts", {"cp": 2})]), ids=str
)
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


def whole_rows(length: int) -> list[np.ndarray]:
    """Sequences of a conversation each, with other numbers of trained tokens."""
    generator = np.random.default_rng(4)
    return [
        marked(generator.integers(0, 96, length + 1), generator.random(length + 1) < share)
        for share in np.linspace(0.0, 0.9, SEQUENCES)
    ]


def by_rank(rank: int, run: Run) -> tuple[float, float]:
    """Loss and norm of the gradients of the first step from the weights of a folder."""
    facts = first_step(engine_from(rank, run), whole_rows(run.train.seq_len), None)
    return facts.loss, facts.grad_norm


THEIRS = [(name, parallel) for name in ("llama", "mixtral") for parallel in PARALLEL]


@pytest.mark.parametrize(("name", "parallel"), chosen(THEIRS, [("mixtral", {"dp": 2})]), ids=str)
def test_masked_losses_equal_transformers(name: str, parallel: dict[str, int], tmp_path: Path):
    """Experts compute tokens without a loss too: later tokens attend to them."""
    theirs, _ = save_random(name, tmp_path)
    run = run_from(tmp_path, parallel)
    rows = np.stack(whole_rows(run.train.seq_len))
    ids = ids_of_marked(rows)
    labels = torch.from_numpy(np.where(trained(rows), ids, -100))
    loss = theirs(torch.from_numpy(ids), labels=labels).loss
    loss.backward()
    norm = torch.stack([each.grad.norm() for each in theirs.parameters()]).norm()
    for found in run_distributed(by_rank, run.world_size, run):
        assert found == pytest.approx((loss.item(), norm.item()), rel=1e-4)
