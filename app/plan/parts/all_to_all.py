"""All-to-all dispatch of permuted tokens (`app.moe.dispatch.all_to_all`)."""

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


@dataclass(frozen=True, slots=True)
class PlannedAllToAll(PlannedDispatcher):
    """All-to-all: one row per choice goes to each rank that has a part of the chosen expert."""

    kind: ClassVar[DispatcherKind] = DispatcherKind.all_to_all
    exchange: ClassVar[TokenExchange | None] = TokenExchange("all-to-all of rows", Way.all_to_all)
    uneven: ClassVar[bool] = True

    def rows(self, tokens: int) -> RowCounts:
        """Count rows: dropped tokens are not sent; the busiest rank's share arrives."""
        asked = self.mean_rows(tokens)
        most = self.most_rows(tokens)
        sent = asked if most is None else most if self.moe.pad_to_capacity else min(asked, most)
        computed = round(asked * self.busiest_load(tokens))
        return RowCounts(asked, sent=sent, computed=computed)

    def dispatch(self, t: Trace, tokens: Tokens) -> int:
        """T × D -> R × D: permute, all-to-all, sort by local expert."""
        rows = self.rows(tokens.count)
        sent, arrived = rows.sent * tokens.row, rows.computed * tokens.row
        t.op(Work.rows, tokens.bytes, sent, PLACE * rows.asked)
        t.op(Work.other, sent, arrived, sends=self._exchange(tokens))
        return t.op(Work.other, arrived, arrived, PLACE * rows.computed)

    def combine(self, t: Trace, tokens: Tokens, saved: bool) -> None:
        """R × D -> T × D: unsort, all-to-all, weighted sum per token."""
        rows = self.rows(tokens.count)
        sent, arrived = rows.sent * tokens.row, rows.computed * tokens.row
        t.op(Work.other, arrived, arrived, PLACE * rows.computed)
        t.op(Work.other, arrived, sent, sends=self._exchange(tokens))
        reads = sent + PROBABILITY * rows.asked
        t.op(Work.rows, reads, tokens.bytes, reads)

    def _exchange(self, tokens: Tokens) -> Sends:
        """Return sends of one all-to-all at the busiest rank's load, and of its backward."""
        rows = self.rows(tokens.count).computed * tokens.row
        leaves = rows * (self.ranks - 1) // self.ranks
        return self.sends(forward=leaves, backward=leaves)
