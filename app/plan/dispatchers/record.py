"""What a dispatcher needs, as a pure record: rules, plan and `app.engine.build` read nothing else.

A dispatcher is added in five files: its name in `app.choices.DispatcherKind`, its record in a
module beside this one, a line for that in `app.plan.dispatchers.choose`, its module in
`app.moe.dispatch`, which moves tensors, and a case in `app.engine.dispatchers`. Options of its own
are keys of `app.config.model.MoEConfig` besides.

Shapes: T tokens of a microbatch on one rank, D hidden, E experts, K per token. The experts lie on a
grid of P = ep · etp ranks: ep shares of them, each expert in etp parts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from math import ceil
from typing import ClassVar

from app.choices import DispatcherKind
from app.config import MoEConfig
from app.plan.groups import ETP_EP, Way
from app.plan.trace.trace import Sends, Trace, TracedTensor


def capacity(choices: int, num_experts: int, factor: float) -> int:
    """Rows of a microbatch that one expert takes at most: ceil(T·K / E · factor), `choices` = T·K.

    Source: GShard (arXiv 2006.16668), with the rounding of Megatron-Core.
    """
    return ceil(choices / num_experts * factor)


@dataclass(frozen=True, slots=True)
class Tokens:
    """Hidden states of tokens on one rank."""

    count: int  # T
    width: int  # D
    size: int  # bytes of an element
    # of a row of experts that kernels write in FP8 besides, where they make it; 0: none do
    in_8: int = 0

    @property
    def row(self) -> int:
        """Bytes of one."""
        return self.width * self.size

    @property
    def bytes(self) -> int:
        """Bytes of all."""
        return self.count * self.row


@dataclass(frozen=True, slots=True)
class RowCounts:
    """How many rows one rank handles of a microbatch; a row travels to each part of its expert."""

    asked: int  # that the tokens seen here ask for, of their experts or of each part of these
    drops: bool  # some of those have no row here
    sent: int  # that leave this rank, or are picked out of gathered tokens
    computed: int  # by this rank's experts, at the planned load


@dataclass(frozen=True, slots=True)
class TokenExchange:
    """How tokens get to experts on other ranks, and back."""

    collectives: str  # what runs, in words
    way: Way  # in which bytes go


@dataclass(frozen=True, slots=True)
class LentMatrices:
    """What exchanging the matrices of lent experts, of one kind, adds to their grouped product."""

    scratch: tuple[int, int]  # bytes alive meanwhile, forward and backward
    sends: Sends  # of a mean rank, where as many experts are lent as there are slots
    kernels: int  # launches of its forward


@dataclass(frozen=True, slots=True)
class SmallerOption:
    """A key of `model.moe` with which a dispatcher needs less memory."""

    key: str
    value: float | Enum
    cost: str  # what is paid for it, in words


@dataclass(frozen=True, slots=True)
class TracedRows:
    """What preprocessing makes of a microbatch's choices, as an operation trace has it."""

    token_of_row: TracedTensor
    row_of: TracedTensor
    kept: TracedTensor
    ends: TracedTensor
    # from the order in which rows arrive to the experts', and back
    orders: tuple[TracedTensor, ...] = ()

    @property
    def places(self) -> tuple[TracedTensor, ...]:
        """What the sum over a token's experts needs in backward."""
        return self.token_of_row, self.row_of, self.kept


@dataclass(frozen=True, slots=True)
class PlannedDispatcher(ABC):
    """What one dispatcher needs for these experts on these ranks.

    Its `trace_…` methods follow those of the class of the same kind in `app.moe.dispatch`, with
    sizes in place of tensors.
    """

    kind: ClassVar[DispatcherKind]
    exchange: ClassVar[TokenExchange | None]  # None: it cannot serve experts on several ranks
    uneven: ClassVar[bool]  # whether sizes of its exchange depend on what routers choose

    moe: MoEConfig
    ep: int
    etp: int
    one_node: bool = True  # whether its ranks reach each other over the fast links of a node

    @property
    def ranks(self) -> int:
        """P: ranks that have all experts between them."""
        return self.ep * self.etp

    @property
    def experts(self) -> int:
        """Experts on one rank, or parts of them."""
        return self.moe.num_experts // self.ep

    @property
    def legal(self) -> bool:
        """Whether it can serve these ranks."""
        return self.exchange is not None or self.ranks == 1

    @property
    def paged_buffers(self) -> bool:
        """Whether rows that backward needs are kept in pages of one pool."""
        return False

    @property
    def quantises(self) -> bool:
        """Whether its kernels write rows in FP8 too, where products read these."""
        return False

    @property
    def waits_for_host(self) -> bool:
        """Whether `dispatch` waits until the host knows the sizes of the exchange.

        Nothing that waits can be captured into a graph. Padded to capacity, all sizes are known.
        """
        return self.uneven and not self.moe.pad_to_capacity

    def most_per_expert(self, tokens: int) -> int | None:
        """Most rows that an expert takes of a rank's T tokens: its capacity, at most T; None: no
        bound.
        """
        moe = self.moe
        if moe.capacity_factor is None:
            return None
        return min(capacity(tokens * moe.top_k, moe.num_experts, moe.capacity_factor), tokens)

    def rows_per_expert(self, tokens: int) -> int | None:
        """Rows of a rank's tokens that every expert is filled up to; None: it is not."""
        return self.most_per_expert(tokens) if self.moe.pad_to_capacity else None

    def capacity_load(self, tokens: int) -> float | None:
        """Most rows that experts take of a rank's tokens, over those asked for; None: no bound."""
        most = self.most_per_expert(tokens)
        if most is None:
            return None
        return self.moe.num_experts * most / (tokens * self.moe.top_k)

    def busiest_load(self, tokens: int) -> float:
        """Rows of the busiest expert-parallel rank over the mean without drops.

        No more than the planned imbalance, than all rows of the ranks, than a token has on one rank
        (its experts are all different), and than the experts' capacity; exactly that where they are
        padded to it.
        """
        moe = self.moe
        bound = self.capacity_load(tokens)
        load = min(moe.planned_imbalance, self.ep, moe.num_experts / moe.top_k)
        if bound is None:
            return load
        return bound if moe.pad_to_capacity else min(load, bound)

    def mean_rows(self, tokens: int) -> int:
        """Rows that the experts of one rank compute at even load, nothing dropped."""
        return tokens * self.moe.top_k * self.etp

    def most_rows(self, tokens: int) -> int | None:
        """Most rows that all experts take of a rank's tokens; None: no bound."""
        bound = self.capacity_load(tokens)
        return None if bound is None else round(self.mean_rows(tokens) * bound)

    def sends(self, forward: int, backward: int) -> Sends:
        """So many bytes to the other ranks, by its exchange."""
        assert self.exchange is not None
        return Sends(ETP_EP, self.exchange.way, forward=forward, backward=backward)

    @property
    def moves(self) -> str:
        """What travels between its ranks, in words."""
        assert self.exchange is not None
        return self.exchange.collectives

    def summary(self, tokens: int) -> str | None:
        """What a person should know of it when a run starts; None: nothing beyond its name."""
        return None

    def held(self, tokens: Tokens) -> int:
        """Bytes that a rank holds for its exchange from the start to the end of a run."""
        return 0

    def lent(self, matrix: int, size: int) -> LentMatrices | None:
        """Exchanges of a kind of matrices with so many elements of so many bytes; None: ranks lend
        each other no experts.
        """
        return None

    def smaller(self) -> Iterator[SmallerOption]:
        """Options of its own that are not set and would make a run smaller."""
        return iter(())

    @abstractmethod
    def rows(self, tokens: int) -> RowCounts:
        """Rows of a microbatch that has so many tokens on each rank."""

    def trace_preprocess(self, trace: Trace, tokens: Tokens, chosen: TracedTensor) -> TracedRows:
        """Where rows come from and go."""
        return self._sorted(trace, tokens, chosen)

    def _sorted(self, trace: Trace, tokens: Tokens, chosen: TracedTensor) -> TracedRows:
        """Rows sorted by expert."""
        rows = self.rows(tokens.count)
        # padded to capacity, one more place takes what has no row
        of_rows = 8 * (rows.sent + 1 if self.moe.pad_to_capacity else rows.asked)
        sizes = of_rows, 8 * rows.asked, rows.asked if rows.drops else 0, 4 * self.experts
        made = trace.op([], sizes, holds=[chosen], kernels=8)
        token_of_row, row_of, kept, ends = made
        return TracedRows(token_of_row, row_of, kept, ends=ends)

    @abstractmethod
    def trace_dispatch(
        self, trace: Trace, tokens: Tokens, h: TracedTensor, rows: TracedRows
    ) -> TracedTensor:
        """Rows of this rank's experts, expert-major."""

    @abstractmethod
    def trace_combine(
        self,
        trace: Trace,
        tokens: Tokens,
        expert_out: TracedTensor,
        probs: TracedTensor,
        rows: TracedRows,
    ) -> TracedTensor:
        """Each token's sum over its experts."""
