"""Copies of optimizer shards in host memory (`checkpoint.memory_every`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from app.choices import OptimizerKind
from app.config import OptimConfig, Run
from app.plan.sharding.optimizers import moment_bytes
from app.plan.sharding.parameters import ChunkBuffers

FP32 = 4  # bytes
BUFFERS = 4  # own copy and the partner's, two of each: one is whole while the other is filled


@dataclass(frozen=True, slots=True)
class HostCopies:
    """Copies that a pipeline rank's processes hold and send."""

    pp_rank: int
    state: int  # bytes of main parameters and moments of one rank
    interval: int  # steps between copies

    @property
    def held(self) -> int:
        """Bytes of host memory of one rank."""
        return BUFFERS * self.state

    @property
    def per_step(self) -> float:
        """Bytes per step that a rank copies to the host, sends, and receives: each as many."""
        return self.state / self.interval


def host_copies(run: Run, buffers: Sequence[Sequence[ChunkBuffers]]) -> tuple[HostCopies, ...]:
    """Plan the copies of each pipeline rank; buffers: [pp_rank][chunk]. Empty without copies.

    RNG states, router biases, FP8 scales and counters, a few KB, are left out.
    """
    interval = run.checkpoint.memory_interval
    if interval is None:
        return ()
    return tuple(
        HostCopies(
            rank,
            state_bytes(held, run.optim),
            interval,
        )
        for rank, held in enumerate(buffers)
    )


def state_bytes(buffers: Sequence[ChunkBuffers], optim: OptimConfig, main: int = FP32) -> int:
    """Return bytes of main parameters, of `main` bytes each, and moments of a rank with the buffers
    of these chunks. Copies have main parameters also where the optimizer updates the model's own.
    """
    return sum(
        buffer.owned(kind) * (main + moment_bytes(kind, optim))
        for chunk in buffers
        for buffer in (chunk.dense, chunk.expert)
        if buffer is not None
        for kind in OptimizerKind
    )
