"""Export a checkpoint, saved at any layout, as a Hugging Face model.

Weights are read from the checkpoint's files, so neither the ranks that wrote them nor memory for
the whole model is needed. Several processes write in parallel, one file each at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from app.choices import Dtype
from app.config import LoraConfig, ModelConfig
from app.engine.checkpoint.weights import SavedWeights
from app.engine.export.merged import MergedWeights, adapters_of
from app.engine.export.texts import ExportTexts
from app.engine.files.checkpoints import (
    check_contents,
    read_manifest,
    read_whole_manifest,
)
from app.engine.files.names import IMPORTED
from app.engine.files.run_folder import from_plain
from app.engine.ranks.agreement import all_succeed, rank_zero_says
from app.engine.ranks.dtypes import DTYPES
from app.engine.ranks.groups import Groups
from app.engine.watchdog.activity import ThreadActivity
from app.errors import ConfigError, warn
from app.hf.adapter import adapter_files
from app.hf.adapter_names import AdapterNames
from app.hf.family import Family
from app.hf.started import family_as_started
from app.hf.write import Export, complete_or_gone, write_all
from app.plan.model.stage import model_weights

THREADS = 16  # that read files of a checkpoint
NAMES = {Dtype.float32: "float32", Dtype.bfloat16: "bfloat16", Dtype.float16: "float16"}


@dataclass(frozen=True, slots=True)
class Exported:
    """Checkpoint and the folder that it is exported to."""

    checkpoint: Path
    manifest: Mapping[str, Any]
    key: str  # config key or argument that named it, for messages
    folder: Path  # written by the export
    replaces: bool = False  # True: an earlier export in `folder` is replaced

    @property
    def config(self) -> Mapping[str, Any]:
        """Configuration of the run that saved it, as in config.yaml."""
        found: Mapping[str, Any] = self.manifest["config"]
        return found

    @property
    def model(self) -> ModelConfig:
        """Model section of that configuration."""
        found = from_plain(ModelConfig, self.config["model"])
        assert isinstance(found, ModelConfig)
        return found

    @property
    def dtype(self) -> Dtype:
        """Type of its parameters; of most of them for an imported model not yet trained."""
        imported = self.manifest.get(IMPORTED)
        return Dtype(imported or self.config["precision"]["params"])

    def family(self) -> Family:
        """Return its model family, that of the files that the run started from if those have other
        names. Raises ConfigError if Hugging Face has no such model.
        """
        run_dir = self.checkpoint.parent.parent
        return family_as_started(self.model, self.key, self.checkpoint, run_dir)

    def export(self) -> Export:
        """Return the files to write. Raises ConfigError as `family`."""
        return Export(
            self.model,
            self.family(),
            self.folder,
            DTYPES[self.dtype],
            replaces=self.replaces,
        )

    @property
    def lora(self) -> LoraConfig | None:
        """Adapters that it holds beside the model."""
        return adapters_of(dict(self.manifest))

    def weights(self) -> SavedWeights:
        """Return the model's weights, with its adapters added to them if it has some."""
        manifest = dict(self.manifest)
        if self.lora is None:
            return SavedWeights(self.checkpoint, manifest)
        return MergedWeights(self.checkpoint, manifest, self.model, self.lora)

    def apart(self) -> dict[str, torch.dtype]:
        """Types of imported weights that differ from `dtype`, which they keep until trained."""
        if IMPORTED not in self.manifest:
            return {}
        saved = SavedWeights(self.checkpoint, dict(self.manifest))
        kinds = {each.name: saved.dtype(each.name) for each in model_weights(self.model)}
        return {name: kind for name, kind in kinds.items() if kind != DTYPES[self.dtype]}

    def texts(self, say: Callable[[str], object]) -> dict[str, bytes]:
        """Return config and tokenizer files by name; `say` gets omissions. Raises ConfigError."""
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
    """Write the model of a checkpoint into a new folder, in this process alone.

    The checkpoint's files are checked against their checksums first. `say` is told what is left
    out. Raises ConfigError.
    """
    with _about(key):
        manifest = read_whole_manifest(path)
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


def export_adapter(path: Path, folder: Path, key: str) -> Exported:
    """Write the adapters of a checkpoint into a new folder, in the files of `peft`.

    Raises ConfigError.
    """
    with _about(key):
        manifest = read_manifest(path)
    exported = Exported(path, manifest, key, folder)
    if (lora := exported.lora) is None:
        rule = "holds a model without adapters"
        raise ConfigError(key, path, rule, advice="to-hf exports the model")
    names = AdapterNames(exported.model, lora, exported.family())
    export = exported.export()
    with complete_or_gone(folder, export.temporary):
        export.begin()
        with _about(key):
            _check_all(path, manifest)
            write_all(export.temporary, adapter_files(names, SavedWeights(path, manifest)))
        export.temporary.rename(folder)
    return exported


def _check_all(path: Path, manifest: dict[str, Any]) -> None:
    """Check the contents of all files of a checkpoint, several at a time in threads."""
    check_contents(path, manifest, manifest["files"], THREADS)


@contextmanager
def _about(key: str) -> Iterator[None]:
    """Re-raise a ConfigError about a checkpoint under the key that the user has given."""
    try:
        yield
    except ConfigError as error:
        if error.key != "resume":  # of what is written
            raise
        advice = error.advice
        raise ConfigError(key, error.value, error.rule, error.nearest, advice=advice) from error


def export_together(path: Path, folder: Path, groups: Groups, activity: ThreadActivity) -> None:
    """Export a checkpoint saved by all ranks; they write in parallel, a file each at a time.

    Replaces an earlier export of the run. Raises ConfigError, the same on every rank.
    """
    key = "checkpoint.export_hf"
    activity.rest(f"exporting {path.name}")
    manifest = rank_zero_says(groups, lambda: read_manifest(path))
    exported = Exported(path, manifest, key, folder, replaces=True)
    export = exported.export()
    leads = groups.rank == 0
    rank_zero_says(groups, export.begin)
    own = list(export.files())[groups.rank :: groups.host.size()]  # round robin over ranks
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
    source = exported.weights()
    for name in names:
        export.write(name, source)
