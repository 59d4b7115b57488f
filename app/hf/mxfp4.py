"""Experts' weights in MXFP4, as GPT-OSS is published: FP4 (e2m1) values with a scale per 32.

A weight of shape (E, I, O) has two tensors of bytes: `<name>_blocks` (E, O, I/32, 16), with two
values in each byte, the low four bits first; `<name>_scales` (E, O, I/32) of powers of two (e8m0).
Format: OCP Microscaling Formats (MX) 1.0.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import embedding

BLOCKS, SCALES = "_blocks", "_scales"  # suffixes of the two tensors
VALUES = 32  # that share a scale
BYTES = VALUES // 2
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of e2m1; the highest bit is the sign
Bounds = tuple[int, int]


def fits(shape: tuple[int, ...]) -> bool:
    """Return whether a weight of this shape consists of such blocks."""
    return len(shape) == 3 and shape[1] % VALUES == 0


def shapes(shape: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Return the shapes of the blocks and the scales of a weight that `fits`."""
    experts, inputs, outputs = shape
    scales = [experts, outputs, inputs // VALUES]
    return [*scales, BYTES], scales


def blocks_of(region: tuple[Bounds, ...]) -> tuple[Bounds, ...]:
    """Return the region of the scales that a region of the weight needs."""
    experts, (low, high), outputs = region
    return experts, outputs, (low // VALUES, -(-high // VALUES))


def dequantised(blocks: Tensor, scales: Tensor, inputs: Bounds) -> Tensor:
    """Return a region of the weight in bf16, which holds every finite value exactly, from the
    blocks and scales that it needs; `inputs` is its range of the second dimension.
    """
    positive = torch.tensor(MAGNITUDES, dtype=torch.bfloat16)
    value = torch.cat((positive, -positive))
    byte = torch.arange(256)
    pairs = torch.stack((value[byte % 16], value[byte // 16]), dim=1)
    values = embedding(blocks.int(), pairs).flatten(-2)
    values *= scales.view(torch.float8_e8m0fnu).bfloat16()[..., None]
    low, high = inputs
    values = values.flatten(-2).narrow(2, low % VALUES, high - low)
    found = values.new_empty(len(values), high - low, values.shape[1])
    for expert, each in zip(found, values, strict=True):
        expert.copy_(each.t())  # three times as fast as all of them together
    return found
