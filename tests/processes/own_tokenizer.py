"""Shared by test_own_tokenizer.py and other tests."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from app.config import Run


def with_tokenizer(run: Run, spec: Path | str) -> Run:
    return dataclasses.replace(run, data=dataclasses.replace(run.data, tokenizer=str(spec)))
