"""Trained model for inference: weights alone, at a layout of its own."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from app.config import Run
from app.data.tokenizer import BYTES
from app.data.tokenizer_files import TOKENIZER
from app.engine.build import build_chunks
from app.engine.checkpoint.load import load_weights
from app.engine.dispatchers import build_dispatcher
from app.engine.export.merged import MergedWeights, adapters_of
from app.engine.files.checkpoints import read_whole_manifest
from app.engine.files.names import IMPORTED
from app.engine.files.run_folder import plain
from app.engine.ranks.agreement import all_succeed
from app.engine.ranks.groups import Groups, create_groups, process_world
from app.engine.start.kept_tokenizer import find_tokenizer
from app.engine.start.resume import checkpoint_at
from app.engine.start.start import choose_device
from app.errors import ConfigError, say
from app.hf.chunks import fill_chunks
from app.hf.file_names import CONFIG_JSON
from app.hf.hub import PRETRAINED
from app.hf.pretrained import Pretrained
from app.hf.their_config import TheirConfig
from app.model.chunk import Chunk
from app.moe.dispatch.static import StaticDispatcher
from app.plan.cost.flops import parameter_count
from app.plan.formatting import amount
from app.planner.plan import Plan
from app.telling import telling

KEY = "checkpoint"  # name of the argument in messages


class WeightSource(Protocol):
    """Source of a model's weights: a checkpoint or a Hugging Face folder."""

    @property
    def path(self) -> Path:
        """Folder of the weights."""

    @property
    def config(self) -> dict[str, Any]:
        """Sections of config.yaml: model, tokenizer, type of weights, context.

        Raises ConfigError.
        """

    @property
    def manifest(self) -> dict[str, Any] | None:
        """Manifest of a checkpoint; None for a Hugging Face folder."""

    @property
    def texts(self) -> Path:
        """Folder of the config and tokenizer files of the initial model, which may not exist."""

    def fill(self, chunks: Sequence[Chunk], groups: Groups) -> None:
        """Fill this rank's chunks; all ranks call it. Raises ConfigError, the same on all."""


@dataclass(frozen=True, slots=True)
class Saved:
    """Complete checkpoint and its manifest."""

    path: Path
    manifest: dict[str, Any]

    @classmethod
    def at(cls, path: Path) -> Saved:
        """Open a checkpoint, or the newest of a run. Raises ConfigError."""
        found = checkpoint_at(path, KEY)
        with _about_checkpoint():
            return cls(found, read_whole_manifest(found))

    @property
    def config(self) -> dict[str, Any]:
        """Configuration of the run that saved it; of an imported model, from its config.json."""
        config: dict[str, Any] = self.manifest["config"]
        if IMPORTED not in self.manifest:
            return config | {"data": self._data(config["data"], self.path.parent.parent)}
        return _their_sections(self.texts, self.manifest[IMPORTED]) | config

    @property
    def texts(self) -> Path:
        """Files of the model that the run started from, in the run folder."""
        return self.path.parent.parent / PRETRAINED

    def _data(self, data: dict[str, Any], run_dir: Path) -> dict[str, Any]:
        """Return the data section with the path of the tokenizer used in training.

        The saved path may be relative to another folder. A file with changed contents is not used.
        """
        if data["tokenizer"] == BYTES:
            return data
        found = find_tokenizer(run_dir, self.manifest)
        return data | {"tokenizer": str(found or run_dir / TOKENIZER)}

    def fill(self, chunks: Sequence[Chunk], groups: Groups) -> None:
        """See `WeightSource`."""
        with _about_checkpoint():
            load_weights(self.path, self.manifest, chunks, groups)
            if (lora := adapters_of(self.manifest)) is not None:
                saved = MergedWeights(self.path, self.manifest, chunks[0].model, lora)
                saved.add_to(chunks, groups.coords)


@dataclass(frozen=True, slots=True)
class PretrainedFolder:
    """Hugging Face model in a folder, for example an exported one."""

    path: Path

    @property
    def config(self) -> dict[str, Any]:
        """See `WeightSource`."""
        found = Pretrained(self.path, KEY)
        dtype = str(found.dtype).removeprefix("torch.")
        return _their_sections(self.path, dtype) | {"model": plain(asdict(found.model))}

    @property
    def manifest(self) -> None:
        """See `WeightSource`."""
        return None

    @property
    def texts(self) -> Path:
        """The folder itself."""
        return self.path

    def fill(self, chunks: Sequence[Chunk], groups: Groups) -> None:
        """See `WeightSource`."""

        def fill() -> list[str]:
            pretrained = Pretrained(self.path, KEY)
            fill_chunks(chunks, pretrained, groups.coords)
            if groups.rank:
                return []
            params = (param for chunk in chunks for param in chunk.parameters())
            finer = pretrained.finer(next(params).dtype)
            rounded = finer and f"{finer}, and rounded to the type of the others"
            return [line for line in (pretrained.left_out(), rounded) if line]

        for line in all_succeed(groups, fill):
            say(f"{self.path}: {line}", sys.stderr)


def weights_at(path: Path) -> WeightSource:
    """Open a checkpoint, a run's newest, or a Hugging Face folder. Raises ConfigError."""
    return PretrainedFolder(path) if (path / CONFIG_JSON).is_file() else Saved.at(path)


def _their_sections(folder: Path, dtype: str) -> dict[str, Any]:
    """Return sections of config.yaml from a config.json and the tokenizer beside it."""
    tokenizer = folder / TOKENIZER
    return {
        "data": {"tokenizer": str(tokenizer) if tokenizer.is_file() else BYTES},
        "precision": {"params": dtype},
        "train": {"seq_len": TheirConfig.read(folder, KEY).need("max_position_embeddings")},
    }


@contextmanager
def _about_checkpoint() -> Iterator[None]:
    """Re-raise a ConfigError about a checkpoint under the name of the argument."""
    try:
        yield
    except ConfigError as error:
        advice = error.advice
        raise ConfigError(KEY, error.value, error.rule, error.nearest, advice=advice) from error


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """One rank's part of a trained model; implements `Model`."""

    plan: Plan
    chunks: tuple[Chunk, ...]
    groups: Groups
    device: torch.device
    static: StaticDispatcher | None  # dispatcher of MoE layers; None without, or with another

    @classmethod
    def load(
        cls, source: WeightSource, plan: Plan, groups: Groups, device: torch.device
    ) -> TrainedModel:
        """Load weights at the plan's layout; all ranks call it.

        Raises ConfigError, the same on every rank.
        """
        run = plan.run
        built = build_dispatcher(run, groups.layer_groups(run.parallel.cp_comm_type), device)
        chunks = build_chunks(run, plan.stages, groups, dispatcher=built.dispatcher, device=device)
        source.fill(chunks, groups)
        return cls(plan, chunks, groups, device, static=built.static)

    @property
    def described(self) -> str:
        """Size, type, processes and context, in words."""
        run = self.plan.run
        ranks = "1 process" if run.world_size == 1 else f"{run.world_size} processes"
        size = amount(parameter_count(run.model).total)
        dtype = run.precision.params.value
        context = run.train.seq_len
        return f"{size} parameters, {dtype}, {ranks} on {self.device.type}, context {context:,}"

    def all_rows(self) -> AbstractContextManager[None]:
        """Give experts memory for all dispatched tokens within the block."""
        return nullcontext() if self.static is None else self.static.all_rows()


def without_gradients(device: torch.device) -> AbstractContextManager[None]:
    """Disable autograd within the block.

    inference_mode saves a CPU 5 % of the time of a small step compared to no_grad; a GPU replays
    recorded steps, where it saves nothing.
    """
    if device.type == "cpu":
        return torch.inference_mode()
    return torch.no_grad()


@contextmanager
def trained_model(
    source: WeightSource, run: Run, *, rank: int, local_rank: int, store: dist.Store
) -> Iterator[TrainedModel]:
    """Load the model on this rank for the length of the block; the ranks meet in `store`.

    Raises ConfigError, the same on every rank, except for a device that only one of them lacks.
    """
    device = choose_device(run, local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.set_stream(torch.cuda.Stream())  # the default one cannot be captured
    with process_world(rank, run.world_size, device, store=store):
        model = read_model(source, run, rank, device)
        with without_gradients(device):
            yield model


def read_model(source: WeightSource, run: Run, rank: int, device: torch.device) -> TrainedModel:
    """Create the groups of this rank and load its part of the model; rank 0 tells if it takes long.

    Needs the default process group. Raises ConfigError, the same on every rank.
    """
    plan = Plan(run)
    groups = create_groups(plan.layout, rank)
    with telling(f"reading {source.path}", stream=sys.stderr, aloud=rank == 0):
        return TrainedModel.load(source, plan, groups, device)
