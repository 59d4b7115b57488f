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
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from app.kernels.common import usable
from app.kernels.quantise import empty_fp8_rows
from app.model.layers.ready import ReadyRows
from app.moe.clones.cloning import Cloning
from app.moe.clones.record import Clones
from app.moe.dispatch.expert_rows import ExpertRows, place_rows
from app.moe.dispatch.paged_buffer import PagedBuffer, PagedRows
from app.moe.dispatch.peer import PeerTransport
from app.moe.dispatch.transport import CollectiveTransport, TokenTransport
from app.moe.protocol import Dispatched
from app.plan.parts.static import PlannedStatic


@dataclass(frozen=True, slots=True)
class Places:
    """Dispatch layout: which row each choice of an expert here has."""

    rows: ExpertRows
    experts_TK: Tensor  # experts chosen by this rank's own tokens
    num_rows: int  # R
    clones: Clones | None = None  # None disables cloning


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
        collective: CollectiveTransport,
        peer: PeerTransport | None,
        *,
        ep_rank: int,
        device: torch.device,
        paged_buffer: PagedBuffer | None = None,
        cloning: Cloning | None = None,
    ) -> None:
        """`peer` transports as many tokens as it has memory for, `collective` other numbers of
        them, with equal bits. `paged_buffer` keeps the rows that backward needs; None leaves all of
        them to autograd. `cloning` sends choices of hot experts to clones; None disables it.
        """
        self.planned = planned
        self.collective = collective
        self.peer = peer
        self.first = ep_rank * planned.experts  # global index of this rank's first expert
        # int32 [1]: most rows that a microbatch has lacked since `clear`
        self.missing = torch.zeros(1, dtype=torch.int32, device=device)
        self.paged_buffer = paged_buffer
        self.cloning = cloning
        self._counts_rows = False

    def clear(self) -> None:
        """Reset the overflow record and the paged buffer at the start of a step."""
        self.missing.zero_()
        if self.paged_buffer is not None:
            self.paged_buffer.clear()

    def lacks(self) -> Tensor:
        """Return whether rows, or pages to keep them, have been missing since `clear`: bool [1]."""
        lacking = self.missing > 0
        return lacking if self.paged_buffer is None else lacking | self.paged_buffer.lacks()

    def _transport(self, tokens: int) -> TokenTransport:
        if self.peer is not None and self.peer.tokens == tokens:
            return self.peer
        return self.collective

    @contextmanager
    def all_rows(self) -> Iterator[None]:
        """Allocate as many rows as are needed within the block, so that none are missing; the host
        waits for their number, which cannot be captured.
        """
        self._counts_rows = True
        try:
            yield
        finally:
            self._counts_rows = False

    def preprocess(
        self, experts_TK: Tensor, drops: bool = False, rows_per_expert: int | None = None
    ) -> Places:
        """All-gather the choices and place those of this rank's experts.

        Dropped choices have no expert here, so `drops` changes nothing; experts are not padded.
        """
        assert rows_per_expert is None, "model.moe.pad_to_capacity is refused"
        tokens = len(experts_TK)
        clones = None
        if self.cloning is not None:
            experts_TK, clones = self.cloning.plan(experts_TK, self.planned.moe.num_experts)
        num_rows = self.planned.rows(tokens).computed
        if self._counts_rows:
            num_rows = self.planned.worst_rows(tokens)
        rows = place_rows(
            self._transport(tokens).gather_choices(experts_TK),
            self.first,
            self.planned.experts,
            num_rows=num_rows,
        )
        if not self._counts_rows:
            torch.maximum(self.missing, rows.needed - num_rows, out=self.missing)
            return Places(rows, experts_TK, num_rows, clones=clones)
        needed = int(rows.needed)
        # `needed` replaces R as the "no local row" sentinel
        row_of_NK = rows.row_of_NK.clamp(max=needed)
        return Places(replace(rows, row_of_NK=row_of_NK), experts_TK, needed, clones=clones)

    def dispatch(
        self, x_TD: Tensor, prepared: Places, ready: ReadyRows | None = None
    ) -> tuple[Dispatched, Places]:
        """Map T × D -> R × D, expert-major."""
        rows_RD: Tensor = _Dispatch.apply(
            x_TD, self._transport(len(x_TD)), prepared, ready if usable(x_TD) else None
        )
        ends_E = prepared.rows.ends_E
        keep = None
        if self.paged_buffer is not None and not self._counts_rows:
            keep = partial(PagedRows.of, self.paged_buffer, ends_E)
        replicas = None
        if self.cloning is not None and prepared.clones is not None:
            replicas = self.cloning.replicas(prepared.clones)
        return Dispatched(rows_RD, ends_E, keep, replicas=replicas), prepared

    def combine(
        self,
        expert_out_RD: Tensor,
        probs_TK: Tensor,
        origin: Places,
        ready: ReadyRows | None = None,
    ) -> Tensor:
        """Map R × D -> T × D."""
        transport = self._transport(len(probs_TK))
        out_TD: Tensor = _Combine.apply(
            expert_out_RD,
            probs_TK,
            transport,
            origin,
            ready if usable(expert_out_RD) else None,
        )
        return out_TD


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        transport: TokenTransport,
        places: Places,
        ready: ReadyRows | None,
    ) -> Tensor:
        rows = places.rows
        ctx.save_for_backward(rows.row_of_NK, places.experts_TK)
        ctx.transport = transport
        if ready is not None:
            fp8_rows = empty_fp8_rows((places.num_rows, x_TD.shape[1]), x_TD.device)
            spread_RD = transport.spread(x_TD, rows.row_of_NK, places.num_rows, fp8_rows=fp8_rows)
            return ready.put((spread_RD, *fp8_rows))
        return transport.spread(x_TD, rows.row_of_NK, places.num_rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None, None, None]:
        row_of_NK, experts_TK = ctx.saved_tensors
        return ctx.transport.combine(grad_RD, None, row_of_NK, experts_TK), None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows_RD: Tensor,
        probs_TK: Tensor,
        transport: TokenTransport,
        places: Places,
        ready: ReadyRows | None,
    ) -> Tensor:
        rows = places.rows
        ctx.ready = ready
        ctx.save_for_backward(rows_RD, probs_TK, rows.row_of_NK, places.experts_TK)
        ctx.transport = transport
        return transport.combine(rows_RD, probs_TK, rows.row_of_NK, places.experts_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        rows_RD, *where = ctx.saved_tensors
        fp8_rows = None if ctx.ready is None else empty_fp8_rows(rows_RD.shape, grad_TD.device)
        grad_RD, dots_TK = ctx.transport.spread_gradients(
            grad_TD, rows_RD, *where, fp8_rows=fp8_rows
        )
        if fp8_rows is not None:
            ctx.ready.put((grad_RD, *fp8_rows))
        return grad_RD, dots_TK, None, None, None
