"""Optimizers as plans, buffers and checkpoints see them: state, memory and time.

`optim.name` chooses the optimizer of the matrices of linear layers and experts; AdamW updates
embedding, head, norms, biases, routers and gates in any case. A bucket of parameters
(`app.plan.shards`) has one optimizer; `app.optim.optimizers` has the code that updates it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from app.choices import OptimizerKind
from app.config import OptimConfig, Run
from app.plan.groups import Group
from app.plan.layout import ParallelLayout
from app.plan.model.weight import Weight


@dataclass(frozen=True, slots=True)
class MatrixWork:
    """Work of updating whole matrices on the busiest rank, beside passes over its shard."""

    flops: float = 0.0  # of GEMMs, in units of 16-bit GEMMs of equal time
    sent: Mapping[Group, int] = field(default_factory=dict)  # bytes of all-to-alls
    working: int = 0  # bytes of memory while it runs


# weights of linear layers and experts of a pipeline rank -> work
WorkOf = Callable[[Run, ParallelLayout, Sequence[Weight]], MatrixWork]


def no_matrices(run: Run, layout: ParallelLayout, weights: Sequence[Weight]) -> MatrixWork:
    """Return the work of an optimizer that updates element by element."""
    return MatrixWork()


@dataclass(frozen=True, slots=True)
class PlannedOptimizer:
    """State and cost of an optimizer."""

    moments: tuple[str, ...]  # fp32 tensors beside the main parameters, by name in checkpoints
    # bytes per parameter of a rank's shard that its passes over memory move
    moved: int
    work: WorkOf = no_matrices


PLANNED: Mapping[OptimizerKind, PlannedOptimizer] = MappingProxyType({
    # moments and main parameter read and written, gradient read, parameter written
    OptimizerKind.adamw: PlannedOptimizer(("exp_avg", "exp_avg_sq"), moved=30),
})  # fmt: skip


def less_state(kind: OptimizerKind) -> int:
    """Return how many bytes per parameter an optimizer's state is smaller than AdamW's."""
    return 4 * (len(PLANNED[OptimizerKind.adamw].moments) - len(PLANNED[kind].moments))


def optimizer_of(weight: Weight, optim: OptimConfig) -> OptimizerKind:
    """Return the optimizer of a weight."""
    return optim.name if weight.linear else OptimizerKind.adamw
