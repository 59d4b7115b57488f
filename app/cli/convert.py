"""Convert Hugging Face models to checkpoints and back: `python -m app.cli.convert`.

Needs no GPU and no network, and never holds the whole model in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from app.cli.processes.ctrl_c import interrupt_again, stop_quietly

if __name__ == "__main__":
    stop_quietly("convert")  # before the imports, which take seconds

from app.cli.options.messages import readable_errors
from app.cli.processes.output import exit_by
from app.engine.export.export import Exported, export_adapter, export_checkpoint
from app.engine.export.imported import import_model
from app.engine.start.resume import checkpoint_at
from app.errors import ConfigError, nearest, warn
from app.hf.hub import model_folder
from app.programs import with_names
from app.telling import telling

FROM, TO, ADAPTER = WAYS = ("from-hf", "to-hf", "to-peft")
HELP = """\
== Graphfold: convert models from and to Hugging Face format ==
Usage:  python -m app.cli.convert from-hf MODEL RUN_FOLDER
        python -m app.cli.convert to-hf RUN_OR_CHECKPOINT FOLDER
        python -m app.cli.convert to-peft RUN_OR_CHECKPOINT FOLDER

  from-hf write MODEL (a folder, or a name on the hub) as the checkpoint of step 0 of a new run
          folder. A run continues from it at any layout:
          python train.py model=pretrained model.init_from=RUN_FOLDER resume=RUN_FOLDER
          If the model has a tokenizer, add data.tokenizer=RUN_FOLDER/pretrained/tokenizer.json
  to-hf   write a checkpoint, or a run's newest one, saved at any layout, as a new folder that
          transformers, vLLM and SGLang load: safetensors, config.json, tokenizer. Adapters
          (lora.rank) are added to the weights
  to-peft write the adapters alone, as peft and vLLM load them: adapter_config.json,
          adapter_model.safetensors

To start a run without conversion: model=pretrained model.init_from=MODEL."""


def from_hf(name: str, run_dir: Path) -> None:
    """Write a Hugging Face model as the first checkpoint of a new run. Raises ConfigError."""
    folder = model_folder(name, FROM)
    with telling(f"reading {folder}"):
        found = import_model(folder, name, run_dir, FROM)
    if left_out := found.left_out():
        _warn(f"{name}: {left_out}")
    print(f"{name}: a model of type {found.their.family.model_type} is now in {run_dir}")


def to_hf(source: Path, folder: Path) -> None:
    """Write the model of a run or checkpoint into a new folder. Raises ConfigError."""
    checkpoint, exported = export(source, folder)
    print(f"{checkpoint}: a model of type {exported.family().model_type} is now in {folder}")


def export(source: Path, folder: Path) -> tuple[Path, Exported]:
    """Write the model of a run or checkpoint into a new folder; return the checkpoint and what was
    exported. Raises ConfigError.
    """
    checkpoint = checkpoint_at(source, TO)
    with telling(f"reading {checkpoint}"):
        return checkpoint, export_checkpoint(checkpoint, folder, TO, say=_warn)


def to_peft(source: Path, folder: Path) -> None:
    """Write the adapters of a run or checkpoint into a new folder. Raises ConfigError."""
    checkpoint = checkpoint_at(source, ADAPTER)
    with telling(f"reading {checkpoint}"):
        exported = export_adapter(checkpoint, folder, ADAPTER)
    base = exported.model.init_from or "the run's model"
    print(f"{checkpoint}: adapters of {base} are now in {folder}")


def _warn(text: str) -> None:
    warn(text, "convert")


def main(arguments: Sequence[str]) -> int:
    """Run the conversion that the arguments ask for; return the exit code."""
    if not arguments or {"--help", "-h"} & set(arguments):
        print(with_names(HELP))
        return 0
    with readable_errors("convert", speak=True):
        interrupt_again()  # Ctrl-C raises from here on, so that partly written files are removed
        way, *paths = arguments
        if way not in WAYS:
            rule = f"must be {FROM}, {TO} or {ADAPTER}"
            raise ConfigError("command", way, rule, guess=nearest(way, WAYS))
        if len(paths) != 2:
            rule = f"{way} takes two folders, from and to; {len(paths)} given"
            raise ConfigError("arguments", " ".join(arguments), rule)
        source, target = paths
        if way == FROM:
            from_hf(source, Path(target))
        elif way == TO:
            to_hf(Path(source), Path(target))
        else:
            to_peft(Path(source), Path(target))
    return 0


if __name__ == "__main__":
    exit_by(main)
