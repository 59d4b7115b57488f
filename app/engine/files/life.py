"""Processes of one rank: a supervisor starts another when one has died."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ENDED_WITH = "ended with "  # before the exit code of a run, in the supervisor's file


@dataclass(frozen=True, slots=True)
class Life:
    """One process of a rank that its supervisor starts again when it has died."""

    restarts: int = 0  # processes of this rank before
    died_at: float = 0.0  # when the one before died, seconds since 1970; 0: there was none
    progress: Path | None = None  # its supervisor's file; not empty after progress
