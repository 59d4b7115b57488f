"""All-gather dispatch: every rank gets all tokens (`app.moe.dispatch.all_gather`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from app.choices import DispatcherKind
from app.plan.groups import Way
from app.plan.parts.dispatch_record import (
    PlannedDispatcher,
    RowCounts,
    TokenExchange,
    Tokens,
    TracedRows,
)
from app.plan.parts.trace import Sends, Trace, TracedTensor, Work

SUMS = 4  # bytes of an element of a token's sum over its experts, reduce-scattered in fp32
EXPERT, PROBABILITY = 8, 4  # bytes per choice of a token: expert id, probability


@dataclass(frozen=True, slots=True)
class PlannedAllGather(PlannedDispatcher):
    """All-gather of tokens, whatever K is.

    Each rank's partial sums are reduce-scattered in fp32.
    """

    kind: ClassVar[DispatcherKind] = DispatcherKind.all_gather
    exchange: ClassVar[TokenExchange | None] = TokenExchange(
        "all-gather of tokens, reduce-scatter of sums", Way.ring
    )
    uneven: ClassVar[bool] = True

    def rows(self, tokens: int) -> RowCounts:
        """Count all ranks' choices; those of this rank's experts have a row here."""
        rows = round(self.mean_rows(tokens) * self.busiest_load(tokens))
        return RowCounts(self.ranks * tokens * self.moe.top_k, sent=rows, computed=rows)

    def trace_dispatch(
        self, trace: Trace, tokens: Tokens, h: TracedTensor, rows: TracedRows
    ) -> TracedTensor:
        """T × D -> R × D: all-gather, then permute."""
        made = self.rows(tokens.count).computed * tokens.row
        scratch = self._gathered(tokens), self._summed(tokens)
        # tokens and their choices; backward scatters sums
        # tokens and their choices; backward reduce-scatters gradients
        here = tokens.bytes + tokens.count * self.moe.top_k * EXPERT
        return trace.op(
            [h],
            [made],
            [rows.row_of],
            scratch=scratch,
            kernels=2,
            sends=self._ring(forward=here, backward=self._sums(tokens)),
            work=Work.rows,
        )[0]

    def trace_combine(
        self,
        trace: Trace,
        tokens: Tokens,
        expert_out: TracedTensor,
        probs: TracedTensor,
        rows: TracedRows,
    ) -> TracedTensor:
        """R × D -> T × D: sum per token over this rank's experts, then reduce-scatter."""
        shares = tokens.count * self.moe.top_k * PROBABILITY
        return trace.op(
            [expert_out, probs],
            [tokens.bytes],
            [expert_out, rows.row_of],
            keeps=PROBABILITY * self.rows(tokens.count).asked,
            scratch=(self._summed(tokens), self._gathered(tokens)),
            kernels=4,
            sends=self._ring(forward=self._sums(tokens) + shares, backward=tokens.bytes + shares),
            work=Work.rows,
        )[0]

    def _ring(self, forward: int, backward: int) -> Sends:
        """Return sends of a ring: each rank's share passes all others."""
        others = self.ranks - 1
        return self.sends(forward=others * forward, backward=others * backward)

    def _sums(self, tokens: Tokens) -> int:
        return tokens.count * tokens.width * SUMS

    def _gathered(self, tokens: Tokens) -> int:
        return self.ranks * tokens.bytes

    def _summed(self, tokens: Tokens) -> int:
        """Return bytes of fp32 sums for tokens of all ranks, and this rank's share before its
        cast.
        """
        return (self.ranks + 1) * self._sums(tokens) - tokens.bytes
