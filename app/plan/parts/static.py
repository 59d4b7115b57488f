"""Static dispatch: each token goes once to each rank, in static sizes
(`app.moe.dispatch.static`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from typing import ClassVar

from app.choices import DispatcherKind, StaticCapacity, StaticTransport
from app.config.experts import ROUNDED_ROWS
from app.plan.groups import Way
from app.plan.parts.dispatch_record import (
    PLACE,
    PROBABILITY,
    CloneTransfer,
    PlannedDispatcher,
    RowCounts,
    SmallerOption,
    TokenExchange,
    Tokens,
)
from app.plan.parts.trace import Sends, Trace, Work

EXPERT_ID, ROW = 2, 4  # bytes per choice of a token: expert id, row
MOST_IDS = 2**15 - 1  # of experts, for EXPERT_ID bytes
COUNT = 8  # bytes of a count of tokens, in plans of clones
GRADIENT = 4  # bytes of an element of a clone's gradients
# kernel launches: of a plan of clones with its counts; of sending clones of a kind of matrix, over
# symmetric memory (both kinds in one kernel) and by collectives
PLAN_KERNELS, PEER_KERNELS, COLLECTIVE_KERNELS = 5, 2, 8
HEADROOM = 1.1  # factor on the rows of the overflowing step when a step is rerun


@dataclass(frozen=True, slots=True)
class PlannedStatic(PlannedDispatcher):
    """Static dispatch: every rank learns all choices and permutes the tokens of its experts.

    Each rank returns one partial sum per token to the token's source rank.
    """

    kind: ClassVar[DispatcherKind] = DispatcherKind.static
    exchange: ClassVar[TokenExchange] = TokenExchange(
        "all-gather of tokens, return of partial sums", Way.ring
    )
    uneven: ClassVar[bool] = False

    @property
    def peer(self) -> bool:
        """True if ranks load and store each other's memory."""
        transport = self.moe.static.transport
        if transport is StaticTransport.auto:
            return self.one_node and self.ep * self.experts <= MOST_IDS
        return transport is StaticTransport.peer

    @property
    def paged_buffers(self) -> bool:
        """True if the paged buffer is configured."""
        return self.moe.static.paged_buffer is not None

    @property
    def own(self) -> int:
        """Experts of one rank without clones of others."""
        return self.moe.num_experts // self.ep

    @property
    def experts(self) -> int:
        """Experts that may have rows on one rank: its own, and slots for clones of others."""
        return self.own + self.moe.echo.spares

    @property
    def quantises(self) -> bool:
        """True: kernels write every row."""
        return True

    @property
    def moves(self) -> str:
        """Communication of tokens, and of clones' weights and gradients."""
        tokens = self.exchange.collectives
        return f"{tokens}, clones and their gradients" if self.moe.echo.spares else tokens

    def summary(self, tokens: int) -> str:
        """Return transport, capacity and slots for clones, in words."""
        how = "between GPUs through each other's memory" if self.peer else "by collectives"
        rows = self.rows(tokens).computed
        limit = "all that tokens can ask for"
        if rows < self.worst_rows(tokens):
            times = f"{rows / self.mean_rows(tokens):.2f} times the mean"
            limit = f"{times}; a step that needs more is rerun"
        told = f"static, {how}; memory for {rows:,} rows of experts per rank, {limit}"
        echo = self.moe.echo
        if not echo.spares:
            return told
        slots = f"{echo.spares} slot{'s' if echo.spares > 1 else ''}"
        return f"{told}; {slots} per rank for clones of hot experts, by {echo.algorithm.value}"

    def held_by_slots(self, expert: int, size: int) -> int:
        """Return bytes of the slots for clones, of experts with `expert` elements of `size` bytes.

        They hold gradients, and weights if other GPUs write them there.
        """
        return self.moe.echo.spares * expert * (GRADIENT + (size if self.peer else 0))

    def clone_transfer(self, matrix: int, size: int) -> CloneTransfer | None:
        """Return the cost of sending clones.

        Over symmetric memory they are written in place; collectives carry all slots of all ranks.
        """
        spares = self.moe.echo.spares
        if not spares:
            return None
        each, others = spares * matrix, 1 if self.peer else self.ranks - 1
        sends = self.sends(others * each * size, others * each * (size + GRADIENT))
        if self.peer:
            return CloneTransfer((0, 0), sends, kernels=PEER_KERNELS)
        forward = (2 * self.ranks + 1) * each * size
        backward = max(forward, self.ranks * each * GRADIENT)
        return CloneTransfer((forward, backward), sends, kernels=COLLECTIVE_KERNELS)

    def smaller(self) -> Iterator[SmallerOption]:
        """Yield the paged buffer, and a capacity below the worst case."""
        if self.moe.static.paged_buffer is None:
            cost = "experts' activations copied to pages and back, not in the estimate"
            yield SmallerOption("static.paged_buffer", 1.1, cost)
        if self.moe.static.capacity is StaticCapacity.worst:
            cost = "steps that need more capacity are rerun, not in the estimate"
            yield SmallerOption("static.capacity", StaticCapacity.factor, cost)

    def held(self, tokens: Tokens) -> int:
        """Return bytes of symmetric memory, twice, as exchanges alternate between two sets of
        buffers.

        Each set holds tokens, partial sums of every rank, and for each choice of all ranks its
        expert, its probability and the gradient of that.
        """
        if not self.peer:
            return 0
        choices = self.ranks * tokens.count * self.moe.top_k
        values = (1 + self.ranks) * tokens.bytes
        return 2 * (values + (EXPERT_ID + 2 * PROBABILITY) * choices)

    def rows(self, tokens: int) -> RowCounts:
        """Count rows: the capacity, on every rank."""
        rows = self.worst_rows(tokens)
        if self.moe.static.capacity is StaticCapacity.factor:
            wanted = self.moe.static.factor * self.mean_rows(tokens)
            rows = min(rows, ceil(wanted / ROUNDED_ROWS) * ROUNDED_ROWS)
        return RowCounts(self.ranks * tokens * self.moe.top_k, sent=rows, computed=rows)

    def may_lack_rows(self, tokens: int) -> bool:
        """Return whether the routing could exceed the capacity, or the paged buffer."""
        short = self.rows(tokens).computed < self.worst_rows(tokens)
        return short or self.paged_buffers

    def worst_rows(self, tokens: int) -> int:
        """Return the most rows that the experts of a rank could get: a token's are distinct."""
        most = tokens * min(self.moe.top_k, self.experts)
        taken = self.most_per_expert(tokens)
        return self.ranks * (most if taken is None else min(most, self.experts * taken))

    def preprocess(self, t: Trace, tokens: Tokens) -> None:
        """All-gather of choices, and the permutation for this rank's experts."""
        choices = tokens.count * self.moe.top_k
        if self.moe.echo.spares:  # the plan of clones, and rerouted choices
            sends = self._to_all(COUNT * self.moe.num_experts, 0)
            t.op(Work.other, 0, PLACE * choices, kernels=PLAN_KERNELS, sends=sends)
        gathered = 0 if self.peer else EXPERT_ID * self.ranks * choices
        t.op(Work.other, 0, gathered, kernels=2, sends=self._to_all(EXPERT_ID * choices, 0))
        t.op(Work.other, 0, ROW * self.ranks * choices, kernels=2)

    def dispatch(self, t: Trace, tokens: Tokens) -> int:
        """T × D -> R × D: permute out of all ranks' tokens.

        Backward returns partial sums of gradients.
        """
        rows = self.rows(tokens.count)
        gathered = self._gathered(tokens)
        return t.op(
            Work.rows,
            tokens.bytes,
            rows.computed * tokens.row,
            ROW * rows.asked + PLACE * tokens.count * self.moe.top_k,
            scratch=(gathered + rows.computed * tokens.in_fp8, 2 * gathered),
            kernels=2,
            sends=self._to_all(tokens.bytes, tokens.bytes),
            used=self._used(tokens),
        )

    def combine(self, t: Trace, tokens: Tokens, saved: bool) -> None:
        """R × D -> T × D: return each rank's partial sums and add them up.

        Backward needs all tokens' probabilities again, and returns their gradients.
        """
        count = self.rows(tokens.count).computed
        shares = tokens.count * self.moe.top_k * PROBABILITY
        gathered = self._gathered(tokens)
        reads = count * tokens.row + shares
        t.op(
            Work.rows,
            reads,
            tokens.bytes,
            reads if saved else shares,
            restores=0 if saved else reads - shares,
            scratch=(2 * gathered, gathered + count * tokens.in_fp8),
            kernels=4,
            sends=self._to_all(tokens.bytes + shares, tokens.bytes + 2 * shares),
            used=self._used(tokens),
        )

    def _to_all(self, forward: int, backward: int) -> Sends:
        """Return sends of these bytes to each of the other ranks."""
        others = self.ranks - 1
        return self.sends(others * forward, others * backward)

    def _used(self, tokens: Tokens) -> float:
        """Return the share of the capacity that a mean rank uses."""
        return min(1.0, self.mean_rows(tokens.count) / self.rows(tokens.count).computed)

    def _gathered(self, tokens: Tokens) -> int:
        """Return bytes for tokens of all ranks.

        0 over symmetric memory, where they are read in place.
        """
        return 0 if self.peer else self.ranks * tokens.bytes
