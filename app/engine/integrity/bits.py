"""Sums over the bits of tensors: equal for equal bits, on every device and in any order of adding.

The sum is one of integers modulo 2^64, so a difference in one bit always changes it; several
differences, or values that have changed places, cancel with a probability of about 2^-32.
"""

from __future__ import annotations

import torch
from torch import Tensor

COLUMNS = 1021  # a prime, so that rows of a matrix do not fall on the same columns
FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)  # odd: no bit of a column's sum is lost


def bits_of(tensor: Tensor) -> Tensor:
    """Return the sum over a tensor's bits, an int64 scalar on its device. Launches work only."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    wide = 4 if len(flat) % 4 == 0 and flat.data_ptr() % 4 == 0 else 1
    words = flat.view(torch.int32) if wide == 4 else flat
    whole = len(words) - len(words) % COLUMNS
    columns = words[:whole].view(-1, COLUMNS).sum(dim=0, dtype=torch.int64)
    columns[: len(words) - whole] += words[whole:]
    factors = torch.arange(1, 2 * COLUMNS, 2, device=tensor.device) * FACTOR
    # multiplied by another odd number for each column, then folded: high bits reach low ones
    mixed = columns * factors
    return (mixed ^ (mixed >> 31)).sum()
