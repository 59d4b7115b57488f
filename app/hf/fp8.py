"""Weights in FP8 (e4m3) with a scale per block, row or tensor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from app.hf.quantisation import PER_TENSOR, Extent

Bounds = tuple[int, int]


def scales_shapes(shape: Sequence[int], extent: Extent) -> list[list[int]]:
    """Return the shapes that the scales of a weight may have, the usual one first."""
    sizes = zip(shape, extent, strict=True)
    grid = [1 if block is None else -(-size // block) for size, block in sizes]
    return [[], [1], grid] if extent == PER_TENSOR else [grid]


def extent_of(
    scales: Sequence[int], shape: Sequence[int], extents: Iterable[Extent]
) -> Extent | None:
    """Return which extent the shape of a weight's scales tells; None if it fits none."""
    fits = (extent for extent in extents if [*scales] in scales_shapes(shape, extent))
    return next(fits, None)


def scales_of(region: Sequence[Bounds], extent: Extent) -> tuple[Bounds, ...]:
    """Return the region of the scales that a region of the weight needs."""
    sides = zip(region, extent, strict=True)
    return tuple(
        (0, 1) if size is None else (low // size, -(-high // size)) for (low, high), size in sides
    )


def scaled(part: Tensor, scales: Tensor, region: Sequence[Bounds], extent: Extent) -> Tensor:
    """Return a region of a weight in fp32, from its FP8 values and the scales that it needs."""
    scales = scales.float()
    for dim, ((low, high), size) in enumerate(zip(region, extent, strict=True)):
        if size is not None:
            first = low // size * size
            scales = scales.repeat_interleave(size, dim).narrow(dim, low - first, high - low)
    return part.float().mul_(scales)
