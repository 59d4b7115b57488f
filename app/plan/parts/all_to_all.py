"""All-to-all dispatch of permuted tokens (`app.moe.dispatch.all_to_all`)."""

from __future__ import annotations

from dataclasses import dataclass, replace
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

    def trace_preprocess(self, trace: Trace, tokens: Tokens, chosen: TracedTensor) -> TracedRows:
        """Sort choices by expert, and compute the permutation of the rows that arrive."""
        found = self._sorted(trace, tokens, chosen)
        order = 8 * self.rows(tokens.count).computed
        return replace(found, orders=trace.op([], [order, order]))

    def trace_dispatch(
        self, trace: Trace, tokens: Tokens, h: TracedTensor, rows: TracedRows
    ) -> TracedTensor:
        """T × D -> R × D: permute, all-to-all, sort by local expert."""
        count = self.rows(tokens.count)
        _, back = rows.orders
        saved = [rows.row_of]
        (x,) = trace.op([h], [count.sent * tokens.row], saved, work=Work.rows)
        (x,) = trace.op([x], [count.computed * tokens.row], sends=self._exchange(tokens))
        return trace.op([x], [count.computed * tokens.row], [back])[0]

    def trace_combine(
        self,
        trace: Trace,
        tokens: Tokens,
        expert_out: TracedTensor,
        probs: TracedTensor,
        rows: TracedRows,
    ) -> TracedTensor:
        """R × D -> T × D: unsort, all-to-all, weighted sum per token."""
        count = self.rows(tokens.count)
        there, _ = rows.orders
        (y,) = trace.op([expert_out], [count.computed * tokens.row], [there])
        (y,) = trace.op([y], [count.sent * tokens.row], sends=self._exchange(tokens))
        if self.etp > 1:
            (probs,) = trace.op([probs], [self.etp * probs.bytes])
        saved = [y, probs, rows.row_of]
        (out,) = trace.op([y, probs], [tokens.bytes], saved, holds=[expert_out], work=Work.rows)
        return out

    def _exchange(self, tokens: Tokens) -> Sends:
        """Return sends of one all-to-all at the busiest rank's load, and of its backward."""
        rows = self.rows(tokens.count).computed * tokens.row
        leaves = rows * (self.ranks - 1) // self.ranks
        return self.sends(forward=leaves, backward=leaves)
