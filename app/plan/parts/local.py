"""Local dispatch: a permutation, as all experts are on the rank (`app.moe.dispatch.local`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from app.choices import DispatcherKind
from app.plan.parts.dispatch_record import (
    PlannedDispatcher,
    RowCounts,
    TokenExchange,
    Tokens,
    TracedRows,
)
from app.plan.parts.trace import Trace, TracedTensor, Work


@dataclass(frozen=True, slots=True)
class PlannedLocal(PlannedDispatcher):
    """Permutation of tokens by expert.

    Dropped tokens keep their rows: the host does not wait to learn how many are left.
    """

    kind: ClassVar[DispatcherKind] = DispatcherKind.local
    exchange: ClassVar[TokenExchange | None] = None
    uneven: ClassVar[bool] = False

    def rows(self, tokens: int) -> RowCounts:
        """Count rows: one per choice, or the experts' capacities if padded."""
        asked = self.mean_rows(tokens)
        most = self.most_rows(tokens)
        rows = most if most is not None and self.moe.pad_to_capacity else asked
        return RowCounts(asked, sent=rows, computed=rows)

    @property
    def quantises(self) -> bool:
        """True if no row is a dropped token's."""
        return self.moe.capacity_factor is None

    def trace_dispatch(
        self, trace: Trace, tokens: Tokens, h: TracedTensor, rows: TracedRows
    ) -> TracedTensor:
        """T × D -> R × D: permute."""
        sent = self.rows(tokens.count).sent
        saved = [rows.row_of]
        in_fp8 = (sent * tokens.in_fp8, 0)
        return trace.op([h], [sent * tokens.row], saved, scratch=in_fp8, work=Work.rows)[0]

    def trace_combine(
        self,
        trace: Trace,
        tokens: Tokens,
        expert_out: TracedTensor,
        probs: TracedTensor,
        rows: TracedRows,
    ) -> TracedTensor:
        """R × D -> T × D: weighted sum per token."""
        saved = [expert_out, probs, rows.row_of]
        in_fp8 = (0, expert_out.bytes // tokens.row * tokens.in_fp8)
        return trace.op([expert_out, probs], [tokens.bytes], saved, scratch=in_fp8, work=Work.rows)[
            0
        ]
