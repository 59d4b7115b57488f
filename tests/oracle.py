"""Values that other programs computed, as tests/golden/*.json.gz: one line of JSON each."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).parent / "golden"


def oracle(name: str) -> Any:
    """The content of tests/golden/NAME.json.gz; `meta` says which program computed it."""
    return json.loads(gzip.decompress((GOLDEN / f"{name}.json.gz").read_bytes()))
