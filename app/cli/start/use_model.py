"""Shared by the programs that use a trained model: join the ranks, load the model, end together."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from app.cli.processes.launcher import Launch
from app.config import Run
from app.engine.decoding.trained import TrainedModel, WeightSource, trained_model
from app.engine.files.attempt import Attempt
from app.errors import say


@contextmanager
def loaded_model(source: WeightSource, run: Run, launch: Launch) -> Iterator[TrainedModel]:
    """Load a model over all ranks; rank 0 describes it on stderr. The ranks leave the block
    together. Raises ConfigError.
    """
    attempt = Attempt(launch.requeues, launch.master, store_stays=launch.agent_store)
    store = attempt.meeting_store(launch.rank, run.world_size)
    with trained_model(
        source, run, rank=launch.rank, local_rank=launch.local_rank, store=store
    ) as model:
        if launch.rank == 0:
            say(f"{source.path}: {model.described}", sys.stderr)
        yield model
        dist.barrier(model.groups.host)
