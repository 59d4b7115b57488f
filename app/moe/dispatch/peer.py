"""Transport by kernels that read and write other ranks' memory over NVLink.

Shapes as in `app.moe.dispatch.transport`.

Each operation is a write, a barrier of all ranks, and a read: of what lies with others (pull) or of
what others have written here (push). Every buffer has two halves, used in turn. Why one barrier is
enough: let operations i < j < k of one buffer follow each other, so that i and k use the same half.
Whoever reads it in i does so before reaching the barrier of j, since a rank's kernels run in order.
Whoever writes it in k has passed the barrier of j, and so comes after all reads of i, be it the
owner that writes what others pull, or others that write what the owner reads. Operations of other
buffers in between only add barriers.

A captured graph uses the halves that were due at its capture. Replays and other operations may then
use the same half twice in a row; in that case an operation of another buffer must lie between the
two, whose barrier replaces that of j. Within a layer that always holds: forward exchanges choices,
tokens, probabilities and sums, backward gradients, dot products and sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle

import torch
import torch.distributed as dist
from torch import Tensor

from app.kernels.peer_rows import push_values
from app.kernels.quantise import Fp8Rows
from app.kernels.rows import OfRanks, gradients_into, spread_into, sum_into
from app.moe.dispatch.expert_rows import sum_dots, sum_partials
from app.moe.peer_memory import Buffer, Layout, PeerMemory


class PeerTransport:
    """Each rank that has any of a token's experts reads the token once and returns one sum. Needs
    GPUs of one host with peer access, and Triton.

    All operations must run on one stream, or on streams that wait for each other. Allocates memory
    for T tokens of every rank per operation: 2·(P + 1)·T·D values and 2·10·P·T·K bytes. Creating it
    is collective.
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
        ranks = group.size()
        self.local = local  # experts of this rank
        self.etp = etp
        self.tokens = tokens
        self.rank = group.rank()
        assert local * ranks // etp <= torch.iinfo(torch.int16).max, "expert ids are sent as int16"
        lists = (ranks, tokens, top_k)
        layouts = [
            Layout((tokens, width), dtype, parted=False),
            Layout((ranks, tokens, width), dtype, parted=True),
            Layout(lists, torch.float32, parted=True),
            Layout(lists, torch.float32, parted=True),
            Layout(lists, torch.int16, parted=True),
        ]
        self._memory = PeerMemory(group, [each for each in layouts for _ in range(2)], device)
        halves = self._memory.buffers
        pairs: list[Iterator[Buffer]] = [
            cycle(halves[2 * nth : 2 * nth + 2]) for nth in range(len(layouts))
        ]
        self._rows, self._partials, self._probs, self._dots, self._choices = pairs

    def gather_choices(self, experts_TK: Tensor) -> Tensor:
        """See the protocol; int16."""
        return self._everyones(self._choices, experts_TK)

    def spread(
        self, x_TD: Tensor, row_of_NK: Tensor, num_rows: int, fp8_rows: Fp8Rows | None = None
    ) -> Tensor:
        """See the protocol."""
        tokens = self._offered(x_TD)
        self._memory.barrier()
        rows_RD = x_TD.new_empty(num_rows, x_TD.shape[1])
        spread_into(rows_RD, self._of_ranks(tokens), row_of_NK, fp8_rows)
        return rows_RD

    def combine(
        self, rows_RD: Tensor, probs_TK: Tensor | None, row_of_NK: Tensor, experts_TK: Tensor
    ) -> Tensor:
        """See the protocol."""
        probs_NK = None if probs_TK is None else self._everyones(self._probs, probs_TK)
        partials = next(self._partials)
        assert rows_RD.dtype == partials.own.dtype
        sum_into(self._of_ranks(partials), rows_RD, row_of_NK, weights_TK=probs_NK)
        self._memory.barrier()
        return sum_partials(partials.own, experts_TK, self.local, etp=self.etp)

    def spread_gradients(
        self,
        grad_TD: Tensor,
        rows_RD: Tensor,
        probs_TK: Tensor,
        row_of_NK: Tensor,
        experts_TK: Tensor,
        fp8_rows: Fp8Rows | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See the protocol."""
        grads = self._offered(grad_TD)
        probs_NK = self._everyones(self._probs, probs_TK)  # one barrier for both
        dots = next(self._dots)
        grad_RD = torch.empty_like(rows_RD, memory_format=torch.contiguous_format)
        gradients_into(
            grad_RD,
            self._of_ranks(dots),
            self._of_ranks(grads),
            rows_RD=rows_RD,
            probs_TK=probs_NK,
            row_of_TK=row_of_NK,
            fp8_rows=fp8_rows,
        )
        self._memory.barrier()
        return grad_RD, sum_dots(dots.own, experts_TK, self.local, etp=self.etp)

    def _of_ranks(self, buffer: Buffer) -> OfRanks:
        return OfRanks(buffer.addresses_P, self.rank)

    def _offered(self, x_TD: Tensor) -> Buffer:
        """Copy this rank's rows to memory that others can read after a barrier."""
        buffer = next(self._rows)
        assert x_TD.shape == buffer.own.shape and x_TD.dtype == buffer.own.dtype
        buffer.own.copy_(x_TD)
        return buffer

    def _everyones(self, pair: Iterator[Buffer], values_TK: Tensor) -> Tensor:
        """All-gather the values of all ranks, N × K."""
        buffer = next(pair)
        assert values_TK.shape == buffer.own.shape[1:]
        push_values(values_TK, buffer.addresses_P, buffer.own.dtype)
        self._memory.barrier()
        return buffer.own.flatten(0, 1)
