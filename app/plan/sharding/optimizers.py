"""Optimizers as plans, buffers and checkpoints see them: state, memory and time.

`optim.name` chooses the optimizer of the matrices of linear layers and experts; AdamW updates
embedding, head, norms, biases, routers and gates in any case. A bucket of parameters
(`app.plan.shards`) has one optimizer; `app.optim.optimizers` has the code that updates it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType

from app.choices import MomentDtype, MuonDtype, MuonTp, OptimizerKind
from app.config import OptimConfig, Run
from app.plan.groups import DP_CP, EDP, ETP_EP, TP, Group
from app.plan.layout import ParallelLayout
from app.plan.model.weight import Weight
from app.plan.sharding.blocks import ShardCoords
from app.plan.sharding.matrices import LARGEST, PlacedPiece, Stack, placed


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

    moments: tuple[str, ...]  # tensors beside the main parameters, by name in checkpoints
    # bytes per parameter of a rank's shard that its passes over memory move, with fp32 moments
    moved: int
    work: WorkOf = no_matrices
    narrows: bool = False  # True if its moments are in `optim.moments`; otherwise fp32

    @property
    def has_matrices(self) -> bool:
        """Return whether it updates whole matrices."""
        return self.work is not no_matrices


NEWTON_SCHULZ_STEPS = 5
UPDATE_RMS = 0.2  # of Muon's updates before the learning rate
# time of an fp32 GEMM over that of a 16-bit one, by the data sheet of an H100
FP32_GEMM = 15
# rows of matrices whose steps take twice the time of a large GEMM with as many FLOPs: by bf16 steps
# on an H100 (bench/muon.py), 512 rows 1.88 times, 1,024 rows 1.2, 4,096 rows 0.95
HALF_SPEED = 450


def newton_schulz_cost(stack: Stack, ranks: int) -> float:
    """Return the FLOPs that a large GEMM has in the time of orthogonalising a stack of M × N
    matrices, M ≤ N, whose parts are on `ranks` ranks: X·Xᵀ, its square, and their polynomial times
    X in each step.
    """
    m, n = sorted(stack.shape(ranks))
    flops = stack.count * NEWTON_SCHULZ_STEPS * (2 * m * m * n + 2 * m**3 + 2 * m * m * n)
    return flops * (1 + HALF_SPEED / m)


def muon_work(run: Run, layout: ParallelLayout, weights: Sequence[Weight]) -> MatrixWork:
    """Return Muon's work on whole matrices (`app.optim.whole_matrices`)."""
    muon = run.optim.muon
    wide = muon.dtype is MuonDtype.fp32
    flops, element = 0.0, 4 if wide else 2
    sent: dict[Group, int] = {}
    working = [0]
    for expert, outer, inner in ((False, DP_CP, TP), (True, EDP, ETP_EP)):
        parts = layout.expert_tp if expert else layout.tp
        parts = parts if muon.tp is MuonTp.gather else 1
        coords = ShardCoords.of(layout, 0)
        ranks = outer.size(layout)
        own = [(each, coords.block(each).sizes) for each in weights if each.expert == expert]
        cost = partial(newton_schulz_cost, ranks=parts)
        pieces, loads = placed(own, ranks * parts, cost)
        flops += max(loads)
        held, mine = Counter[int](), Counter[int]()  # elements by owner
        for each in pieces:
            held[each.owner % ranks] += each.piece.numel
            mine[each.owner] += each.piece.numel
        most, most_mine = max(held.values(), default=0), parts * max(mine.values(), default=0)
        shard = held.total() // ranks
        sent[outer] = 2 * max(shard, most) * (ranks - 1) // ranks * element
        sent[inner] = 2 * most * (parts - 1) // parts * element
        buffers = shard + (2 * most if ranks > 1 else 0) + (most_mine if parts > 1 else 0)
        working.append(element * (buffers + _batch(pieces, parts)))
    return MatrixWork(
        flops * (FP32_GEMM if wide else 1),
        {group: size for group, size in sent.items() if size},
        max(working),
    )


def _batch(pieces: Sequence[PlacedPiece], parts: int) -> int:
    """Return the elements of the largest batch of Newton–Schulz steps with its intermediates."""
    found = Counter[tuple[int, int]]()
    for each in pieces:
        for stack in each.piece.stacks:
            m, n = sorted(stack.shape(parts))
            found[m, n] = min(found[m, n] + stack.count, max(stack.count, LARGEST // (m * n)))
    # the matrices before and after a step; X·Xᵀ and the polynomial
    return max((count * (2 * m * n + 2 * m * m) for (m, n), count in found.items()), default=0)


PLANNED: Mapping[OptimizerKind, PlannedOptimizer] = MappingProxyType({
    # moments and main parameter read and written, gradient read, parameter written
    OptimizerKind.adamw: PlannedOptimizer(("exp_avg", "exp_avg_sq"), moved=30, narrows=True),
    # momentum and main parameter read and written, gradient read, parameter written; what it
    # computes from them written to and read from batches twice, with their results
    OptimizerKind.muon: PlannedOptimizer(("momentum",), moved=22 + 12, work=muon_work),
})  # fmt: skip


def moment_dtype(kind: OptimizerKind, optim: OptimConfig) -> MomentDtype:
    """Return the element type of an optimizer's moments."""
    return optim.moments if PLANNED[kind].narrows else MomentDtype.fp32


def moment_bytes(kind: OptimizerKind, optim: OptimConfig) -> int:
    """Return the bytes per parameter of an optimizer's moments."""
    each = 2 if moment_dtype(kind, optim) is MomentDtype.bf16 else 4
    return each * len(PLANNED[kind].moments)


def moved_bytes(kind: OptimizerKind, optim: OptimConfig) -> int:
    """Return the bytes per parameter of a rank's shard that passes over memory move."""
    planned = PLANNED[kind]  # each moment is read and written
    return planned.moved - 2 * (4 * len(planned.moments) - moment_bytes(kind, optim))


def optimizer_of(weight: Weight, optim: OptimConfig) -> OptimizerKind:
    """Return the optimizer of a weight."""
    return optim.name if weight.linear else OptimizerKind.adamw
