"""Training on GPUs without a start of train.py for each run: that takes as long as hundreds of
steps of a small model.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from app.config import Run
from app.data.feed import Batch
from app.engine.build import build_engine
from app.engine.capture.facts import GraphFacts
from app.engine.checkpoint.load import Progress, load_checkpoint
from app.engine.files.checkpoints import read_manifest
from app.engine.ranks.groups import Groups, create_groups, process_world
from app.engine.step.step import TrainingStep, Validation
from app.planner.plan import Plan
from tests.checkpoints import save_checkpoint
from tests.runs import batches_of

FEW = 8  # tokens that there are: a model soon learns that there are no others
HELD_OUT = 10**6  # the step whose batches are validated on
Trained = list[list[float]]  # by step, from 1 on: loss, gradient norm squared, a validation's loss


def easy_batches(run: Run, step: int, dp_rank: int) -> list[Batch]:
    """Return batches of few distinct tokens, so that the loss falls."""
    return [
        dataclasses.replace(
            batch,
            tokens_BS=batch.tokens_BS % FEW,
            labels_BS=torch.where(batch.labels_BS < 0, batch.labels_BS, batch.labels_BS % FEW),
        )
        for batch in batches_of(run, step, dp_rank)
    ]


@contextmanager
def one_gpu() -> Iterator[torch.device]:
    """A world of this process, on a stream of its own as train.py has it."""
    device = torch.device("cuda:0")
    with process_world(0, 1, device), torch.cuda.stream(torch.cuda.Stream()):
        yield device


def trained(
    run: Run,
    groups: Groups,
    device: torch.device,
    *,
    steps: int,
    validates: int = 0,
    save_to: Path | None = None,
    resume: Path | None = None,
) -> Trained:
    """Take steps, each `validates`-th with a validation, from the beginning or from a checkpoint's
    step on; save behind the last one. A run that captures has captured something.
    """
    engine = build_engine(Plan(run), groups, device)
    taken = load_checkpoint(resume, read_manifest(resume), engine)[0].step if resume else 0
    step, validation = TrainingStep(engine), Validation(engine, run.num_microbatches)
    found = []
    for n in range(taken, steps):
        batches = easy_batches(run, n, groups.dp_rank)
        facts, _ = step(batches, run.optim.lr, run.optim.weight_decay)
        found.append([facts.loss, facts.grad_norm])
        if validates and (n + 1) % validates == 0:
            found[-1].append(validation(easy_batches(run, HELD_OUT, groups.dp_rank))[0])
    if save_to is not None:
        save_checkpoint(save_to, engine, run, Progress(steps, steps, 0), {"sequences": 0})
    if engine.recorder is not None:
        assert GraphFacts.of(engine.recorder).count or len(found) <= run.cuda_graph.warmup_steps
        engine.release()
    return found


def trained_alone(run: Run, **given: Any) -> Trained:
    """On one GPU, in this process."""
    with one_gpu() as device:
        return trained(run, create_groups(Plan(run).layout, 0), device, **given)


def print_trained(cases: Mapping[str, Sequence[Run]], steps: int) -> None:
    """Train the runs of each case as one of torchrun's ranks; runs of a case share a layout.

    The first rank prints the case's name and the result of each run.
    """
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device(f"cuda:{rank}")
    torch.cuda.set_device(device)
    with process_world(rank, world, device), torch.cuda.stream(torch.cuda.Stream()):
        for name, runs in cases.items():
            groups = create_groups(Plan(runs[0]).layout, rank)
            found = [trained(run, groups, device, steps=steps) for run in runs]
            if rank == 0:
                print(json.dumps([name, found]), flush=True)
