"""Entries of matrices that FP8 lose: those that become zero, and those that are clipped.

A matrix is read once more for it, right after it has been quantised. Whether that is done is
written on the device, so captured graphs count in the steps that are looked at and in no other.

Shapes: R × C a matrix, N its entries.
"""

from __future__ import annotations

import torch
from torch import Tensor

from app.kernels.common import usable
from app.kernels.fp8.lost_entries import count_lost
from app.model.fp8.delayed import EACH, LinearScales
from app.model.fp8.quantised import Quantised
from app.model.fp8.reference import E4M3, E5M2

LARGEST = tuple(torch.finfo(dtype).max for dtype in (E4M3, E4M3, E5M2))  # of `delayed`


class LostEntries:
    """Of all matrices of a rank in one step, by kind of matrix."""

    def __init__(self, device: torch.device) -> None:
        # not zero; of these become zero; beyond the largest number
        self.counts_33 = torch.zeros(EACH, 3, dtype=torch.int64, device=device)
        self.wanted = torch.zeros(1, dtype=torch.int32, device=device)
        self.none = torch.zeros((), device=device)

    def begin_step(self) -> None:
        """Forget what has been counted in the last step, or in one that is taken again."""
        self.counts_33.zero_()

    @torch.no_grad()
    def count(self, scales: LinearScales | None, which: int, x_RC: Tensor, made: Quantised) -> None:
        """Those of a matrix and what it has become; `scales` of its layer, where it has any. Rows
        that have filled it up are not counted, and of two copies the one by rows is.
        """
        assert made.by_rows is not None, "it has just been quantised"
        x_N = x_RC.detach().reshape(-1)
        data_N = made.by_rows.view(torch.uint8).reshape(-1)[: len(x_N)]
        scale = None
        if scales is not None:  # before they are known nothing is beyond, by the same kernel
            scale = scales.scale(which) if scales.known else self.none
        counts_3, largest = self.counts_33[which], LARGEST[which]
        if usable(x_N):
            count_lost(x_N, data_N, counts_3, wanted=self.wanted, scale=scale, largest=largest)
            return
        present_N = x_N != 0
        zeroed_N = present_N & ((data_N & 127) == 0)
        beyond_N = torch.zeros_like(present_N)
        if scale is not None:
            beyond_N = x_N.float().abs() * scale > largest
        found_3 = torch.stack([each_N.sum() for each_N in (present_N, zeroed_N, beyond_N)])
        counts_3 += found_3 * self.wanted
