"""Muon (Jordan et al. 2024): momentum, orthogonalised matrix by matrix by Newton–Schulz steps.

1. Each rank averages the gradients of its shards into the momentum.
2. `app.optim.whole_matrices` brings whole matrices to one rank each.
3. Newton–Schulz steps on batches of matrices of equal shape.
4. Results go back, and each rank updates its shards in fp32.

An update has a root mean square of 0.2 before the learning rate, about that of AdamW's, so that
learning rates carry over (Liu et al. 2025, arXiv 2502.16982). Weight decay is decoupled. With
`optim.muon.tp=blocks` the part of a matrix that a tensor-parallel rank holds counts as a matrix.

Shapes: C matrices of M × N.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import ClassVar, Self

import torch
from torch import Tensor

from app.choices import MuonDtype, MuonTp, OptimizerKind
from app.config import OptimConfig
from app.kernels.common import usable
from app.kernels.momentum import MovedSlices, apply_updates, push_momentum
from app.kernels.polynomial import applied, gram, multiplies, squared
from app.optim.shard import OptimizerGroups, Shard, Update
from app.optim.whole_matrices import Peers, WholeMatrices
from app.plan.sharding.optimizers import NEWTON_SCHULZ_STEPS, UPDATE_RMS, newton_schulz_cost

# quintic polynomial a·X + b·(X·Xᵀ)·X + c·(X·Xᵀ)²·X, steep at 0 (Jordan et al. 2024)
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
LEAST_NORM = 1e-7


def orthogonalise(matrices_CMN: Tensor) -> Tensor:
    """Return matrices whose singular values are near 1 instead, in the dtype of the argument, which
    is overwritten.
    """
    if matrices_CMN.shape[1] > matrices_CMN.shape[2]:  # X·Xᵀ of the shorter side is smaller
        return orthogonalise(matrices_CMN.mT).mT
    a, b, c = COEFFICIENTS
    norm_C11 = torch.linalg.vector_norm(matrices_CMN, dim=(1, 2), keepdim=True)
    matrices_CMN.div_(norm_C11.clamp(min=LEAST_NORM))
    kernels = multiplies(matrices_CMN)
    for _ in range(NEWTON_SCHULZ_STEPS):
        if kernels:
            poly_CMM = squared(gram(matrices_CMN), c, b)
            matrices_CMN = applied(poly_CMM, matrices_CMN, a)
        else:
            gram_CMM = matrices_CMN @ matrices_CMN.mT
            poly_CMM = torch.baddbmm(gram_CMM, gram_CMM, gram_CMM, beta=b, alpha=c)
            matrices_CMN = torch.baddbmm(matrices_CMN, poly_CMM, matrices_CMN, beta=a)
    return matrices_CMN


def update_scale(rows: int, columns: int) -> float:
    """Return the factor that gives an orthogonal matrix the root mean square of updates."""
    return UPDATE_RMS * sqrt(max(rows, columns))


class MuonShard(Shard):
    """Shard of matrices that Muon updates."""

    kind: ClassVar[OptimizerKind] = OptimizerKind.muon

    @classmethod
    def updates(
        cls, shards: Sequence[Self], config: OptimConfig, groups: OptimizerGroups
    ) -> Sequence[Update]:
        """Return one update of all dense matrices of this rank, and one of all its experts."""
        kinds = [(False, Peers.whole(groups.tp))]
        if groups.etp_ep is not None:
            kinds.append((True, Peers(groups.etp_ep, groups.etp)))
        found = []
        for expert, inner in kinds:
            own = [shard for shard in shards if shard.buffer.specs[0].expert == expert]
            if own:
                gathers = config.muon.tp is MuonTp.gather
                found.append(MuonUpdate(own, config, inner if gathers else inner.alone()))
        return found


class MuonUpdate:
    """Update of the matrices in some shards; `inner` as in `WholeMatrices`."""

    def __init__(self, shards: Sequence[MuonShard], config: OptimConfig, inner: Peers) -> None:
        self.shards = tuple(shards)
        self.matrices = WholeMatrices(
            shards,
            inner,
            cost=lambda stack: newton_schulz_cost(stack, inner.size),
            scale=update_scale,
        )
        main = shards[0].main
        wide = config.muon.dtype is MuonDtype.fp32
        self.dtype = main.dtype if wide else torch.bfloat16
        slices = self.matrices.slices
        self._slices = {shard: MovedSlices.of(slices[shard], shard.main.device) for shard in shards}

    def update(
        self, config: OptimConfig, rates_2: Tensor, grad_divisor: Tensor, skip: Tensor
    ) -> None:
        """See `app.optim.shard.Update`."""
        first = self.shards[0]
        kernels = usable(first.main, first.grad)
        if not kernels and skip.item():
            return
        ahead = first.main.new_empty(self.matrices.numel, dtype=self.dtype)
        for shard in self.shards:
            push = self._push_by_kernel if kernels else self._push
            push(shard, ahead, config.muon.momentum, grad_divisor=grad_divisor, skip=skip)
        updates = self.matrices.update(ahead, orthogonalise)
        for shard in self.shards:
            apply = self._apply_by_kernel if kernels else self._apply
            apply(shard, updates, rates_2, skip=skip)

    def _push_by_kernel(
        self, shard: MuonShard, ahead: Tensor, decay: float, *, grad_divisor: Tensor, skip: Tensor
    ) -> None:
        push_momentum(
            shard.moments["momentum"],
            shard.grad,
            ahead,
            slices=self._slices[shard],
            decay=decay,
            divisor=grad_divisor,
            skip=skip,
        )

    def _push(
        self, shard: MuonShard, ahead: Tensor, decay: float, *, grad_divisor: Tensor, skip: Tensor
    ) -> None:
        """Do what the kernel does, where there is none: average, and write Nesterov's look-ahead
        in the places of `ahead`.
        """
        for start, stop, place, _ in self.matrices.slices[shard]:
            grad = shard.grad[start:stop].float() / grad_divisor
            momentum = shard.moments["momentum"][start:stop].lerp_(grad, 1 - decay)
            ahead[place : place + stop - start] = grad.lerp(momentum, decay)

    def _apply_by_kernel(
        self, shard: MuonShard, updates: Tensor, rates_2: Tensor, *, skip: Tensor
    ) -> None:
        apply_updates(
            shard.main,
            updates,
            None if shard.main is shard.own_params else shard.own_params,
            slices=self._slices[shard],
            rates_2=rates_2,
            skip=skip,
        )

    def _apply(self, shard: MuonShard, updates: Tensor, rates_2: Tensor, *, skip: Tensor) -> None:
        lr, weight_decay = rates_2.tolist()
        for start, stop, place, scale in self.matrices.slices[shard]:
            main = shard.main[start:stop].mul_(1 - lr * weight_decay)
            main.add_(updates[place : place + stop - start], alpha=-lr * scale)
        if shard.main is not shard.own_params:
            shard.own_params.copy_(shard.main)
