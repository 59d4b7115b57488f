"""From measured seconds to the speeds of `HardwareProfile`: the formulas of `app.plan.cost.rates`
the other way round. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from app.errors import ConfigError

TERA, GIGA, MICRO = 1e12, 1e9, 1e-6
MOST_TILE = 512.0  # rows: kernels have no larger tiles
LEAST = 1e-9  # seconds: shorter than any kernel


def rate(amount: float, seconds: float, started: float, unit: float = GIGA) -> float:
    """Units per second of bytes or operations, without what a kernel takes to start."""
    return amount / max(LEAST, seconds - started) / unit


def line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(seconds before the first byte, bytes per second) of (bytes, seconds), by least squares of
    relative errors. ConfigError where more bytes take no longer.
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
        rule = "more bytes took no longer: something else runs on these GPUs"
        raise ConfigError("links", [round(seconds, 6) for _, seconds in points], rule)
    return max(0.0, y - slope * x), 1 / slope


def pair(
    first: tuple[float, float, float], second: tuple[float, float, float]
) -> tuple[float, float]:
    """x and y of a·x + b·y = c, twice."""
    (a, b, c), (d, e, f) = first, second
    determinant = a * e - b * d
    return (c * e - b * f) / determinant, (a * f - c * d) / determinant


def gemms(points: Sequence[tuple[float, float, float]], memory: float) -> tuple[float, float]:
    """(gemm_tflops, gemm_memory) of products' (operations, bytes, seconds), by least squares
    of relative errors; `memory` in GB/s. The share is kept from 0 to 1.
    """
    # each divided by its seconds: parts of the measured time
    rows = [(flops / took, moved / (memory * GIGA) / took) for flops, moved, took in points]
    aa, ab, bb = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    a, b = (sum(row[i] for row in rows) for i in (0, 1))
    share = min(1.0, max(0.0, pair((aa, ab, a), (ab, bb, b))[1]))
    return aa / max(LEAST, a - share * ab) / TERA, share


def grouped(
    many: tuple[float, float, float], few: tuple[float, float, float], most: float
) -> tuple[float, float]:
    """(grouped_tflops, grouped_tile) of two products of many and of few rows per expert, each
    (operations, elements of its weights, seconds without their share for bytes). The rate is at
    most `most` TFLOP/s; tiles then make up for it.
    """
    per_flop, _ = pair(
        (many[0], 2 * many[1], many[2]),
        (few[0], 2 * few[1], few[2]),
    )
    per_flop = max(per_flop, 1 / (most * TERA))
    tiles = [(took / per_flop - flops) / (2 * weights) for flops, weights, took in (many, few)]
    tile = min(MOST_TILE, max(0.0, sum(tiles) / 2))
    return min(most, (many[0] + 2 * tile * many[1]) / many[2] / TERA), tile
