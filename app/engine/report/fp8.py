"""Measure overflow and underflow of FP8 matrices at the log interval (docs/fp8.md)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from app.collectives import all_reduce
from app.engine.step.engine import Engine
from app.fp8.delayed import EACH
from app.fp8.linear import Fp8Layers

KINDS = ("inputs", "weights", "grads")  # kinds of matrices, as in `app.fp8.delayed`
OFTEN = 0.01  # share of matrices over steps; more overflows justify one more bit of margin
FATES = {"underflow": "became zero", "clipped": "were clipped"}  # key -> words
# times the FP8 maximum; up to here clipping costs no more than rounding may (E4M3)
ROUNDED = 16 / 15


class Fp8Meter:
    """Counter of FP8 overflows since process start, and of lost entries at the log interval."""

    def __init__(self, engine: Engine) -> None:
        self.margin = engine.plan.run.precision.fp8.margin
        fp8 = engine.state(Fp8Layers)
        self.scales = None if fp8 is None else fp8.scales
        self.lost = None if fp8 is None else fp8.lost
        self.world = engine.groups.world
        # matrices with entries beyond the FP8 maximum by more than rounding error
        self.overflows = 0.0
        self.matrices = 0.0  # matrices in all
        self.most = 0.0  # largest entry over the FP8 maximum
        # by kind, over measured steps: non-zero entries, those made zero, those too large
        self.counts_33 = torch.zeros(EACH, 3, dtype=torch.int64)

    def begin(self) -> None:
        """Start counting lost entries in the next step; all ranks call it."""
        if self.lost is not None:
            self.lost.wanted.fill_(1)

    def metrics(self) -> dict[str, float]:
        """Return metrics over all ranks, which call this together after a counted step.

        Lost entries are of this step, overflows since the last call.
        """
        return self._overflows() | self._lost()

    def _overflows(self) -> dict[str, float]:
        if self.scales is None:
            return {}
        counts_23, most_3 = self.scales.overflows.take()
        all_reduce(counts_23, self.world)
        if self.world.size() > 1:
            dist.all_reduce(most_3, dist.ReduceOp.MAX, self.world)
        overflows_3, matrices_3 = counts_23.tolist()
        if not any(matrices_3):  # no step has yet used scales of an earlier one
            return {}
        most = max(most_3.tolist())
        self.overflows += sum(overflows_3) if most > ROUNDED else 0.0
        self.matrices += sum(matrices_3)
        self.most = max(self.most, most)
        shares = _shares(overflows_3, matrices_3)
        named = {f"fp8_overflow_{kind}": share for kind, share in shares.items()}
        return named | {"fp8_overflow_worst": most}

    def _lost(self) -> dict[str, float]:
        lost = self.lost
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
        """Return shares of non-zero entries by fate and kind of matrix."""
        present_3, zeroed_3, beyond_3 = counts_33.T.tolist()
        found = {"underflow": _shares(zeroed_3, present_3)}
        if self.scales is not None:  # current scaling never clips: it scales by the maximum
            found["clipped"] = _shares(beyond_3, present_3)
        return found

    def lost_entries(self) -> str | None:
        """Say what share of non-zero entries was lost over all measured steps; None without any."""
        if not self.counts_33.any():
            return None
        said = (
            f"{FATES[fate]}: "
            + ", ".join(f"{100 * share:.3g} % of {kind}" for kind, share in shares.items())
            for fate, shares in self._fates(self.counts_33).items()
        )
        return f"Entries of matrices in FP8 that {'; '.join(said)}"

    def advice(self) -> str | None:
        """Say what to change in the next run; None if overflows are rare."""
        if self.overflows <= OFTEN * self.matrices:
            return None
        share = self.overflows / self.matrices
        return (
            f"{share:.1%} of the matrices in FP8, counted by steps, had entries beyond the "
            f"largest number of their type, up to {self.most:.3g} times that; with "
            f"precision.fp8.margin={self.margin + 1} twice as large ones fit (docs/fp8.md)"
        )


def _shares(some_3: Sequence[float], all_3: Sequence[float]) -> dict[str, float]:
    """Return shares by kind of matrix, without kinds that have no entries."""
    kinds = zip(KINDS, some_3, all_3, strict=True)
    return {kind: some / every for kind, some, every in kinds if every}
