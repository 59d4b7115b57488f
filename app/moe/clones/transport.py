"""What carries weights of cloned experts to the ranks with spare slots, and gradients home.

Shapes: R ranks of the expert group, L experts of each, E = R·L · s slots of each, S = R·s, of which
slot j is on rank j // s · weights of one kind I × O.
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
from app.moe.dispatch.collectives import gathered


class CloneTransport(Protocol):
    """Exchanges that never wait for the device, so they can be captured; all ranks of the group
    call the same ones in the same order.

    `kind` counts the matrices of an expert. What lies in slots is valid until one of the kinds that
    have been asked for is asked for once more.
    """

    def gather_counts(self, counts_CE: Tensor) -> Tensor:
        """This rank's tokens for each expert, by blocks -> those of all ranks, int64 R × E."""
        ...

    def send(self, kind: int, weights: Sequence[Tensor], clones: Clones) -> Tensor:
        """The matrices of the experts of this rank, L × I × O of each kind -> those of its slots of
        this kind, s × I × O; undefined in empty ones.

        Kinds take turns, in any order, with the same weights and clones: with the first of them
        others may be sent already.
        """
        ...

    def grads(self, kind: int, clones: Clones) -> Tensor:
        """Where this rank is to write the gradients of its slots: fp32, s × I × O. To be called for
        every time that it is written.
        """
        ...

    def return_grads(self, kind: int, total_LIO: Tensor, clones: Clones) -> None:
        """Add the gradients that all ranks' slots have for experts of this rank, one by one in fp32
        in order of slots, to `total`, which is rounded once.
        """
        ...


class CollectiveClones:
    """By collectives of equal sizes, on any back end and device.

    Every rank sends R·s matrices forward, and its s gradients to all ranks backward, however many
    slots are filled.
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
        """See the protocol: each kind when it is asked for."""
        ranks = self.group.size()
        weight_LIO = weights[kind]
        # what others have not asked for travels too, and is not looked at
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
    """Where each of so many equal parts of the first dimension begins: int64, on the device."""
    step = values.nbytes // parts
    start = values.data_ptr()
    return torch.arange(start, start + values.nbytes, step, device=values.device)
