"""Checkpoints of ours as Hugging Face models: `python -m app.cli.convert to-hf RUN FOLDER`.

Needs no GPU, no network, and no memory for the whole model.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from app.cli.processes.ctrl_c import stop_quietly

if __name__ == "__main__":
    stop_quietly("convert")  # the imports take seconds

from app.cli.options.messages import readable_errors
from app.engine.export import export_checkpoint, saved_at
from app.engine.report.telling import telling
from app.errors import ConfigError, nearest

TO = "to-hf"
WAYS = (TO,)
HELP = """\
== Graphfold: models from and to Hugging Face's files ==
Usage:  python -m app.cli.convert to-hf RUN_OR_CHECKPOINT FOLDER

  to-hf   the model of a checkpoint, or of a run's newest one, saved at any layout, as a new folder
          that transformers, vLLM and SGLang load: safetensors, config.json, tokenizer

A run starts from a Hugging Face model with model=pretrained model.init_from=FOLDER_OR_NAME."""


def to_hf(source: Path, folder: Path) -> None:
    """Write the model of a run or checkpoint into a new folder. Raises ConfigError."""
    checkpoint = saved_at(source, TO)
    with telling(f"reading {checkpoint}"):
        exported = export_checkpoint(checkpoint, folder, TO)
    print(f"{checkpoint}: a model of type {exported.family().model_type} is now in {folder}")


def main(arguments: Sequence[str]) -> int:
    """Convert what the arguments say; returns the exit code."""
    if not arguments or {"--help", "-h"} & set(arguments):
        print(HELP)
        return 0
    with readable_errors("convert", speak=True):
        way, *paths = arguments
        if way not in WAYS:
            rule = f"must be {' or '.join(WAYS)}"
            raise ConfigError("command", way, rule, guess=nearest(way, WAYS))
        if len(paths) != 2:
            rule = f"{way} takes two folders, from and to; {len(paths)} given"
            raise ConfigError("arguments", " ".join(arguments), rule)
        to_hf(*map(Path, paths))
    return 0


def command() -> None:
    """Run the command line; SystemExit with the exit code."""
    sys.exit(main(sys.argv[1:]))


if __name__ == "__main__":
    command()
