"""A checkpoint of ours as a Hugging Face model, whatever layout it was saved at.

Weights are read from the checkpoint's files, so that neither the ranks that wrote them nor memory
for the whole model are needed; several processes write a file each at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from app.choices import Dtype
from app.config import ModelConfig
from app.engine.checkpoint.folder import (
    check_contents,
    read_manifest,
)
from app.engine.checkpoint.load import IMPORTED
from app.engine.checkpoint.weights import SavedWeights
from app.engine.dtypes import DTYPES
from app.engine.export_texts import ExportTexts
from app.engine.groups import Groups
from app.engine.run.agreement import all_succeed, rank_zero_says
from app.engine.run.run_folder import from_plain
from app.engine.watchdog.activity import ThreadActivity
from app.errors import ConfigError, warn
from app.hf.families import Family, family_of
from app.hf.write import Export, complete_or_gone
from app.plan.model.stage import model_weights

EXPORTED = "hugging_face"  # in a run folder: the model that it ended with
NAMES = {Dtype.float32: "float32", Dtype.bfloat16: "bfloat16", Dtype.float16: "float16"}


@dataclass(frozen=True, slots=True)
class Exported:
    """A checkpoint, and what becomes of it."""

    checkpoint: Path
    manifest: Mapping[str, Any]
    key: str  # that named it, for messages
    folder: Path  # that is written
    replaces: bool = False  # an earlier export there

    @property
    def config(self) -> Mapping[str, Any]:
        """Of the run that saved it, as in config.yaml."""
        found: Mapping[str, Any] = self.manifest["config"]
        return found

    @property
    def model(self) -> ModelConfig:
        """Its model."""
        found = from_plain(ModelConfig, self.config["model"])
        assert isinstance(found, ModelConfig)
        return found

    @property
    def dtype(self) -> Dtype:
        """That of its parameters; of a model that no run has trained yet, of most of them."""
        imported = self.manifest.get(IMPORTED)
        return Dtype(imported or self.config["precision"]["params"])

    def family(self) -> Family:
        """Raises ConfigError where Hugging Face has no such model."""
        return family_of(self.model, self.key, self.checkpoint)

    def export(self) -> Export:
        """The files to write. Raises ConfigError as `family`."""
        return Export(
            self.model,
            self.family(),
            self.folder,
            DTYPES[self.dtype],
            replaces=self.replaces,
        )

    def apart(self) -> dict[str, torch.dtype]:
        """Weights that came in another type, which they keep until a run has trained them."""
        if IMPORTED not in self.manifest:
            return {}
        saved = SavedWeights(self.checkpoint, dict(self.manifest))
        kinds = {each.name: saved.dtype(each.name) for each in model_weights(self.model)}
        return {name: kind for name, kind in kinds.items() if kind != DTYPES[self.dtype]}

    def texts(self, say: Callable[[str], object]) -> dict[str, bytes]:
        """What is no weight, by name of file; `say` hears what is left out. Raises ConfigError."""
        run_dir = self.checkpoint.parent.parent
        texts = ExportTexts(
            run_dir=run_dir,
            manifest=self.manifest,
            model=self.model,
            family=self.family(),
            dtype=NAMES[self.dtype],
            key=self.key,
            say=say,
        )
        return texts.files()


def export_checkpoint(
    path: Path, folder: Path, key: str, *, say: Callable[[str], object] = warn
) -> Exported:
    """Write the model of a checkpoint into a new folder, in this process alone; `say` hears what is
    left out.

    The checkpoint's files are compared with their checksums first. Raises ConfigError.
    """
    with _about(key):
        manifest = read_manifest(path)
    exported = Exported(path, manifest, key, folder)
    export = exported.export()
    with complete_or_gone(folder, export.temporary):
        export.begin()
        texts = exported.texts(say)
        with _about(key):
            _check_all(path, manifest)
        export = replace(export, apart=exported.apart())
        _write(export, export.files(), exported)
        export.finish(texts)
    return exported


def _check_all(path: Path, manifest: dict[str, Any]) -> None:
    """`check_contents` of all files of a checkpoint, several at a time."""

    def check(name: str) -> None:
        check_contents(path, manifest, [name])

    with ThreadPoolExecutor() as threads:
        list(threads.map(check, manifest["files"]))  # raises what one has raised


@contextmanager
def _about(key: str) -> Iterator[None]:
    """Name what the user has given where something is wrong with a checkpoint."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(key, error.value, error.rule, error.nearest) from error


def export_together(path: Path, folder: Path, groups: Groups, activity: ThreadActivity) -> None:
    """Write the model of a checkpoint that all ranks have saved, a file each at a time.

    An export of an earlier end of the run gives way. Raises ConfigError, the same on every rank.
    """
    key = "checkpoint.export_hf"
    activity.rest(f"exporting {path.name}")
    manifest = rank_zero_says(groups, lambda: read_manifest(path))
    exported = Exported(path, manifest, key, folder, replaces=True)
    export = exported.export()
    leads = groups.rank == 0
    rank_zero_says(groups, export.begin)
    own = list(export.files())[groups.rank :: groups.host.size()]
    try:
        texts = all_succeed(groups, lambda: exported.texts(warn) if leads else {})
        all_succeed(groups, lambda: _write(export, own, exported))
        rank_zero_says(groups, lambda: export.finish(texts))
    except BaseException:
        if leads:
            export.give_up()
        raise
    activity.note("the end of the run")


def _write(export: Export, names: Iterable[str], exported: Exported) -> None:
    source = SavedWeights(exported.checkpoint, dict(exported.manifest))
    for name in names:
        export.write(name, source)
