"""Import a Hugging Face model as a checkpoint of step 0.

The checkpoint holds the weights alone, in the types that they came in. The run that resumes from
it, at any layout, starts moments at zero and sets data, lengths and precision.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from app.data.feed import Cursor
from app.engine.checkpoint.load import Progress
from app.engine.checkpoint.synced import write_synced
from app.engine.checkpoint.tensor_file import Writable
from app.engine.export.texts import read_texts, write_texts
from app.engine.files.checkpoints import (
    CHECKPOINTS,
    LATEST,
    MANIFEST,
    checkpoint_name,
    manifest_digest,
)
from app.engine.files.manifest import FORMAT
from app.engine.files.names import CURSOR, IMPORTED, MAIN, part_name, rank_file
from app.engine.files.run_folder import plain
from app.errors import ConfigError
from app.hf.pretrained import Pretrained
from app.hf.write import complete_or_gone, file_header
from app.own_files import write_whole
from app.plan.model.stage import NamedWeight, model_weights
from app.plan.sharding.reshard import Block


def import_model(folder: Path, name: str, run_dir: Path, key: str) -> Pretrained:
    """Write the model of a Hugging Face folder as the checkpoint of step 0 of a new run folder.

    `name` is the model's name as the user gave it. Raises ConfigError, and then leaves no files.
    """
    if os.path.lexists(run_dir):
        raise ConfigError("folder", run_dir, "is there already", advice="name a new folder")
    pretrained = Pretrained(folder, key)
    texts = read_texts(folder, key)
    temporary = run_dir.with_name(f".{run_dir.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    with complete_or_gone(run_dir, temporary):
        try:
            temporary.mkdir(parents=True)  # fails for a link, which is not followed
            _write(temporary, pretrained, name)
            write_texts(temporary, texts)
            temporary.rename(run_dir)
        except OSError as error:
            rule = f"cannot be written: {error.strerror or error}"
            raise ConfigError("folder", run_dir, rule) from error
    return pretrained


def _write(temporary: Path, pretrained: Pretrained, name: str) -> None:
    checkpoint = temporary / CHECKPOINTS / checkpoint_name(0)
    checkpoint.mkdir(parents=True)
    file = rank_file(0)
    written = write_synced(checkpoint / file, lambda file: _write_weights(file, pretrained))
    model = dataclasses.replace(pretrained.model, init_from=name)
    manifest: dict[str, Any] = {
        "format": FORMAT,
        **dataclasses.asdict(Progress()),
        "layout": {"world_size": 1},
        "loss_scale": None,
        "config": {"model": plain(dataclasses.asdict(model))},
        IMPORTED: str(pretrained.dtype).removeprefix("torch."),
        "files": {file: {**written, "dp_rank": 0}},
        "parts": dict(map(_part, model_weights(pretrained.model))),
        "routers": {each.name.rpartition(".")[0]: 0 for each in pretrained.biases()},
    }
    manifest["sha256"] = manifest_digest(manifest)
    write_whole(checkpoint / MANIFEST, json.dumps(manifest))
    write_whole(checkpoint.parent / LATEST, checkpoint.name)


def _part(named: NamedWeight) -> tuple[str, dict[str, Any]]:
    """Return a weight's name and manifest entry: the single rank file holds all of it."""
    whole = Block.whole(*named.weight.shape)
    held = (0, whole.start, whole.stop, (0, whole.numel))
    return named.name, {"shape": whole.shape, "held": [held]}


def _write_weights(file: Writable, pretrained: Pretrained) -> None:
    weights = {each: pretrained.dtype_of(each) for each in model_weights(pretrained.model)}
    biases = dict.fromkeys(pretrained.biases(), torch.float32)
    entries = [
        *(
            (part_name(each.name, MAIN), dtype, (each.weight.numel,))
            for each, dtype in weights.items()
        ),
        *((each.name, dtype, each.weight.shape) for each, dtype in biases.items()),
    ]
    file.write(file_header(entries, {CURSOR: json.dumps(Cursor().state())}))
    for named, dtype in (*weights.items(), *biases.items()):
        for values in _in_order(pretrained, named, dtype):
            file.write(values.view(-1).view(torch.uint8).numpy().data)


def _in_order(pretrained: Pretrained, named: NamedWeight, dtype: torch.dtype) -> Iterator[Tensor]:
    """Yield a weight in blocks of consecutive rows."""
    for block in pretrained.row_blocks(named, Block.whole(*named.weight.shape)):
        values = torch.empty(block.sizes, dtype=dtype)
        pretrained.fill_block(named, block, values)
        yield values
