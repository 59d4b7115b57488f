"""Which entries products in eight bits lose, measured at the log interval (docs/fp8.md)."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from app.collectives import all_reduce
from app.engine.build import Engine

KINDS = ("inputs", "weights", "grads")  # of matrices, in the order of `app.model.fp8.delayed`
OFTEN = 0.01  # of matrices and steps: more overflows are worth a power of two of room


class Fp8Meter:
    """Overflows of a run's matrices since this process began."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.overflows = 0.0  # matrices with entries beyond the largest number, of all steps
        self.matrices = 0.0  # in all
        self.most = 0.0  # times the largest number

    def metrics(self) -> dict[str, float]:
        """Since the last call, of all ranks, which have to call this together."""
        fp8, world = self.engine.fp8, self.engine.groups.world
        if fp8 is None or fp8.scales is None:
            return {}
        counts_23, most_3 = fp8.scales.overflows.take()
        all_reduce(counts_23, world)
        if world.size() > 1:
            dist.all_reduce(most_3, dist.ReduceOp.MAX, world)
        overflows_3, matrices_3 = counts_23.tolist()
        if not any(matrices_3):  # no step yet by scales of earlier ones
            return {}
        most = max(most_3.tolist())
        self.overflows += sum(overflows_3)
        self.matrices += sum(matrices_3)
        self.most = max(self.most, most)
        return _shares("fp8_overflow", counts_23) | {"fp8_overflow_worst": most}

    def advice(self) -> str | None:
        """What to change in the next run; None: nothing, by what has been measured."""
        fp8 = self.engine.plan.run.precision.fp8
        if self.overflows <= OFTEN * self.matrices:
            return None
        share = self.overflows / self.matrices
        return (
            f"{share:.1%} of the matrices in eight bits, counted by steps, had entries beyond the "
            f"largest number of their type, up to {self.most:.3g} times that; with "
            f"precision.fp8.margin={fp8.margin + 1} twice as large ones fit (docs/fp8.md)"
        )


def _shares(name: str, counts_2K: Tensor) -> dict[str, float]:
    """The first row over the second one, by kind of matrix; kinds that there are none of lack."""
    some, every = counts_2K.tolist()
    kinds = zip(KINDS, some, every, strict=True)
    return {f"{name}_{kind}": part / whole for kind, part, whole in kinds if whole}
