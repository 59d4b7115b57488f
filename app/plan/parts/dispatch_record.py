"""The interface of planned dispatchers: pure records that rules, plan and `app.engine.build` read.

A dispatcher is added in five files: its name in `app.choices.DispatcherKind`, its record in a
module beside this one, a line for that in `app.plan.parts.dispatcher`, its module in
`app.moe.dispatch`, which moves tensors, and a case in `app.engine.dispatchers`. Options of its own
are keys of `app.config.experts.MoEConfig`.

Shapes: T tokens of a microbatch on one rank, D hidden, E experts, K per token, R rows: dispatched
tokens, one per choice. The experts lie on a grid of P = ep · etp ranks: ep shares of the experts,
each expert in etp parts.
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
from app.plan.parts.trace import Sends, Trace, Work

PLACE, PROBABILITY = 8, 4  # bytes per choice of a token: its row, its probability


def capacity(choices: int, num_experts: int, factor: float) -> int:
    """Return the capacity of one expert in a microbatch: ceil(T·K / E · factor) rows.

    `choices` = T·K. Source: GShard (arXiv 2006.16668), rounded as in Megatron-Core.
    """
    return ceil(choices / num_experts * factor)


@dataclass(frozen=True, slots=True)
class Tokens:
    """Hidden states of tokens on one rank."""

    count: int  # T
    width: int  # D
    size: int  # bytes of an element
    # bytes of a dispatched token's FP8 copy that the permutation kernel also writes; 0: none
    in_fp8: int = 0

    @property
    def row(self) -> int:
        """Bytes of one token."""
        return self.width * self.size

    @property
    def bytes(self) -> int:
        """Bytes of all tokens."""
        return self.count * self.row


@dataclass(frozen=True, slots=True)
class RowCounts:
    """Rows (dispatched tokens) of a microbatch on one rank.

    A row is sent to each etp part of its expert.
    """

    asked: int  # choices of the tokens seen here
    sent: int  # rows that leave this rank, or are permuted out of gathered tokens
    computed: int  # rows of this rank's experts, at the planned load


@dataclass(frozen=True, slots=True)
class TokenExchange:
    """Communication that brings tokens to experts on other ranks, and back."""

    collectives: str  # in words
    way: Way  # in which bytes go


@dataclass(frozen=True, slots=True)
class CloneTransfer:
    """Cost of sending cloned experts' matrices of one kind, added to their grouped GEMM."""

    scratch: tuple[int, int]  # bytes of buffers, forward and backward
    sends: Sends  # of a mean rank, with every slot in use
    kernels: int  # kernel launches of its forward


@dataclass(frozen=True, slots=True)
class SmallerOption:
    """A key of `model.moe` with which a dispatcher needs less memory."""

    key: str
    value: float | Enum
    cost: str  # drawback, in words


@dataclass(frozen=True, slots=True)
class PlannedDispatcher(ABC):
    """Memory, communication and limits of one dispatcher for these experts on these ranks.

    `preprocess`, `dispatch` and `combine` list the operations of the class of the same kind in
    `app.moe.dispatch`.
    """

    kind: ClassVar[DispatcherKind]
    exchange: ClassVar[TokenExchange | None]  # None: it cannot serve experts on several ranks
    uneven: ClassVar[bool]  # sizes of its exchange depend on the routing

    moe: MoEConfig
    ep: int
    etp: int
    one_node: bool = True  # its ranks reach each other over the fast links of a node

    @property
    def ranks(self) -> int:
        """P: ranks that share all experts of a layer."""
        return self.ep * self.etp

    @property
    def experts(self) -> int:
        """Experts, or etp parts of experts, on one rank."""
        return self.moe.num_experts // self.ep

    @property
    def legal(self) -> bool:
        """True if it can serve these ranks."""
        return self.exchange is not None or self.ranks == 1

    @property
    def paged_buffers(self) -> bool:
        """True if activations of experts are saved in a paged buffer."""
        return False

    @property
    def quantises(self) -> bool:
        """True if its permutation kernels also write FP8 copies for the grouped GEMMs."""
        return False

    @property
    def waits_for_host(self) -> bool:
        """True if `dispatch` waits until the host knows the sizes of the exchange.

        A host wait cannot be captured into a graph. Padded to capacity, all sizes are known.
        """
        return self.uneven and not self.moe.pad_to_capacity

    def most_per_expert(self, tokens: int) -> int | None:
        """Return the most rows that an expert takes of a rank's T tokens: its capacity, at most T.

        None without a capacity.
        """
        moe = self.moe
        if moe.capacity_factor is None:
            return None
        return min(capacity(tokens * moe.top_k, moe.num_experts, moe.capacity_factor), tokens)

    def rows_per_expert(self, tokens: int) -> int | None:
        """Return the rows that every expert is padded to, of a rank's tokens.

        None without padding.
        """
        return self.most_per_expert(tokens) if self.moe.pad_to_capacity else None

    def capacity_load(self, tokens: int) -> float | None:
        """Return the most rows that experts take of a rank's tokens, over its choices.

        None without a capacity.
        """
        most = self.most_per_expert(tokens)
        if most is None:
            return None
        return self.moe.num_experts * most / (tokens * self.moe.top_k)

    def busiest_load(self, tokens: int) -> float:
        """Return the rows of the busiest expert-parallel rank over the mean without drops.

        It is bounded by the planned imbalance, by all rows of the ranks, by the choices that a
        token can have on one rank (its experts are distinct), and by the experts' capacity, which
        it equals if experts are padded to it.
        """
        moe = self.moe
        bound = self.capacity_load(tokens)
        load = min(moe.planned_imbalance, self.ep, moe.num_experts / moe.top_k)
        if bound is None:
            return load
        return bound if moe.pad_to_capacity else min(load, bound)

    def mean_rows(self, tokens: int) -> int:
        """Return the rows that the experts of one rank compute at even load, nothing dropped."""
        return tokens * self.moe.top_k * self.etp

    def most_rows(self, tokens: int) -> int | None:
        """Return the most rows that all experts take of a rank's tokens.

        None without a capacity.
        """
        bound = self.capacity_load(tokens)
        return None if bound is None else round(self.mean_rows(tokens) * bound)

    def sends(self, forward: int, backward: int) -> Sends:
        """Return sends of these bytes to the other ranks, by its exchange."""
        assert self.exchange is not None
        return Sends(ETP_EP, self.exchange.way, forward=forward, backward=backward)

    @property
    def moves(self) -> str:
        """Communication between its ranks, in words."""
        assert self.exchange is not None
        return self.exchange.collectives

    def summary(self, tokens: int) -> str | None:
        """Return what the summary of a run says of it; None for nothing beyond its name."""
        return None

    def held(self, tokens: Tokens) -> int:
        """Return bytes of communication buffers that a rank holds throughout a run."""
        return 0

    def clone_transfer(self, matrix: int, size: int) -> CloneTransfer | None:
        """Return the cost of sending clones of a kind of matrix (elements, bytes per element).

        None without clones.
        """
        return None

    def smaller(self) -> Iterator[SmallerOption]:
        """Yield unset options of its own that would make a run smaller."""
        return iter(())

    @abstractmethod
    def rows(self, tokens: int) -> RowCounts:
        """Count the rows of a microbatch that has so many tokens on each rank."""

    def preprocess(self, t: Trace, tokens: Tokens) -> None:
        """List the computation of the permutation: a sort of choices by expert."""
        t.op(Work.other, 0, 2 * PLACE * self.rows(tokens.count).asked, kernels=8)

    @abstractmethod
    def dispatch(self, t: Trace, tokens: Tokens) -> int:
        """List the dispatch; return bytes of the rows of this rank's experts, expert-major."""

    @abstractmethod
    def combine(self, t: Trace, tokens: Tokens, saved: bool) -> None:
        """List the combine, each token's weighted sum over its experts.

        saved: the experts' output stays for backward, if it is what the sums read.
        """
