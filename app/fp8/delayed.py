"""Scales of the recipe `delayed`, computed from the amax (largest magnitude) of earlier steps.

A matrix is quantised in one pass, which also records its amax. At the end of a step, the ranks with
shards of the same layers all-reduce the amax, and each scale is set by the maximum over the last H
steps (Micikevicius et al. 2022). Skipped updates and validation change nothing. Until a layer has
had its first step, its matrices are scaled by their own amax, as by `current`: with a scale of 1,
gradients would underflow.

Shapes: M matrices, three for each layer: input, weight, output gradient; H steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from app.model.layers.layer_groups import size

INPUT, WEIGHT, GRAD = range(3)  # a layer's matrices
EACH = 3


class LinearScales:
    """Scales and amax of one layer's three matrices: views of `DelayedScales`."""

    def __init__(self, scales_3: Tensor, largest_3: Tensor) -> None:
        self.scales_3 = scales_3
        self.largest_3 = largest_3  # of this step so far
        self.known = False  # from an earlier step

    def scale(self, which: int) -> Tensor:
        """Return the factor that quantises a matrix, fp32 [1]; undefined until `known`."""
        return self.scales_3[which : which + 1]

    def largest(self, which: int) -> Tensor:
        """Return the memory that records a matrix's amax of this step, fp32 [1]."""
        return self.largest_3[which : which + 1]

    def note(self, which: int, largest: Tensor) -> None:
        """Record a matrix's amax, a scalar; NaN is ignored."""
        noted = self.largest(which)
        noted.copy_(torch.fmax(noted, largest.float()))


class Overflows:
    """Counts, on the device, of matrices with entries beyond the dtype's maximum, which were
    clipped.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self.steps_M = torch.zeros(count, device=device)  # number of steps with overflow
        # largest ratio of amax to the dtype's maximum
        self.most_M = torch.zeros(count, device=device)
        self.steps = torch.zeros((), device=device)  # number of steps

    def note(self, times_M: Tensor, counts: Tensor) -> None:
        """Add a step. `times_M`: amax divided by the largest representable number; `counts`: 1, or
        0 for a step that was skipped.
        """
        self.steps_M += (times_M > 1).float()
        torch.maximum(self.most_M, times_M, out=self.most_M)
        self.steps += counts

    def take(self) -> tuple[Tensor, Tensor]:
        """Return the counts since the last call, by kind of matrix, and reset them.

        Steps with overflow and steps in all, summed over layers, [2, 3]; the largest ratio of amax
        to the dtype's maximum, [3].
        """
        by_layer = self.steps_M.view(-1, EACH), self.most_M.view(-1, EACH)
        sums_3 = by_layer[0].sum(dim=0)
        found_23 = torch.stack((sums_3, (self.steps * len(by_layer[0])).expand(EACH)))
        most_3 = by_layer[1].amax(dim=0) if len(by_layer[1]) else torch.zeros_like(sums_3)
        for each in (self.steps_M, self.most_M, self.steps):
            each.zero_()
        return found_23, most_3


class DelayedScales:
    """Scales and amax history of all matrices of a rank's layers, by the global names of their
    weights.

    `limits_3`: dtype maxima of a layer's three matrices. `group`: the ranks with shards of the same
    layers; None for this rank alone. `margin`: scales are 2^-margin times the largest that fits.
    """

    def __init__(
        self,
        names: Sequence[str],
        limits_3: Sequence[float],
        *,
        margin: int,
        history: int,
        group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        self.group = group
        count = EACH * len(names)
        self.history_HM = torch.zeros(history, count, device=device)  # newest first; 0: none yet
        self.scales_M = torch.ones(count, device=device)
        self.largest_M = torch.zeros(count, device=device)
        fitting = [limit * 2.0**-margin for limit in limits_3]
        self.limits_M = torch.tensor(fitting, device=device).repeat(len(names))
        self.room = 2.0**margin  # factor by which an entry may exceed the amax of earlier steps
        self.overflows = Overflows(count, device)
        pairs = zip(self.scales_M.split(EACH), self.largest_M.split(EACH), strict=True)
        self.of = {
            name: LinearScales(scales_3, largest_3)
            for name, (scales_3, largest_3) in zip(names, pairs, strict=False)
        }

    @property
    def known(self) -> bool:
        """True if all layers have scales from an earlier step, so that work may be captured."""
        return all(scales.known for scales in self.of.values())

    def begin_step(self) -> None:
        """Clear the recorded amax, also before a step is rerun."""
        self.largest_M.zero_()

    @torch.no_grad()
    def finish_step(self, skipped: Tensor) -> None:
        """Update the history and scales, unless the step was `skipped` (fp32 scalar, 1 or 0)."""
        latest_M = self.largest_M.clone()
        if size(self.group) > 1:
            dist.all_reduce(latest_M, dist.ReduceOp.MAX, self.group)
        # an infinite amax counts as overflow, but must not enter the history
        found_M = latest_M.nan_to_num(nan=0.0, posinf=torch.inf)
        latest_M = torch.where(latest_M.isfinite(), latest_M, 0.0)
        history_HM = torch.cat((latest_M[None], self.history_HM[:-1]))
        most_M = history_HM.amax(dim=0)
        scales_M = (self.limits_M / most_M).clamp(max=torch.finfo(torch.float32).max)
        scales_M = torch.where(most_M > 0, scales_M, self.scales_M)
        keeps = skipped > 0
        if self.known:  # otherwise some were scaled by their own amax and cannot overflow
            times_M = found_M * self.scales_M / (self.limits_M * self.room)
            times_M = times_M.clamp(max=torch.finfo(torch.float32).max)  # metrics are numbers
            self.overflows.note(torch.where(keeps, 0.0, times_M), (~keeps).float())
        self.history_HM.copy_(torch.where(keeps, self.history_HM, history_HM))
        self.scales_M.copy_(torch.where(keeps, self.scales_M, scales_M))

    def stepped(self) -> None:
        """Mark all scales as known: a step's update was not skipped."""
        for scales in self.of.values():
            scales.known = True

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield, for every layer that has had a step, its scales and their amax history: [3, 1 +
        H].
        """
        both_M1H = torch.cat((self.scales_M[None], self.history_HM)).T
        for (name, scales), rows_31H in zip(self.of.items(), both_M1H.split(EACH), strict=False):
            if scales.known:
                yield name, rows_31H.contiguous()

    def load(self, name: str, saved_31H: Tensor) -> None:
        """Restore a layer from `state`; a longer history is cut to its newest steps."""
        place = EACH * list(self.of).index(name)
        own = slice(place, place + EACH)
        kept = min(len(self.history_HM), saved_31H.shape[1] - 1)
        self.scales_M[own] = saved_31H[:, 0].to(self.scales_M)
        self.history_HM[:, own] = 0.0
        self.history_HM[:kept, own] = saved_31H[:, 1 : 1 + kept].T.to(self.scales_M)
        self.of[name].known = True

    def forget(self) -> None:
        """Reset to the state before the first step."""
        self.history_HM.zero_()
        self.scales_M.fill_(1.0)
        for scales in self.of.values():
            scales.known = False
