"""Shared by test_group_table.py and other tests."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from app.errors import ConfigError
from app.plan.layout import ParallelLayout

ORDERS = ("tp-cp-ep-dp-pp", "dp-pp-cp-tp-ep", "pp-dp-ep-cp-tp")


def small_layouts(worlds: range) -> Iterator[ParallelLayout]:
    """Every legal layout of so many ranks, in three orders of axes."""
    for world in worlds:
        divisors = [n for n in range(1, world + 1) if world % n == 0]
        for tp, cp, pp, ep, etp in itertools.product(divisors, repeat=5):
            for order in ORDERS:
                try:
                    yield ParallelLayout(world, tp, cp, pp=pp, ep=ep, etp=etp, order=order)
                except ConfigError:
                    continue
