"""A token goes once to each rank, into buffers of sizes that nobody waits for
(`app.moe.dispatch.static`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from typing import ClassVar

from app.choices import DispatcherKind, StaticCapacity, StaticTransport
from app.config.model import ROUNDED_ROWS
from app.plan.dispatchers.record import (
    LentMatrices,
    PlannedDispatcher,
    RowCounts,
    SmallerOption,
    TokenExchange,
    Tokens,
    TracedRows,
)
from app.plan.groups import Way
from app.plan.trace.trace import Sends, Trace, TracedTensor, Work

EXPERT_ID, PLACE, PROBABILITY = 2, 4, 4  # bytes for each choice of a token: expert, row, share
MOST_IDS = 2**15 - 1  # of experts, for EXPERT_ID bytes
COUNT = 8  # bytes of a number of tokens, in plans of clones
GRADIENT = 4  # bytes of an element of a clone's gradients
# launches: of a plan of clones and of what counts for it; of a kind of matrices, sent by peers with
# the other kind
PLAN_KERNELS, PEER_KERNELS, COLLECTIVE_KERNELS = 5, 2, 8
HEADROOM = 1.1  # of rows that there is memory for once more, over what was needed


@dataclass(frozen=True, slots=True)
class PlannedStatic(PlannedDispatcher):
    """Every rank learns all choices; rows are made where their experts are, and sums of a token's
    experts there go home.
    """

    kind: ClassVar[DispatcherKind] = DispatcherKind.static
    exchange: ClassVar[TokenExchange] = TokenExchange(
        "all-gather of tokens, sums sent home", Way.ring
    )
    uneven: ClassVar[bool] = False

    @property
    def peer(self) -> bool:
        """Whether ranks read and write each other's memory."""
        transport = self.moe.static.transport
        if transport is StaticTransport.auto:
            return self.one_node and self.ep * self.experts <= MOST_IDS
        return transport is StaticTransport.peer

    @property
    def paged_buffers(self) -> bool:
        """If it is asked for."""
        return self.moe.static.paged_buffer is not None

    @property
    def own(self) -> int:
        """Experts of one rank without clones of others."""
        return self.moe.num_experts // self.ep

    @property
    def experts(self) -> int:
        """Experts that may have rows on one rank: its own, and in slots those of others."""
        return self.own + self.moe.echo.spares

    @property
    def quantises(self) -> bool:
        """Where nothing lies between the rows of experts."""
        return self.moe.static.multiple == 1

    @property
    def moves(self) -> str:
        """Tokens, and weights of clones."""
        tokens = self.exchange.collectives
        return f"{tokens}, clones and their gradients" if self.moe.echo.spares else tokens

    def summary(self, tokens: int) -> str:
        """How tokens travel, and how many rows of experts there is memory for."""
        how = "between GPUs through each other's memory" if self.peer else "by collectives"
        rows = self.rows(tokens).computed
        limit = "all that tokens can ask for"
        if rows < self.worst_rows(tokens):
            times = f"{rows / self.mean_rows(tokens):.2f} times the mean"
            limit = f"{times}; a step that needs more is taken again"
        told = f"static, {how}; memory for {rows:,} rows of experts per rank, {limit}"
        echo = self.moe.echo
        if not echo.spares:
            return told
        slots = f"{echo.spares} slot{'s' if echo.spares > 1 else ''}"
        return f"{told}; {slots} per rank for clones of hot experts, by {echo.algorithm.value}"

    def held_by_slots(self, expert: int, size: int) -> int:
        """Bytes that slots for clones take, of experts with so many elements of so many bytes:
        gradients, and where peers write them there, weights.
        """
        return self.moe.echo.spares * expert * (GRADIENT + (size if self.peer else 0))

    def lent(self, matrix: int, size: int) -> LentMatrices | None:
        """By peers in place; by collectives all slots of all ranks, and gradients of all."""
        spares = self.moe.echo.spares
        if not spares:
            return None
        each, others = spares * matrix, 1 if self.peer else self.ranks - 1
        sends = self.sends(others * each * size, others * each * (size + GRADIENT))
        if self.peer:
            return LentMatrices((0, 0), sends, kernels=PEER_KERNELS)
        forward = (2 * self.ranks + 1) * each * size
        backward = max(forward, self.ranks * each * GRADIENT)
        return LentMatrices((forward, backward), sends, kernels=COLLECTIVE_KERNELS)

    def smaller(self) -> Iterator[SmallerOption]:
        """Rows kept compactly, or memory for fewer of them."""
        if self.moe.static.paged_buffer is None:
            cost = "experts' rows copied to pages and back, not in the estimate"
            yield SmallerOption("static.paged_buffer", 1.1, cost)
        if self.moe.static.capacity is StaticCapacity.worst:
            cost = "steps that need more rows are taken again, not in the estimate"
            yield SmallerOption("static.capacity", StaticCapacity.factor, cost)

    def held(self, tokens: Tokens) -> int:
        """Twice, as exchanges take turns: tokens, sums of every rank's experts, and for each choice
        of all ranks its expert, its share and the gradient of that.
        """
        if not self.peer:
            return 0
        choices = self.ranks * tokens.count * self.moe.top_k
        values = (1 + self.ranks) * tokens.bytes
        return 2 * (values + (EXPERT_ID + 2 * PROBABILITY) * choices)

    def rows(self, tokens: int) -> RowCounts:
        """As many as there is memory for, on every rank."""
        rows = self.worst_rows(tokens)
        if self.moe.static.capacity is StaticCapacity.factor:
            wanted = self.moe.static.factor * self.mean_rows(tokens)
            rows = min(rows, ceil(wanted / ROUNDED_ROWS) * ROUNDED_ROWS)
        return RowCounts(self.ranks * tokens * self.moe.top_k, True, sent=rows, computed=rows)

    def may_lack_rows(self, tokens: int) -> bool:
        """Whether choices could need more rows than there is memory for, or memory to keep."""
        short = self.rows(tokens).computed < self.worst_rows(tokens)
        return short or self.paged_buffers

    def worst_rows(self, tokens: int) -> int:
        """That the experts of a rank could be asked for, filled up to multiples: a token's experts
        are all different.
        """
        most = tokens * min(self.moe.top_k, self.experts)
        taken = self.most_per_expert(tokens)
        asked = self.ranks * (most if taken is None else min(most, self.experts * taken))
        multiple = self.moe.static.multiple
        filled = asked + min(self.experts, asked) * (multiple - 1)
        return ceil(filled / multiple) * multiple

    def trace_preprocess(self, trace: Trace, tokens: Tokens, chosen: TracedTensor) -> TracedRows:
        """All ranks' choices, and the rows of those that are of this rank's experts."""
        choices = tokens.count * self.moe.top_k
        everywhere = self.ranks * choices
        if self.moe.echo.spares:
            chosen = self._trace_clones(trace, chosen)
        sends = self._to_all(EXPERT_ID * choices, 0)
        made = 0 if self.peer else EXPERT_ID * everywhere
        (gathered,) = trace.op([], [made], holds=[chosen], kernels=2, sends=sends)
        sizes = PLACE * everywhere, 4 * self.experts, 4
        row_of, ends, _ = trace.op([], sizes, holds=[gathered], kernels=2)
        return TracedRows(chosen, row_of, trace.value(0), ends=ends)

    def _trace_clones(self, trace: Trace, chosen: TracedTensor) -> TracedTensor:
        """Where choices go once hot experts have clones."""
        slots = self.ranks * self.moe.echo.spares
        counts = COUNT * self.ranks * self.moe.num_experts
        plan = COUNT * slots * self.ranks
        return trace.op(
            [],
            [chosen.bytes],
            holds=[chosen],
            scratch=(counts + plan, 0),
            kernels=PLAN_KERNELS,
            sends=self._to_all(COUNT * self.moe.num_experts, 0),
        )[0]

    def trace_dispatch(
        self, trace: Trace, tokens: Tokens, h: TracedTensor, rows: TracedRows
    ) -> TracedTensor:
        """T × D -> R × D, picked out of all tokens; backward brings sums of gradients home."""
        count = self.rows(tokens.count).computed
        forward = self._gathered(tokens) + count * tokens.in_8
        return trace.op(
            [h],
            [count * tokens.row],
            [rows.row_of, rows.token_of_row],
            scratch=(forward, 2 * self._gathered(tokens)),
            kernels=2,
            sends=self._to_all(tokens.bytes, tokens.bytes),
            work=Work.rows,
            used=self._used(tokens),
        )[0]

    def trace_combine(
        self,
        trace: Trace,
        tokens: Tokens,
        expert_out: TracedTensor,
        probs: TracedTensor,
        rows: TracedRows,
    ) -> TracedTensor:
        """R × D -> T × D, sums of each rank brought home and added; backward needs all tokens'
        shares once more, and brings their gradients home.
        """
        shares = tokens.count * self.moe.top_k * PROBABILITY
        in_8 = self.rows(tokens.count).computed * tokens.in_8
        return trace.op(
            [expert_out, probs],
            [tokens.bytes],
            [expert_out, probs, rows.row_of, rows.token_of_row],
            scratch=(2 * self._gathered(tokens), self._gathered(tokens) + in_8),
            kernels=4,
            sends=self._to_all(tokens.bytes + shares, tokens.bytes + 2 * shares),
            work=Work.rows,
            used=self._used(tokens),
        )[0]

    def _to_all(self, forward: int, backward: int) -> Sends:
        """So many bytes for each of the other ranks."""
        others = self.ranks - 1
        return self.sends(others * forward, others * backward)

    def _used(self, tokens: Tokens) -> float:
        """Of the rows that there is memory for, those of a mean rank."""
        return min(1.0, self.mean_rows(tokens.count) / self.rows(tokens.count).computed)

    def _gathered(self, tokens: Tokens) -> int:
        """Values for tokens of all ranks, which peers read and write where they are held."""
        return 0 if self.peer else self.ranks * tokens.bytes
