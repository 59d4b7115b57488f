"""What a dispatcher does, and what it leaves for the experts.

What it needs of ranks, memory and links is said once, in `app.plan.dispatchers`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import Tensor

from app.model.fp8.ready import ReadyRows
from app.model.recompute import Keep
from app.moe.experts import ReplicaExperts

# A dispatcher's own records, frozen dataclasses: what `preprocess` has found out for `dispatch`,
# and what `combine` needs to know besides.
Prepared = TypeVar("Prepared")
Origin = TypeVar("Origin")


@dataclass(frozen=True, slots=True)
class Dispatched:
    """Rows for the experts of this rank, of whatever dispatcher.

    They are expert-major: those of the first expert here, then those of the second … Rows from
    ends[-1] on are nobody's.
    """

    rows_RD: Tensor
    ends_E: Tensor  # int32, on the device: the first row after each expert's
    # where backward has a tensor of as many rows from; None: they are kept as they are
    keep: Keep | None = None
    replicas: ReplicaExperts | None = None  # experts of other ranks, of which the last rows are


class Dispatcher(Protocol[Prepared, Origin]):
    """Transport of tokens to the experts of this rank and back."""

    def preprocess(
        self, experts_TK: Tensor, drops: bool = False, rows_per_expert: int | None = None
    ) -> Prepared:
        """What the device can say of where rows go; never waits.

        drops: some choices have the id E, and have no part in the rest. `rows_per_expert`: every
        expert is filled up to so many rows from this rank (`PlannedDispatcher.rows_per_expert`); no
        expert may be chosen more often, and they must be as many on all ranks, as T must.
        """
        ...

    def dispatch(
        self, x_TD: Tensor, prepared: Prepared, ready: ReadyRows | None = None
    ) -> tuple[Dispatched, Origin]:
        """Tokens T × D -> rows of this rank's experts, and where these came from.

        Rows, and in backward the gradient of what experts made of them, may be left `ready` for
        products in FP8; who does not quantise them on the way leaves that to the products.

        Only this may wait for the device (`PlannedDispatcher.waits_for_host`).
        """
        ...

    def combine(
        self,
        expert_out_RD: Tensor,
        probs_TK: Tensor,
        origin: Origin,
        ready: ReadyRows | None = None,
    ) -> Tensor:
        """Expert outputs -> the probability-weighted sum per token, T × D."""
        ...
