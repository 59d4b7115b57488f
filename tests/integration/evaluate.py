"""Shared by test_evaluate.py and other tests."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.programs import run_forked


def evaluated(folder: Path, *words: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    line = [sys.executable, "-m", "app.cli.evaluate", str(folder), *words]
    cache = f"data.cache_dir={folder.parent}/cache"
    done = run_forked(folder.parent, [*line, cache])
    return done.returncode, done.stdout, done.stderr
