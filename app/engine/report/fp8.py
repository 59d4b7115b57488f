"""Measure overflow of FP8 matrices at the log interval (docs/fp8.md)."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from app.collectives import all_reduce
from app.engine.step.engine import Engine
from app.fp8.linear import Fp8Layers
from app.programs import page

KINDS = ("inputs", "weights", "grads")  # kinds of matrices, as in `app.fp8.delayed`
OFTEN = 0.01  # share of matrices over steps; more overflows justify one more bit of margin
# times the FP8 maximum; up to here clipping costs no more than rounding may (E4M3)
ROUNDED = 16 / 15


class Fp8Meter:
    """Counter of FP8 overflows since process start."""

    def __init__(self, engine: Engine) -> None:
        self.margin = engine.plan.run.precision.fp8.margin
        fp8 = engine.state(Fp8Layers)
        self.scales = None if fp8 is None else fp8.scales
        self.world = engine.groups.world
        # matrices with entries beyond the FP8 maximum by more than rounding error
        self.overflows = 0.0
        self.matrices = 0.0  # matrices in all
        self.most = 0.0  # largest entry over the FP8 maximum

    def metrics(self) -> dict[str, float]:
        """Return overflows since the last call over all ranks, which call this together."""
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

    def advice(self) -> str | None:
        """Say what to change in the next run; None if overflows are rare."""
        if self.overflows <= OFTEN * self.matrices:
            return None
        share = self.overflows / self.matrices
        return (
            f"{share:.1%} of the matrices in FP8, counted by steps, had entries beyond the "
            f"largest number of their type, up to {self.most:.3g} times that; with "
            f"precision.fp8.margin={self.margin + 1} twice as large ones fit ({page('fp8.md')})"
        )


def _shares(some_3: Sequence[float], all_3: Sequence[float]) -> dict[str, float]:
    """Return shares by kind of matrix, without kinds that have no entries."""
    kinds = zip(KINDS, some_3, all_3, strict=True)
    return {kind: some / every for kind, some, every in kinds if every}
