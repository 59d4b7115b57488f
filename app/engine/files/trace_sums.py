"""Sums of a run's profiled steps, in the folder `profile` of its run folder.

profile/  trace.json.gz  memory.pickle (with a GPU)  sums.json
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from app.engine.files.checked import (
    fields,
    map_of,
    nullable,
    number,
    parse_strictly,
    unreadable,
    whole,
)
from app.errors import writing
from app.own_files import read_regular, write_whole
from app.planner.measured import TraceSums

PROFILE = "profile"
_SUMS = fields(
    {"first": whole(), "last": whole()},
    parts=map_of(number(0)),
    compute_ms=nullable(number(0)),
    exchange_ms=nullable(number(0)),
    kernels=number(0),
)
TRACE, MEMORY, SUMS = "trace.json.gz", "memory.pickle", "sums.json"


def write_sums(run_dir: Path, sums: TraceSums) -> None:
    """Write the sums into the folder, which exists. Raises ConfigError."""
    with writing(run_dir):
        write_whole(run_dir / PROFILE / SUMS, json.dumps(asdict(sums)) + "\n")


def read_trace(run_dir: Path) -> TraceSums | None:
    """Return the sums of a run; None if it was not profiled. Raises ConfigError."""
    path = run_dir / PROFILE / SUMS
    try:
        found = parse_strictly(read_regular(path))
        _SUMS("", found)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise unreadable(path, error, "remove it, or profile again") from error
    return TraceSums(**found)
