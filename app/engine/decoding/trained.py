"""A trained model without what trains it: weights alone, at a layout of its own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from app.config import Run
from app.engine.build import build_chunks
from app.engine.checkpoint.folder import read_manifest
from app.engine.checkpoint.load import load_weights
from app.engine.checkpoint.resume import checkpoint_at
from app.engine.dispatchers import build_dispatcher
from app.engine.groups import Groups, create_groups, process_world
from app.engine.report.telling import telling
from app.engine.run.start import choose_device
from app.errors import ConfigError
from app.model.chunk import Chunk
from app.moe.dispatch.static import StaticDispatcher
from app.moe.protocol import Dispatcher
from app.plan.cost.flops import parameter_count
from app.plan.formatting import amount
from app.plan.plan import Plan

KEY = "checkpoint"  # what messages call the argument


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint that is all there, and its manifest."""

    path: Path
    manifest: dict[str, Any]

    @classmethod
    def at(cls, path: Path) -> Saved:
        """That of a checkpoint, or the newest of a run. Raises ConfigError."""
        found = checkpoint_at(path, KEY)
        with _about_checkpoint():
            return cls(found, read_manifest(found))

    @property
    def config(self) -> dict[str, Any]:
        """Of the run that saved it, as in config.yaml."""
        config: dict[str, Any] = self.manifest["config"]
        return config


@contextmanager
def _about_checkpoint() -> Iterator[None]:
    """Name what was asked for where something is wrong with a checkpoint."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(KEY, error.value, error.rule, error.nearest) from error


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """What one rank computes with; a `Model`."""

    plan: Plan
    chunks: tuple[Chunk, ...]
    groups: Groups
    device: torch.device
    dispatcher: Dispatcher[Any, Any] | None  # of all MoE layers; None: there are no experts

    @classmethod
    def load(cls, saved: Saved, plan: Plan, groups: Groups, device: torch.device) -> TrainedModel:
        """Its weights at the plan's layout; all ranks call it. Raises ConfigError, the same on
        every rank.
        """
        run = plan.run
        dispatcher = build_dispatcher(run, groups.peers(run.parallel.cp_comm_type), device)
        chunks = build_chunks(run, plan.stages, groups, dispatcher=dispatcher, device=device)
        with _about_checkpoint():
            load_weights(saved.path, saved.manifest, chunks, groups)
        return cls(plan, chunks, groups, device, dispatcher=dispatcher)

    @property
    def described(self) -> str:
        """What it is, in words."""
        run = self.plan.run
        ranks = "1 process" if run.world_size == 1 else f"{run.world_size} processes"
        size = amount(parameter_count(run.model).total)
        dtype = run.precision.params.value
        context = run.train.seq_len
        return f"{size} parameters, {dtype}, {ranks} on {self.device.type}, context {context:,}"

    def all_rows(self) -> AbstractContextManager[None]:
        """Within the block experts have memory for all their rows."""
        if isinstance(self.dispatcher, StaticDispatcher):
            return self.dispatcher.all_rows()
        return nullcontext()


@contextmanager
def trained_model(
    saved: Saved, run: Run, *, rank: int, local_rank: int, store: dist.Store
) -> Iterator[TrainedModel]:
    """The model on this rank, for the length of the block; the ranks of `run` meet in `store`.

    Raises ConfigError, the same on every rank but for a device that only one lacks.
    """
    device = choose_device(run, local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.set_stream(torch.cuda.Stream())  # the default one cannot be captured
    with process_world(rank, run.world_size, device, store=store):
        plan = Plan(run)
        groups = create_groups(plan.layout, rank)
        with telling(f"reading {saved.path}", stream=sys.stderr, aloud=rank == 0):
            model = TrainedModel.load(saved, plan, groups, device)
        yield model
