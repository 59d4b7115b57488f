"""Sums of a run's profiled steps, in the folder `profile` of its run folder.

profile/  trace.json.gz  memory.pickle (with a GPU)  sums.json
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from app.errors import ConfigError, writing
from app.own_files import write_whole
from app.planner.measured import TraceSums

PROFILE = "profile"
TRACE, MEMORY, SUMS = "trace.json.gz", "memory.pickle", "sums.json"


def write_sums(run_dir: Path, sums: TraceSums) -> None:
    """Write the sums into the folder, which exists. Raises ConfigError."""
    with writing(run_dir):
        write_whole(run_dir / PROFILE / SUMS, json.dumps(asdict(sums)) + "\n")


def read_trace(run_dir: Path) -> TraceSums | None:
    """Return the sums of a run; None if it was not profiled. Raises ConfigError."""
    path = run_dir / PROFILE / SUMS
    try:
        return TraceSums(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        rule = f"cannot be read: {error}"
        raise ConfigError("file", path, rule, advice="remove it, or profile again") from error
