"""Which entries products in FP8 lose, measured at the log interval (docs/fp8.md)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from app.collectives import all_reduce
from app.engine.build import Engine
from app.model.fp8.delayed import EACH

KINDS = ("inputs", "weights", "grads")  # of matrices, in the order of `app.model.fp8.delayed`
OFTEN = 0.01  # of matrices and steps: more overflows are worth a power of two of room
FATES = {"underflow": "became zero", "clipped": "were clipped"}  # of entries
# times the largest number: clipping takes no more from smaller entries than rounding may (E4M3)
ROUNDED = 16 / 15


class Fp8Meter:
    """Overflows of a run's matrices since this process began, and what it loses at the log
    interval.
    """

    def __init__(self, engine: Engine) -> None:
        self.margin = engine.plan.run.precision.fp8.margin
        self.fp8 = engine.fp8
        self.world = engine.groups.world
        # matrices with entries beyond the largest number, where that took more than rounding
        self.overflows = 0.0
        self.matrices = 0.0  # in all
        self.most = 0.0  # times the largest number
        # by kind, in steps that were looked at: not zero, of these became zero, too large
        self.counts_33 = torch.zeros(EACH, 3, dtype=torch.int64)

    def begin(self) -> None:
        """Before a step whose lost entries are to be counted; all ranks have to call this."""
        if self.fp8.lost is not None:
            self.fp8.lost.wanted.fill_(1)

    def metrics(self) -> dict[str, float]:
        """After such a step: of this step, and since the last call. Of all ranks, which have to
        call this together.
        """
        return self._overflows() | self._lost()

    def _overflows(self) -> dict[str, float]:
        if self.fp8.scales is None:
            return {}
        counts_23, most_3 = self.fp8.scales.overflows.take()
        all_reduce(counts_23, self.world)
        if self.world.size() > 1:
            dist.all_reduce(most_3, dist.ReduceOp.MAX, self.world)
        overflows_3, matrices_3 = counts_23.tolist()
        if not any(matrices_3):  # no step yet by scales of earlier ones
            return {}
        most = max(most_3.tolist())
        self.overflows += sum(overflows_3) if most > ROUNDED else 0.0
        self.matrices += sum(matrices_3)
        self.most = max(self.most, most)
        shares = _shares(overflows_3, matrices_3)
        named = {f"fp8_overflow_{kind}": share for kind, share in shares.items()}
        return named | {"fp8_overflow_worst": most}

    def _lost(self) -> dict[str, float]:
        lost = self.fp8.lost
        if lost is None:
            return {}
        counts_33 = lost.counts_33.clone()
        lost.wanted.fill_(0)
        all_reduce(counts_33, self.world)
        found_33 = counts_33.cpu()
        self.counts_33 += found_33
        return {
            f"fp8_{fate}_{kind}": share
            for fate, shares in self._fates(found_33).items()
            for kind, share in shares.items()
        }

    def _fates(self, counts_33: Tensor) -> dict[str, dict[str, float]]:
        """Shares of entries by what becomes of them, and by kind of matrix."""
        present_3, zeroed_3, beyond_3 = counts_33.T.tolist()
        found = {"underflow": _shares(zeroed_3, present_3)}
        if self.fp8.scales is not None:  # else none is beyond what it is scaled by
            found["clipped"] = _shares(beyond_3, present_3)
        return found

    def lost_entries(self) -> str | None:
        """What was lost in all steps that were looked at, of all entries that are not zero; None:
        none was looked at.
        """
        if not self.counts_33.any():
            return None
        said = (
            f"{FATES[fate]}: "
            + ", ".join(f"{100 * share:.3g} % of {kind}" for kind, share in shares.items())
            for fate, shares in self._fates(self.counts_33).items()
        )
        return f"Entries of matrices in FP8 that {'; '.join(said)}"

    def advice(self) -> str | None:
        """What to change in the next run; None: nothing, by what has been measured."""
        if self.overflows <= OFTEN * self.matrices:
            return None
        share = self.overflows / self.matrices
        return (
            f"{share:.1%} of the matrices in FP8, counted by steps, had entries beyond the "
            f"largest number of their type, up to {self.most:.3g} times that; with "
            f"precision.fp8.margin={self.margin + 1} twice as large ones fit (docs/fp8.md)"
        )


def _shares(some_3: Sequence[float], all_3: Sequence[float]) -> dict[str, float]:
    """By kind of matrix, of those that there are any of."""
    kinds = zip(KINDS, some_3, all_3, strict=True)
    return {kind: some / every for kind, some, every in kinds if every}
