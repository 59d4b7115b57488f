"""The transport by kernels that read and write other ranks' memory over NVLink.

Shapes as in `app.moe.dispatch.transport`.

Each exchange is a write, a barrier of all ranks, and a read: of what lies with others (pulled) or
of what others have put here (pushed). Every buffer exists twice, and its exchanges take turns. Why
this one barrier is enough: let exchanges i < j < k of one buffer follow each other, so that i and k
have the same half of it. Whoever reads it in i does so before it comes to the barrier of j, since a
rank's kernels run one after another. Whoever writes to it in k has passed the barrier of j, and so
comes after all reads of i, be it the owner that writes what others have pulled, or others that
write what the owner has read. Exchanges of other buffers in between add barriers, which do no harm.

A captured graph has the halves that were due at its capture. Replays and other exchanges may meet
so that the same half is used twice in a row; then there must be an exchange of another buffer
between the two, whose barrier takes the place of j's. In a layer that is always so: forward
exchanges choices, tokens, probabilities and sums, backward gradients, dot products and sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from app.kernels.peer_rows import pull_gradients, pull_rows, push_sums, push_values
from app.moe.dispatch.expert_rows import sum_dots, sum_partials

ALIGNMENT = 256  # bytes at which buffers begin


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory that every rank of the group has, and can reach on the others."""

    own: Tensor
    addresses_P: Tensor  # int64, on the device: of each rank's; or of this rank's part of each


class PeerTransport:
    """A token is read by each rank that has any of its experts, once, and a sum comes back from
    each. Needs GPUs of one host that reach each other's memory, and Triton.

    All exchanges must come from one stream, or from streams that wait for each other. The memory is
    for T tokens of every rank in each exchange: 2·(P + 1)·T·D values and 2·10·P·T·K bytes. Creating
    it is collective.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        local: int,
        etp: int,
        tokens: int,
        width: int,
        top_k: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        import torch.distributed._symmetric_memory as symmetric  # not in every build of torch

        ranks = group.size()
        self.local = local  # experts of this rank
        self.etp = etp
        self.tokens = tokens
        self.rank = group.rank()
        assert local * ranks // etp <= torch.iinfo(torch.int16).max, "ids travel in two bytes"
        lists = (ranks, tokens, top_k)
        layouts = [
            Layout((tokens, width), dtype, pushed=False),
            Layout((ranks, tokens, width), dtype, pushed=True),
            Layout(lists, torch.float32, pushed=True),
            Layout(lists, torch.float32, pushed=True),
            Layout(lists, torch.int16, pushed=True),
        ]
        total = 2 * sum(layout.space for layout in layouts)
        self._memory = symmetric.empty(total, dtype=torch.uint8, device=device)
        self._handle = symmetric.rendezvous(self._memory, group)
        bases = self._handle.buffer_ptrs
        assert bases[self.rank] == self._memory.data_ptr()
        start = 0
        pairs: list[Iterator[Buffer]] = []
        for layout in layouts:
            starts = (start, start + layout.space)
            pairs.append(cycle([self._buffer(layout, bases, place) for place in starts]))
            start += 2 * layout.space
        self._rows, self._partials, self._probs, self._dots, self._choices = pairs

    def _buffer(self, layout: Layout, bases: list[int], start: int) -> Buffer:
        own = self._memory[start : start + layout.bytes].view(layout.dtype).view(layout.shape)
        mine = self.rank * layout.bytes // layout.shape[0] if layout.pushed else 0
        addresses = [base + start + mine for base in bases]
        return Buffer(own, torch.tensor(addresses, dtype=torch.int64, device=own.device))

    def _barrier(self) -> None:
        """What ranks have written before it can be read behind it."""
        self._handle.barrier(channel=0)

    def gather_choices(self, experts_TK: Tensor) -> Tensor:
        """See the protocol; int16."""
        return self._everyones(self._choices, experts_TK)

    def spread(self, x_TD: Tensor, row_of_NK: Tensor, num_rows: int) -> Tensor:
        """See the protocol."""
        tokens = self._offered(x_TD)
        self._barrier()
        return pull_rows(
            tokens.addresses_P,
            row_of_NK,
            num_rows,
            width=x_TD.shape[1],
            dtype=x_TD.dtype,
            rank=self.rank,
        )

    def sum_home(
        self, rows_RD: Tensor, probs_TK: Tensor | None, row_of_NK: Tensor, experts_TK: Tensor
    ) -> Tensor:
        """See the protocol."""
        probs_NK = None if probs_TK is None else self._everyones(self._probs, probs_TK)
        partials = next(self._partials)
        assert rows_RD.dtype == partials.own.dtype
        push_sums(rows_RD, probs_NK, row_of_NK, partials.addresses_P, rank=self.rank)
        self._barrier()
        return sum_partials(partials.own, experts_TK, self.local, etp=self.etp)

    def spread_gradients(
        self,
        grad_TD: Tensor,
        rows_RD: Tensor,
        probs_TK: Tensor,
        row_of_NK: Tensor,
        experts_TK: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """See the protocol."""
        grads = self._offered(grad_TD)
        probs_NK = self._everyones(self._probs, probs_TK)  # one barrier for both
        dots = next(self._dots)
        grad_RD = pull_gradients(
            grads.addresses_P,
            rows_RD,
            probs_NK,
            row_of_NK=row_of_NK,
            dots_addresses_P=dots.addresses_P,
            rank=self.rank,
        )
        self._barrier()
        return grad_RD, sum_dots(dots.own, experts_TK, self.local, etp=self.etp)

    def _offered(self, x_TD: Tensor) -> Buffer:
        """This rank's rows, where the others can read them behind a barrier."""
        buffer = next(self._rows)
        assert x_TD.shape == buffer.own.shape and x_TD.dtype == buffer.own.dtype
        buffer.own.copy_(x_TD)
        return buffer

    def _everyones(self, pair: Iterator[Buffer], values_TK: Tensor) -> Tensor:
        """The values of all ranks, N × K."""
        buffer = next(pair)
        assert values_TK.shape == buffer.own.shape[1:]
        push_values(values_TK, buffer.addresses_P, buffer.own.dtype)
        self._barrier()
        return buffer.own.flatten(0, 1)


@dataclass(frozen=True, slots=True)
class Layout:
    """Values that a rank keeps for others to read, or for others to write their part of."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pushed: bool  # the first dimension has a part for each rank

    @property
    def bytes(self) -> int:
        """Of the values."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def space(self) -> int:
        """Bytes with what is left free behind them."""
        return -(-self.bytes // ALIGNMENT) * ALIGNMENT
