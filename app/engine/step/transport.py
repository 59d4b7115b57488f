"""P2P between pipeline ranks: started by an Exchange action, finished by a Wait."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from app.plan.actions import P2POp


@dataclass(slots=True)
class Transport:
    """P2P between pipeline ranks; all tensors have the same shape, known in advance."""

    group: dist.ProcessGroup
    ranks: Sequence[int]  # pipeline rank -> global rank
    batched: bool = True  # all operations of an action in one batch; False: one by one
    works: dict[P2POp, dist.Work] = field(default_factory=dict)  # not yet waited for
    # all of this step; kept after their wait, which with NCCL returns before they are done
    moving: dict[P2POp, dist.Work] = field(default_factory=dict)

    def post(self, tensors: Mapping[P2POp, Tensor]) -> None:
        """Start to send or receive each operation's tensor, which is in use until `wait`."""
        kinds = {True: dist.isend, False: dist.irecv}
        p2p = [
            dist.P2POp(kinds[op.send], tensor, self.ranks[op.peer], self.group)
            for op, tensor in tensors.items()
        ]
        if self.batched:
            works = dist.batch_isend_irecv(p2p)
        else:
            works = [each.op(each.tensor, each.peer, self.group) for each in p2p]
        if len(works) == 1:  # NCCL returns one work for the whole batch
            works = works * len(p2p)
        self.works.update(zip(tensors, works, strict=True))
        if not _capturing():
            self.moving.update(zip(tensors, works, strict=True))

    def wait(self, ops: Sequence[P2POp]) -> None:
        """Wait until these operations are done (NCCL: the current stream waits, not the host)."""
        for op in ops:
            self.works.pop(op).wait()
            if dist.get_backend(self.group) != "nccl":
                self.moving.pop(op, None)  # done; the work would keep its tensor alive

    def unfinished(self) -> list[tuple[str, int]]:
        """Return operations of this step not yet done, oldest first: (description, other rank).

        Thread-safe: it iterates over a copy, since the main thread keeps running.
        """
        left = [op for op, work in self.moving.copy().items() if not work.is_completed()]
        ranks = [self.ranks[op.peer] for op in left]
        ways = ["to" if op.send else "from" for op in left]
        named = zip(left, ways, ranks, strict=True)
        return [(f"{op} ({way} rank {rank})", rank) for op, way, rank in named]

    def forget(self) -> None:
        """Drop the works of a step. Raises AssertionError if one was never waited for."""
        assert not self.works, f"never waited for: {', '.join(map(str, self.works))}"
        self.moving.clear()


def _capturing() -> bool:
    """True while the current stream is captured: a query of a captured event, as in
    `Transport.unfinished`, invalidates the capture.
    """
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
