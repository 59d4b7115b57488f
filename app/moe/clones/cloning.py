"""Hot experts of a microbatch are cloned to ranks that have room, and tokens sent to the clones
(ECHO).

Shapes: R ranks with L experts and s slots each, E = R·L, S = R·s · T tokens of this rank, K experts
of each.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from app.config.model import EchoConfig
from app.moe.clones.record import Clones
from app.moe.clones.transport import CloneTransport
from app.moe.echo import plan_clones, reroute
from app.moe.experts import LentExperts

UP, DOWN = 0, 1  # kinds of matrices
# rows of the busiest rank without clones and with them, rows of all ranks, slots filled
CLONE_SUMS = ("busiest_before", "busiest_after", "routed_rows", "clones")


@dataclass(frozen=True, slots=True)
class Lent:
    """One kind of matrices of a microbatch's clones (`app.model.clones.LentWeight`)."""

    transport: CloneTransport
    kind: int
    clones: Clones

    def fetch(self, own_LIO: Tensor) -> Tensor:
        """See the protocol."""
        return self.transport.send(self.kind, own_LIO, self.clones)

    def grads(self) -> Tensor:
        """See the protocol."""
        return self.transport.grads(self.kind)

    def add_home(self, total_LIO: Tensor) -> None:
        """See the protocol."""
        self.transport.add_home(self.kind, total_LIO, self.clones)


class Cloning:
    """Plans clones for one microbatch after the other, on the device, the same on every rank.

    Slots are shared by all layers and microbatches: backward has the weights sent once more, by the
    plan of forward.
    """

    def __init__(
        self, echo: EchoConfig, transport: CloneTransport, *, rank: int, device: torch.device
    ) -> None:
        """`rank`: of R."""
        self.echo = echo
        self.transport = transport
        self.rank = rank
        # CLONE_SUMS since `start_step`, summed over layers and microbatches
        self.sums_4 = torch.zeros(4, dtype=torch.int64, device=device)

    def start_step(self) -> None:
        """Forget what has been counted."""
        self.sums_4.zero_()

    def plan(self, experts_TK: Tensor, num_experts: int) -> tuple[Tensor, Clones]:
        """Where choices go, T × K ids as in `app.moe.echo.reroute`, and the clones they go to.

        Dropped choices have the id E, and then R·(L + s).
        """
        counts_E = experts_TK.new_zeros(num_experts + 1)
        counts_E.scatter_add_(0, experts_TK.flatten(), torch.ones_like(experts_TK).flatten())
        counts_RE = self.transport.gather_counts(counts_E[:num_experts])
        echo = self.echo
        moved_ES, moved_RS = plan_clones(
            counts_RE, echo.spares, echo.algorithm, threshold=echo.threshold
        )
        goes_TK = reroute(experts_TK, moved_ES, moved_RS, rank=self.rank)
        if echo.check:
            self._check(experts_TK, goes_TK, moved_ES, moved_RS=moved_RS)
        moved_S, expert_S = moved_ES.max(dim=0)
        self._count(counts_RE, expert_S, moved_S)
        return goes_TK, Clones(expert_S, moved_S > 0)

    def lent(self, clones: Clones) -> LentExperts:
        """What the experts of this rank's slots compute with."""
        return LentExperts(Lent(self.transport, UP, clones), Lent(self.transport, DOWN, clones))

    def _count(self, counts_RE: Tensor, expert_S: Tensor, moved_S: Tensor) -> None:
        ranks = len(counts_RE)
        before_R = counts_RE.sum(dim=0).view(ranks, -1).sum(dim=1)
        given_R = before_R.new_zeros(ranks).scatter_add(
            0, expert_S // (counts_RE.shape[1] // ranks), moved_S
        )
        after_R = before_R - given_R + moved_S.view(ranks, -1).sum(dim=1)
        filled = (moved_S > 0).sum()
        self.sums_4 += torch.stack((before_R.max(), after_R.max(), before_R.sum(), filled))

    def _check(
        self, experts_TK: Tensor, goes_TK: Tensor, moved_ES: Tensor, *, moved_RS: Tensor
    ) -> None:
        """AssertionError or its like on a GPU, where no host can say more."""
        ranks, slots = len(moved_RS), moved_ES.shape[1]
        local, spares = len(moved_ES) // ranks, slots // ranks
        dropped = ranks * (local + spares)
        sums_up = (moved_ES.sum(0) == moved_RS.sum(0)).all() & ((moved_ES > 0).sum(0) <= 1).all()
        _expect(sums_up, "a plan of clones does not add up")
        kept_TK = experts_TK < len(moved_ES)
        _expect(((goes_TK < dropped) == kept_TK).all(), "a token lost or gained an expert")
        sorted_TK = goes_TK.sort(dim=1).values
        again_TK = (sorted_TK[:, 1:] == sorted_TK[:, :-1]) & (sorted_TK[:, 1:] < dropped)
        _expect(~again_TK.any(), "a token goes to the same place twice")
        place_TK = goes_TK % (local + spares)
        slot_TK = goes_TK // (local + spares) * spares + place_TK - local
        cloned_TK = kept_TK & (place_TK >= local)
        home_TK = goes_TK // (local + spares) * local + place_TK
        expert_TK = torch.where(cloned_TK, moved_ES.argmax(0)[slot_TK.clamp(0, slots - 1)], home_TK)
        same = (expert_TK == experts_TK) | ~kept_TK
        _expect(same.all(), "a token goes to another expert than it chose")
        taken_S = goes_TK.new_zeros(slots + 1).scatter_add(
            0,
            torch.where(cloned_TK, slot_TK, slots).flatten(),
            torch.ones_like(slot_TK).flatten(),
        )
        _expect(
            (taken_S[:slots] == moved_RS[self.rank]).all(), "clones get other tokens than planned"
        )


def _expect(condition: Tensor, what: str) -> None:
    torch._assert_async(condition, f"model.moe.echo.check: {what}")
