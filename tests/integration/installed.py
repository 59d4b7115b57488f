"""Shared by test_installed.py and other tests."""

from __future__ import annotations

import re


def normal(distribution: str) -> str:
    """The name of a distribution as an index knows it."""
    return re.sub("[-_.]+", "-", distribution).lower()
