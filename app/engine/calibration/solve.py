"""Solve measured seconds for the speeds of `HardwareProfile`.

Inverts the formulas of `app.plan.cost.rates`. Pure functions.
"""

from __future__ import annotations

from collections.abc import Sequence

from app.errors import ConfigError

TERA, GIGA, MICRO = 1e12, 1e9, 1e-6
MOST_TILE = 512.0  # rows; no kernel has larger tiles
LEAST = 1e-9  # seconds, less than any kernel takes


def rate(amount: float, seconds: float, started: float, unit: float = GIGA) -> float:
    """Return bytes or operations per second in `unit`, without the kernels' start time."""
    return amount / max(LEAST, seconds - started) / unit


def line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Fit (latency in seconds, bytes per second) to points of (bytes, seconds).

    Minimises the squares of relative errors. Raises ConfigError if more bytes take no longer.
    """
    weights = [1 / seconds**2 for _, seconds in points]
    total = sum(weights)
    x = sum(w * size for w, (size, _) in zip(weights, points, strict=True)) / total
    y = sum(w * seconds for w, (_, seconds) in zip(weights, points, strict=True)) / total
    pairs = list(zip(weights, points, strict=True))
    above = sum(w * (size - x) * (seconds - y) for w, (size, seconds) in pairs)
    below = sum(w * (size - x) ** 2 for w, (size, _) in pairs)
    slope = above / below
    if slope <= 0:
        rule = "larger messages took no longer; something else is running on these GPUs"
        raise ConfigError("links", [round(seconds, 6) for _, seconds in points], rule)
    return max(0.0, y - slope * x), 1 / slope


def pair(
    first: tuple[float, float, float], second: tuple[float, float, float]
) -> tuple[float, float]:
    """Solve two equations a·x + b·y = c, each given as (a, b, c), for x and y."""
    (a, b, c), (d, e, f) = first, second
    determinant = a * e - b * d
    return (c * e - b * f) / determinant, (a * f - c * d) / determinant


def gemms(points: Sequence[tuple[float, float, float]], memory: float) -> tuple[float, float]:
    """Fit (gemm_tflops, gemm_memory) to GEMMs given as (operations, bytes, seconds).

    Minimises the squares of relative errors. `memory` is in GB/s; the share gemm_memory is clamped
    to [0, 1].
    """
    # divided by the measured seconds, so that errors are relative
    rows = [(flops / took, moved / (memory * GIGA) / took) for flops, moved, took in points]
    aa, ab, bb = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    a, b = (sum(row[i] for row in rows) for i in (0, 1))
    share = min(1.0, max(0.0, pair((aa, ab, a), (ab, bb, b))[1]))
    return aa / max(LEAST, a - share * ab) / TERA, share


def grouped(
    many: tuple[float, float, float], few: tuple[float, float, float], most: float
) -> tuple[float, float]:
    """Solve for (grouped_tflops, grouped_tile) from two grouped GEMMs.

    They have many and few rows per expert, each given as (operations, weight elements, seconds
    without the memory share). The rate is capped at `most` TFLOP/s; the tile size then takes the
    difference.
    """
    per_flop, _ = pair(
        (many[0], 2 * many[1], many[2]),
        (few[0], 2 * few[1], few[2]),
    )
    per_flop = max(per_flop, 1 / (most * TERA))
    tiles = [(took / per_flop - flops) / (2 * weights) for flops, weights, took in (many, few)]
    tile = min(MOST_TILE, max(0.0, sum(tiles) / 2))
    return min(most, (many[0] + 2 * tile * many[1]) / many[2] / TERA), tile
