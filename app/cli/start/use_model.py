"""Shared by the programs that use a trained model: join the ranks, load the model, end together."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist

from app.cli.processes.launcher import Launch
from app.cli.start.kept import torch_kept
from app.config import Run
from app.engine.decoding.trained import (
    TrainedModel,
    WeightSource,
    read_model,
    trained_model,
    without_gradients,
)
from app.engine.files.attempt import Attempt
from app.engine.ranks.groups import process_world
from app.engine.start.start import choose_device
from app.errors import ConfigError, say


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


def one_process(run: Run) -> Run:
    """Return the run in which a model is loaded. Raises ConfigError if it has several ranks."""
    if run.world_size > 1:
        rule = "a loaded model has one process"
        advice = "leave out keys of parallel; the commands take any layout"
        raise ConfigError("parallel.world_size", run.world_size, rule, 1, advice=advice)
    return run


@contextmanager
def for_inference(model: TrainedModel) -> Iterator[None]:
    """Use a model of `open_model` within the block; the state of torch is as before afterwards."""
    with torch_kept():
        if model.device.type == "cuda":
            torch.cuda.set_device(model.device)
            torch.cuda.synchronize(model.device)
            torch.cuda.set_stream(torch.cuda.Stream())  # the default one cannot be captured
        with without_gradients(model.device):
            yield


def open_model(source: WeightSource, run: Run) -> tuple[TrainedModel, Callable[[], None]]:
    """Load a model on this process alone; return it and what closes it. Raises ConfigError."""
    with ExitStack() as world:
        device = choose_device(run, 0)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        world.enter_context(process_world(0, 1, device))
        model = read_model(source, run, 0, device)
        return model, world.pop_all().close
