"""Types in which frozen linear layers may be held, and the bytes of each."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from app.choices import BaseKind
from app.plan.model.weight import Weight

# values of the last dimension that have one fp32 scale
BLOCKS: Mapping[BaseKind, int] = {BaseKind.fp8: 128, BaseKind.nf4: 64}
VALUES_PER_BYTE: Mapping[BaseKind, int] = {BaseKind.fp8: 1, BaseKind.nf4: 2}
SCALE = 4


def is_held(weight: Weight) -> bool:
    """Return whether it is a matrix of a linear layer or of experts, not of an adapter."""
    return weight.linear and weight.rank is None


def held_bytes(kind: BaseKind, shape: tuple[int, ...]) -> int:
    """Return the bytes of a tensor of this shape, scales included."""
    numel = prod(shape)
    return numel // VALUES_PER_BYTE[kind] + SCALE * numel // BLOCKS[kind]


def restored_bytes(kind: BaseKind, numel: int, size: int) -> int:
    """Return the bytes that a GEMM's weight takes while it is dequantised to `size` bytes each."""
    if kind is BaseKind.fp8:
        return numel * size
    return numel * 4 // VALUES_PER_BYTE[kind] + numel * (4 + size)  # indices, fp32, the result
