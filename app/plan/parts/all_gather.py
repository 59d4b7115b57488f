"""All-gather dispatch: every rank gets all tokens (`app.moe.dispatch.all_gather`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from app.choices import DispatcherKind
from app.plan.groups import Way
from app.plan.parts.dispatch_record import (
    PLACE,
    PROBABILITY,
    PlannedDispatcher,
    RowCounts,
    TokenExchange,
    Tokens,
)
from app.plan.parts.trace import Sends, Trace, Work

SUMS = 4  # bytes of an element of a token's sum over its experts, reduce-scattered in fp32


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

    def dispatch(self, t: Trace, tokens: Tokens) -> int:
        """T × D -> R × D: all-gather of tokens and choices, then permute."""
        rows = self.rows(tokens.count)
        here = tokens.bytes + tokens.count * self.moe.top_k * PLACE
        return t.op(
            Work.rows,
            tokens.bytes,
            rows.computed * tokens.row,
            PLACE * rows.asked,
            scratch=(self._gathered(tokens), self._summed(tokens)),
            kernels=2,
            sends=self._ring(here, self._sums(tokens)),
        )

    def combine(self, t: Trace, tokens: Tokens, saved: bool) -> None:
        """R × D -> T × D: sum per token over this rank's experts, then reduce-scatter."""
        rows = self.rows(tokens.count)
        out = rows.computed * tokens.row
        shares = tokens.count * self.moe.top_k * PROBABILITY
        t.op(
            Work.rows,
            out + shares,
            tokens.bytes,
            out + PROBABILITY * rows.asked,
            scratch=(self._summed(tokens), self._gathered(tokens)),
            kernels=4,
            sends=self._ring(self._sums(tokens) + shares, tokens.bytes + shares),
        )

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
