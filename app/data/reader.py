"""What gives a data-parallel rank its sequences."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np


class Reader(Protocol):
    """Where a data-parallel rank gets its sequences: `PackedSequences`, `StreamReader`, or
    `BlendReader` of several of these.
    """

    def sample(self, index: int) -> np.ndarray:
        """Tokens of global sequence `index`, PADDING at the end of a short one: int64 [S + 1]."""

    def state(self, sequences: int) -> dict[str, Any] | None:
        """Position beyond the count of used sequences, as plain values."""
