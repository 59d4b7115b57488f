"""Clones (expert replicas) of a microbatch: planning, rerouting of tokens, and the slots' weights.

A slot is memory for the weights of one clone.

Shapes: R ranks with L experts and s slots each, E = R·L, S = R·s · T tokens of this rank, K experts
of each, in C blocks of tokens · I × O a matrix.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from app.config.experts import EchoConfig
from app.model.block import StepState
from app.model.layers.linear import GroupedLinearBackend
from app.moe.clones.record import Clones
from app.moe.clones.replicas import GemmsWithReplicas
from app.moe.clones.transport import CloneTransport
from app.moe.echo import ClonePlan, count_choices, follow_plan, plan_slots
from app.moe.experts import Dispatched, Experts

UP, DOWN = 0, 1  # kinds of matrices
# rows of the busiest rank without clones and with them, rows of all ranks, slots filled
CLONE_SUMS = ("busiest_before", "busiest_after", "routed_rows", "clones")


@dataclass(frozen=True, slots=True)
class SlotWeight:
    """One kind of matrices of a microbatch's clones (`ReplicaWeight`)."""

    transport: CloneTransport
    kind: int
    weights: tuple[Tensor, Tensor]  # both kinds of this rank's experts
    clones: Clones

    def fetch(self) -> Tensor:
        """See the protocol."""
        return self.transport.send(self.kind, self.weights, self.clones)

    def grads(self) -> Tensor:
        """See the protocol."""
        return self.transport.grads(self.kind, self.clones)

    def return_grads(self, total_LIO: Tensor) -> None:
        """See the protocol."""
        self.transport.return_grads(self.kind, total_LIO, self.clones)


@dataclass(frozen=True, slots=True)
class ClonedDispatch(Dispatched):
    """Dispatched tokens of which the last groups of rows belong to clones in this rank's slots."""

    transport: CloneTransport
    clones: Clones

    def gemms(
        self, experts: Experts, deferred: bool
    ) -> tuple[GroupedLinearBackend, GroupedLinearBackend]:
        """Compute the clones beside this rank's experts."""
        both = experts.w_up.weight, experts.w_down.weight
        up, down = (
            GemmsWithReplicas(
                linear.backend,
                SlotWeight(self.transport, kind, both, self.clones),
                experts=len(linear.weight),
            )
            for kind, linear in ((UP, experts.w_up), (DOWN, experts.w_down))
        )
        return up, down


class Cloning(StepState):
    """Plans the clones of each microbatch on the device, equally on every rank.

    All layers and microbatches share the slots, so backward sends the weights again by forward's
    plan.
    """

    def __init__(
        self,
        echo: EchoConfig,
        transport: CloneTransport,
        *,
        rank: int,
        ranks: int,
        device: torch.device,
    ) -> None:
        """`rank`: this rank's index among the `ranks` R."""
        self.echo = echo
        self.transport = transport
        self.rank = rank
        self.ranks = ranks
        # CLONE_SUMS since `start_step`, over layers and microbatches
        self.sums_4 = torch.zeros(4, dtype=torch.int64, device=device)

    def start_step(self) -> None:
        """Clear the counts."""
        self.sums_4.zero_()

    def sums(self) -> Mapping[str, Tensor]:
        """Return the counts of this rank's group since `start_step`, by name."""
        return dict(zip(CLONE_SUMS, self.sums_4.unbind(), strict=True))

    def metrics(self, sums: Mapping[str, float]) -> Mapping[str, float]:
        """Return the load of the busiest rank over the mean, without and with clones, and how many
        clones there were. Every rank of a group has counted the same.
        """
        return {
            "moe_rank_load_before": sums["busiest_before"] * self.ranks / sums["routed_rows"],
            "moe_rank_load_after": sums["busiest_after"] * self.ranks / sums["routed_rows"],
            "moe_clones": round(sums["clones"] / self.ranks),
        }

    def plan(self, experts_TK: Tensor, num_experts: int) -> tuple[Tensor, Clones]:
        """Return the destinations of choices, T × K ids as in `app.moe.echo.reroute`, and their
        clones.

        Dropped choices have the id E, and then R·(L + s).
        """
        counts_CE = count_choices(experts_TK, num_experts)
        echo = self.echo
        plan = plan_slots(
            self.transport.gather_counts(counts_CE),
            echo.spares,
            echo.algorithm,
            threshold=echo.threshold,
            sums_4=self.sums_4,
        )
        goes_TK = follow_plan(experts_TK, plan, self.rank, counts_CE)
        if echo.check:
            self._check(experts_TK, goes_TK, plan, experts=num_experts)
        return goes_TK, Clones(plan.expert_S, plan.moved_S)

    def _check(self, experts_TK: Tensor, goes_TK: Tensor, plan: ClonePlan, *, experts: int) -> None:
        """Assert that the plan and the destinations agree; on a GPU a device-side assertion."""
        ranks, slots = plan.moved_RS.shape
        local, spares = experts // ranks, slots // ranks
        dropped = ranks * (local + spares)
        _expect((plan.moved_S == plan.moved_RS.sum(0)).all(), "a plan does not add up")
        kept_TK = experts_TK < experts
        _expect(((goes_TK < dropped) == kept_TK).all(), "a token lost or gained an expert")
        sorted_TK = goes_TK.sort(dim=1).values
        again_TK = (sorted_TK[:, 1:] == sorted_TK[:, :-1]) & (sorted_TK[:, 1:] < dropped)
        _expect(~again_TK.any(), "a token goes to the same place twice")
        share_TK, place_TK = goes_TK // (local + spares), goes_TK % (local + spares)
        slot_TK = (share_TK * spares + place_TK - local).clamp(0, slots - 1)
        cloned_TK = kept_TK & (place_TK >= local)
        found_TK = torch.where(cloned_TK, plan.expert_S[slot_TK], share_TK * local + place_TK)
        same = ((found_TK == experts_TK) | ~kept_TK).all()
        _expect(same, "a token goes to another expert than it chose")
        taken_S = goes_TK.new_zeros(slots).scatter_add_(
            0, slot_TK.flatten(), cloned_TK.long().flatten()
        )
        as_planned = (taken_S == plan.moved_RS[self.rank]).all()
        _expect(as_planned, "clones get other tokens than planned")


def _expect(condition: Tensor, what: str) -> None:
    torch._assert_async(condition, f"model.moe.echo.check: {what}")
