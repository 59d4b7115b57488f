"""The tokenizer that a model is trained with: kept in the folder of its run, and found again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from app.config import Run
from app.data.sources import file_sum
from app.data.tokenizer import BYTES
from app.errors import writing
from app.hf.file_names import TOKENIZER


def keep_tokenizer(run: Run, run_dir: Path) -> None:
    """Copy the tokenizer's file into the run folder: what is trained is of no use without it.
    Raises ConfigError.
    """
    if run.data.tokenizer == BYTES:
        return
    with writing(run_dir):
        contents, kept = Path(run.data.tokenizer).read_bytes(), run_dir / TOKENIZER
        if not kept.is_file() or kept.read_bytes() != contents:
            kept.write_bytes(contents)


def find_tokenizer(
    run_dir: Path, manifest: Mapping[str, Any], besides: Iterable[Path] = ()
) -> Path | None:
    """The file with which the checkpoint of this manifest was trained: the run's own, or the one
    that was named, or one `besides`; None: none that can be read has those contents.
    """
    data = manifest.get("data")  # what they were, not where; None: not known
    expected = None if data is None else data["tokenizer"]
    named = Path(manifest["config"]["data"]["tokenizer"])
    for path in (run_dir / TOKENIZER, named, *besides):
        with suppress(OSError):
            if path.is_file() and (found := file_sum(path)) == (expected or found):
                return path
    return None
