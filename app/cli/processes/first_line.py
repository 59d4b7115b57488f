"""First line of a program that is silent for seconds while it imports.

Imports little, as programs call this before their slow imports.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

LAYOUTS = "what=layouts"


def begin_layouts(arguments: Sequence[str]) -> None:
    """Print to stderr that a search for layouts begins, if the arguments ask for one."""
    if LAYOUTS in arguments:
        print("searching layouts: starting", file=sys.stderr, flush=True)
