"""Static dispatcher: each token is sent once to each rank that has any of its experts, in buffers
of fixed sizes. Nothing synchronizes with the host, so all of it can be captured.

Shapes: T tokens of this rank, D hidden, K experts per token, L experts of this rank, P ranks, N =
P·T tokens of all of them in rank order, R rows that this rank has memory for; `ends_E` has L
entries.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from app.moe.dispatch.expert_rows import ExpertRows, place_rows
from app.moe.dispatch.transport import SizedTransport, TokenTransport
from app.moe.experts import Dispatched
from app.plan.parts.static import PlannedStatic


@dataclass(frozen=True, slots=True)
class Places:
    """Dispatch layout: which row each choice of an expert here has."""

    rows: ExpertRows
    experts_TK: Tensor  # experts chosen by this rank's own tokens
    num_rows: int  # R


class StaticDispatcher:
    """Dispatches in parts of equal size; the device alone computes the rows.

    1. `preprocess` all-gathers the choices and assigns each choice of an expert here its row, by
       (expert, rank, token): expert-major from the start.
    2. `dispatch` copies every token of all ranks that has an expert here into its rows.
    3. `combine` adds up what the experts here make of each token, weighted, in fp32; these sums,
       rounded once, return to the source rank, which adds those of all ranks in fp32.

    Backward mirrors it. The number of rows is fixed by `planned`, whatever routers choose; rows
    from ends[-1] on are neither read nor written. Choices beyond that number have no row, and
    `missing` records how many there were.
    """

    def __init__(
        self,
        planned: PlannedStatic,
        collective: TokenTransport,
        peer: SizedTransport | None,
        *,
        ep_rank: int,
        device: torch.device,
    ) -> None:
        """`peer` transports as many tokens as it has memory for, `collective` other numbers of
        them, with equal bits.
        """
        self.planned = planned
        self.collective = collective
        self.peer = peer
        self.first = ep_rank * planned.experts  # global index of this rank's first expert
        # int32 [1]: most rows that a microbatch has lacked since `clear`
        self.missing = torch.zeros(1, dtype=torch.int32, device=device)
        self.counts_rows = False  # True within `all_rows`

    def clear(self) -> None:
        """Reset the overflow record at the start of a step."""
        self.missing.zero_()

    def lacks(self) -> Tensor:
        """Return whether rows have been missing since `clear`: bool [1]."""
        return self.missing > 0

    def _transport(self, tokens: int) -> TokenTransport:
        if self.peer is not None and self.peer.tokens == tokens:
            return self.peer
        return self.collective

    @contextmanager
    def all_rows(self) -> Iterator[None]:
        """Allocate as many rows as are needed within the block, so that none are missing; the host
        waits for their number, which cannot be captured.
        """
        self.counts_rows = True
        try:
            yield
        finally:
            self.counts_rows = False

    def preprocess(
        self, experts_TK: Tensor, drops: bool = False, rows_per_expert: int | None = None
    ) -> Places:
        """All-gather the choices and place those of this rank's experts.

        Dropped choices have no expert here, so `drops` changes nothing; experts are not padded.
        """
        assert rows_per_expert is None, "model.moe.pad_to_capacity is refused"
        tokens = len(experts_TK)
        num_rows = self.planned.rows(tokens).computed
        if self.counts_rows:
            num_rows = self.planned.worst_rows(tokens)
        rows = place_rows(
            self._transport(tokens).gather_choices(experts_TK),
            self.first,
            self.planned.experts,
            num_rows=num_rows,
        )
        if not self.counts_rows:
            torch.maximum(self.missing, rows.needed - num_rows, out=self.missing)
            return Places(rows, experts_TK, num_rows)
        needed = int(rows.needed)
        # `needed` replaces R as the "no local row" sentinel
        row_of_NK = rows.row_of_NK.clamp(max=needed)
        return Places(replace(rows, row_of_NK=row_of_NK), experts_TK, needed)

    def dispatch(self, x_TD: Tensor, prepared: Places) -> tuple[Dispatched, Places]:
        """Map T × D -> R × D, expert-major."""
        transport = self._transport(len(x_TD))
        rows_RD: Tensor = _Dispatch.apply(x_TD, transport, prepared)
        return Dispatched(rows_RD, prepared.rows.ends_E), prepared

    def combine(self, expert_out_RD: Tensor, probs_TK: Tensor, origin: Places) -> Tensor:
        """Map R × D -> T × D."""
        transport = self._transport(len(probs_TK))
        out_TD: Tensor = _Combine.apply(expert_out_RD, probs_TK, transport, origin)
        return out_TD


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        transport: TokenTransport,
        places: Places,
    ) -> Tensor:
        rows = places.rows
        ctx.save_for_backward(rows.row_of_NK, places.experts_TK)
        ctx.transport = transport
        return transport.spread(x_TD, rows.row_of_NK, places.num_rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None, None]:
        row_of_NK, experts_TK = ctx.saved_tensors
        return ctx.transport.combine(grad_RD, None, row_of_NK, experts_TK), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows_RD: Tensor,
        probs_TK: Tensor,
        transport: TokenTransport,
        places: Places,
    ) -> Tensor:
        rows = places.rows
        ctx.save_for_backward(rows_RD, probs_TK, rows.row_of_NK, places.experts_TK)
        ctx.transport = transport
        return transport.combine(rows_RD, probs_TK, rows.row_of_NK, places.experts_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        grad_RD, dots_TK = ctx.transport.spread_gradients(grad_TD, *ctx.saved_tensors)
        return grad_RD, dots_TK, None, None
