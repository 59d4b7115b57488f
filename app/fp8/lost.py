"""Counts of matrix entries that FP8 loses: those that underflow to zero, and those that are
clipped.

Each matrix is read once more right after quantisation. A flag on the device enables the counting,
so that captured graphs count in the selected steps only.

Shapes: R × C a matrix, N its entries.
"""

from __future__ import annotations

import torch
from torch import Tensor

from app.fp8.delayed import EACH, LinearScales
from app.fp8.quantised import Quantised
from app.fp8.reference import E4M3, E5M2
from app.kernels.common import usable
from app.kernels.fp8.lost_entries import count_lost

# dtype maxima of a layer's matrices in the recipe `delayed`
LARGEST = tuple(torch.finfo(dtype).max for dtype in (E4M3, E4M3, E5M2))


class LostEntries:
    """Counts of lost entries in one step, over all matrices of a rank, by kind of matrix."""

    def __init__(self, device: torch.device) -> None:
        # columns: nonzero entries; of these, rounded to zero; of these, clipped
        self.counts_33 = torch.zeros(EACH, 3, dtype=torch.int64, device=device)
        self.wanted = torch.zeros(1, dtype=torch.int32, device=device)
        self.none = torch.zeros((), device=device)

    def begin_step(self) -> None:
        """Clear the counts, also before a step is rerun."""
        self.counts_33.zero_()

    @torch.no_grad()
    def count(self, scales: LinearScales | None, which: int, x_RC: Tensor, made: Quantised) -> None:
        """Add the counts of a matrix `x_RC` that was quantised to `made`.

        `scales`: those of its layer; None for recipes without. Padding rows are not counted; of two
        copies the one by rows is.
        """
        assert made.by_rows is not None, "count a matrix right after quantising it"
        x_N = x_RC.detach().reshape(-1)
        data_N = made.by_rows.view(torch.uint8).reshape(-1)[: len(x_N)]
        scale = None
        if scales is not None:  # until scales are known the kernel is given 0: nothing is clipped
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
