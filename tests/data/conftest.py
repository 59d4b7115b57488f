"""Corpora of a few documents, each with a cache folder of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from app.choices import Source
from app.config import DataConfig


def write_jsonl(path: Path, texts: list[str | None], field: str = "text") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        "".join(json.dumps({field: text, "number": i}) + "\n" for i, text in enumerate(texts)),
        encoding="utf-8",
    )


@pytest.fixture
def texts() -> list[str]:
    """Distinct documents of 4 to 43 bytes."""
    return [f"{i:03d}:" + chr(97 + i % 26) * (i * 7 % 40) for i in range(60)]


@pytest.fixture
def stream_config(tmp_path: Path) -> Callable[..., DataConfig]:
    """Writes a local dataset of several JSON lines files and gives the config that streams it."""

    def make(shards: list[list[str]], **options: object) -> DataConfig:
        for i, shard in enumerate(shards):
            write_jsonl(tmp_path / "stream" / f"part{i}.jsonl", shard)
        return DataConfig(
            **{
                "source": Source.hub,
                "name": str(tmp_path / "stream"),
                "streaming": True,
                "validation_documents": 5,
                "cache_dir": str(tmp_path / "cache"),
                **options,
            }
        )

    return make
