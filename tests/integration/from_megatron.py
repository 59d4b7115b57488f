"""Shared by test_from_megatron.py and other tests."""

from __future__ import annotations

import re

from tests.training import ROOT

PAGE = (ROOT / "docs/from-megatron.md").read_text()


ROWS = [
    tuple(cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1])
    for line in PAGE.splitlines()
    if line.startswith("| `--")
]
