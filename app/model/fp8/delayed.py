"""Scales of the recipe `delayed`: those of a matrix come from its largest entries of earlier steps.

So a matrix is quantised in one pass, and its largest entry noted on the way. When a step is over,
the ranks that have the same layers agree on the largest entries of all their tokens and parts, and
each scale becomes that of the largest of the last steps (Micikevicius et al. 2022). A step whose
update is skipped leaves no trace, and neither does a validation. Before a layer has had its first
step, its matrices are scaled by their own largest entries, as by `current`: a scale of 1 would lose
gradients altogether.

Shapes: M matrices, three for each layer: what comes in, its weight, its output's gradient; H steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from app.model.layer_groups import size

INPUT, WEIGHT, GRAD = range(3)  # a layer's matrices
EACH = 3


class LinearScales:
    """Of one layer's matrices; views of all those of a rank."""

    def __init__(self, scales_3: Tensor, largest_3: Tensor) -> None:
        self.scales_3 = scales_3
        self.largest_3 = largest_3  # of this step so far
        self.known = False  # from an earlier step

    def scale(self, which: int) -> Tensor:
        """What a matrix is multiplied with, fp32 [1]; of no use until it is known."""
        return self.scales_3[which : which + 1]

    def largest(self, which: int) -> Tensor:
        """Where its largest entry of this step is noted, fp32 [1]."""
        return self.largest_3[which : which + 1]

    def note(self, which: int, largest: Tensor) -> None:
        """A matrix's largest entry, a scalar; NaN is left out."""
        noted = self.largest(which)
        noted.copy_(torch.fmax(noted, largest.float()))


class Overflows:
    """How often matrices have had entries beyond the largest number of their type, which became
    that number, since somebody last asked; on the device.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self.steps_M = torch.zeros(count, device=device)  # with such an entry
        self.most_M = torch.zeros(count, device=device)  # times the largest number, at worst
        self.steps = torch.zeros((), device=device)  # in all

    def note(self, times_M: Tensor, counts: Tensor) -> None:
        """A step whose largest entries were so many times the largest number; `counts`: 1, or 0
        for one that left no trace.
        """
        self.steps_M += (times_M > 1).float()
        torch.maximum(self.most_M, times_M, out=self.most_M)
        self.steps += counts

    def take(self) -> tuple[Tensor, Tensor]:
        """Since the last call, by kind of matrix: steps with such an entry of all layers and steps
        of all layers, [2, 3]; times the largest number at worst, [3].
        """
        by_layer = self.steps_M.view(-1, EACH), self.most_M.view(-1, EACH)
        sums_3 = by_layer[0].sum(dim=0)
        found_23 = torch.stack((sums_3, (self.steps * len(by_layer[0])).expand(EACH)))
        most_3 = by_layer[1].amax(dim=0) if len(by_layer[1]) else torch.zeros_like(sums_3)
        for each in (self.steps_M, self.most_M, self.steps):
            each.zero_()
        return found_23, most_3


class DelayedScales:
    """Of all matrices of a rank's layers, by the global names of the layers' weights.

    `limits_3`: largest numbers of the types of a layer's matrices. `group`: the ranks that have the
    same layers, or parts of them; None: this one. A scale is 2^-margin of what would fit.
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
        self.room = 2.0**margin  # by which an entry may outgrow what its scale is of
        self.overflows = Overflows(count, device)
        pairs = zip(self.scales_M.split(EACH), self.largest_M.split(EACH), strict=True)
        self.of = {
            name: LinearScales(scales_3, largest_3)
            for name, (scales_3, largest_3) in zip(names, pairs, strict=False)
        }

    @property
    def known(self) -> bool:
        """Whether all are, so that work may be captured."""
        return all(scales.known for scales in self.of.values())

    def begin_step(self) -> None:
        """Forget what has been noted since the last step, or of one that is taken again."""
        self.largest_M.zero_()

    @torch.no_grad()
    def finish_step(self, skipped: Tensor) -> None:
        """Take in what a step has noted, unless its update was `skipped` (fp32 scalar, 1 or 0)."""
        latest_M = self.largest_M.clone()
        if size(self.group) > 1:
            dist.all_reduce(latest_M, dist.ReduceOp.MAX, self.group)
        # infinite ones are beyond any number, and say nothing of a scale
        found_M = latest_M.nan_to_num(nan=0.0, posinf=torch.inf)
        latest_M = torch.where(latest_M.isfinite(), latest_M, 0.0)
        history_HM = torch.cat((latest_M[None], self.history_HM[:-1]))
        most_M = history_HM.amax(dim=0)
        scales_M = (self.limits_M / most_M).clamp(max=torch.finfo(torch.float32).max)
        scales_M = torch.where(most_M > 0, scales_M, self.scales_M)
        keeps = skipped > 0
        if self.known:  # otherwise some were scaled by their own largest entries
            times_M = found_M * self.scales_M / (self.limits_M * self.room)
            times_M = times_M.clamp(max=torch.finfo(torch.float32).max)  # metrics are numbers
            self.overflows.note(torch.where(keeps, 0.0, times_M), (~keeps).float())
        self.history_HM.copy_(torch.where(keeps, self.history_HM, history_HM))
        self.scales_M.copy_(torch.where(keeps, self.scales_M, scales_M))

    def stepped(self) -> None:
        """A step's update has not been skipped: from now on there are scales of earlier steps."""
        for scales in self.of.values():
            scales.known = True

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """Of every layer that has had a step: its scales, then what they are of: [3, 1 + H]."""
        both_M1H = torch.cat((self.scales_M[None], self.history_HM)).T
        for (name, scales), rows_31H in zip(self.of.items(), both_M1H.split(EACH), strict=False):
            if scales.known:
                yield name, rows_31H.contiguous()

    def load(self, name: str, saved_31H: Tensor) -> None:
        """What `state` gave of a layer; of another length, the newest steps of it."""
        place = EACH * list(self.of).index(name)
        own = slice(place, place + EACH)
        kept = min(len(self.history_HM), saved_31H.shape[1] - 1)
        self.scales_M[own] = saved_31H[:, 0].to(self.scales_M)
        self.history_HM[:, own] = 0.0
        self.history_HM[:kept, own] = saved_31H[:, 1 : 1 + kept].T.to(self.scales_M)
        self.of[name].known = True

    def forget(self) -> None:
        """No layer has had a step yet."""
        self.history_HM.zero_()
        self.scales_M.fill_(1.0)
        for scales in self.of.values():
            scales.known = False
