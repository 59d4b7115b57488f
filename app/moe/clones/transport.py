"""Transport of cloned experts' weights to spare slots, and of their gradients to the owner ranks.

Shapes: R ranks of the expert group, L experts of each, E = R·L · s slots of each, S = R·s, of which
slot j is on rank j // s · weights of one kind I × O · C blocks of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from app.collectives import all_to_all
from app.kernels.clones.weights import add_clones
from app.kernels.common import usable
from app.moe.clones.record import Clones
from app.moe.row_collectives import gathered


class CloneTransport(Protocol):
    """Communication that never synchronizes with the device, so it can be captured; all ranks of
    the group call the same methods in the same order.

    `kind` indexes the matrices of an expert. The contents of slots are valid until one of the kinds
    that have been requested is requested again.
    """

    def gather_counts(self, counts_CE: Tensor) -> Tensor:
        """All-gather this rank's tokens per expert, given by blocks: int64 R × E."""
        ...

    def send(self, kind: int, weights: Sequence[Tensor], clones: Clones) -> Tensor:
        """Send this rank's expert matrices, L × I × O of each kind; return those in its slots of
        this kind, s × I × O; undefined in empty slots.

        Kinds are requested in any order, with the same weights and clones; the first request may
        send the others already.
        """
        ...

    def grads(self, kind: int, clones: Clones) -> Tensor:
        """Return the buffer for the gradients of this rank's slots: fp32, s × I × O. Call it before
        each write.
        """
        ...

    def return_grads(self, kind: int, total_LIO: Tensor, clones: Clones) -> None:
        """Add the gradients of all slots that hold experts of this rank to `total_LIO`: in fp32, in
        order of slots, rounded once.
        """
        ...


class CollectiveClones:
    """Transport by collectives of equal sizes, on any back end and device.

    Every rank sends R·s matrices in forward and its s gradients to all ranks in backward, however
    many slots are filled.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        local: int,
        spares: int,
        shapes: Sequence[torch.Size],
        device: torch.device,
    ) -> None:
        """`local`: L. `shapes`: I and O of each kind."""
        self.group = group
        self.local = local
        self.spares = spares
        self.first = group.rank() * local
        self._grads = [
            torch.zeros(spares, *shape, dtype=torch.float32, device=device) for shape in shapes
        ]

    def gather_counts(self, counts_CE: Tensor) -> Tensor:
        """See the protocol."""
        return gathered(counts_CE.sum(dim=0, keepdim=True), self.group)

    def send(self, kind: int, weights: Sequence[Tensor], clones: Clones) -> Tensor:
        """See the protocol; sends each kind when it is requested."""
        ranks = self.group.size()
        weight_LIO = weights[kind]
        # equal sizes: matrices for unused slots are sent too and ignored
        local_S = (clones.expert_S - self.first).clamp(0, self.local - 1)
        parts_RsIO = weight_LIO.index_select(0, local_S).unflatten(0, (ranks, self.spares))
        arrived_SIO = all_to_all(parts_RsIO, self.group).flatten(0, 1)
        mine = slice(self.group.rank() * self.spares, (self.group.rank() + 1) * self.spares)
        owner_s = clones.expert_S[mine] // self.local
        nth_s = torch.arange(self.spares, device=owner_s.device)
        return arrived_SIO.index_select(0, owner_s * self.spares + nth_s)

    def grads(self, kind: int, clones: Clones) -> Tensor:
        """See the protocol."""
        return self._grads[kind]

    def return_grads(self, kind: int, total_LIO: Tensor, clones: Clones) -> None:
        """See the protocol."""
        grads_SIO = gathered(self._grads[kind], self.group)
        if usable(total_LIO):
            addresses_R = _addresses_of_parts(grads_SIO, self.group.size())
            add_clones(total_LIO, clones.expert_S, clones.moved_S, addresses_R, first=self.first)
            return
        sums_LIO = total_LIO.float()
        for slot in clones.moved_S.nonzero().flatten().tolist():
            expert = int(clones.expert_S[slot]) - self.first
            if 0 <= expert < self.local:
                sums_LIO[expert] += grads_SIO[slot]
        total_LIO.copy_(sums_LIO)


def _addresses_of_parts(values: Tensor, parts: int) -> Tensor:
    """Return the start addresses of equal parts of the first dimension: int64, on the device."""
    step = values.nbytes // parts
    start = values.data_ptr()
    return torch.arange(start, start + values.nbytes, step, device=values.device)
