"""Local dispatch: a permutation, as all experts are on the rank (`app.moe.dispatch.local`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from app.choices import DispatcherKind
from app.plan.parts.dispatch_record import (
    PLACE,
    PROBABILITY,
    PlannedDispatcher,
    RowCounts,
    TokenExchange,
    Tokens,
)
from app.plan.parts.trace import Trace, Work


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

    def dispatch(self, t: Trace, tokens: Tokens) -> int:
        """T × D -> R × D: permute."""
        rows = self.rows(tokens.count)
        scratch = (rows.sent * tokens.in_fp8, 0)
        made = rows.sent * tokens.row
        return t.op(Work.rows, tokens.bytes, made, PLACE * rows.asked, scratch=scratch)

    def combine(self, t: Trace, tokens: Tokens, saved: bool) -> None:
        """R × D -> T × D: weighted sum per token."""
        rows = self.rows(tokens.count)
        reads = rows.sent * tokens.row + PROBABILITY * rows.asked
        scratch = (0, rows.sent * tokens.in_fp8)
        t.op(Work.rows, reads, tokens.bytes, reads, scratch=scratch)
