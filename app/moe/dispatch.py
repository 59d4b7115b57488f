"""Transport of tokens to experts: on this rank, or among the ranks that have a layer's experts.

Those ranks are a grid of ep × etp: ep shares of the experts, and etp parts of the hidden width of
each. A rank's place in their group is ep_rank · etp + etp_rank.

Shapes: T tokens of this rank, D hidden, E experts of the layer, L = E / ep experts of this rank, K
experts per token, R rows on this rank after the exchange, P = ep · etp ranks, N = P·T tokens of all
of them, C rows per expert and rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from app.collectives import all_gather, reduce_scatter
from app.model.peers import size
from app.moe.permute import (
    Permutation,
    combine,
    combine_gradients,
    permute,
    reorder,
    sort_by_expert,
    sum_rows,
)
from app.moe.records import AllToAllCounts, AllToAllExchange, Dispatched, Prepared, Uncounted

OTHERS = "the record of another dispatcher"


class LocalDispatcher:
    """Every expert is on this rank: a permutation."""

    host_sync = False

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts

    def preprocess(
        self, experts_TK: Tensor, drops: bool = False, capacity: int | None = None
    ) -> Permutation:
        """Sort the choices by expert; nothing is exchanged."""
        return sort_by_expert(
            experts_TK, self.num_experts, drops, rows_per_expert=_filled(experts_TK, capacity)
        )

    def dispatch(self, x_TD: Tensor, record: Prepared) -> tuple[Tensor, Permutation]:
        """T × D -> T·K × D, expert-major."""
        assert isinstance(record, Permutation), OTHERS
        return permute(x_TD, record), record

    def combine(self, rows_RD: Tensor, probs_TK: Tensor, record: Dispatched) -> Tensor:
        """T·K × D -> T × D."""
        assert isinstance(record, Permutation), OTHERS
        return combine(rows_RD, probs_TK, record)


class AllToAllDispatcher:
    """Rows travel by all_to_all; the host reads gathered counts, unless padded to capacity.

    Preprocessing stays on the device, so a graph may hold it. The copy starts behind it and is
    waited for just before the exchange, while the device sorts the rows.

    An expert in etp parts is etp experts to this class, one on each of the ranks that share it: a
    row goes to all of them, and what comes back is added up with the K rows of a token, in fp32. So
    rows travel etp times, but in one exchange instead of an exchange and a gather, and back in one
    instead of a reduction and an exchange.
    """

    host_sync = True

    def __init__(self, num_experts: int, group: dist.ProcessGroup, etp: int = 1) -> None:
        self.group = group
        self.etp = etp
        self.parts = num_experts * etp  # parts of experts, all equally large
        self.local = self.parts // size(group)

    def preprocess(
        self, experts_TK: Tensor, drops: bool = False, capacity: int | None = None
    ) -> AllToAllCounts | AllToAllExchange:
        """Lay out what leaves and what arrives, as far as the device can."""
        rows = _filled(experts_TK, capacity)
        permutation = sort_by_expert(
            self._parts_of(experts_TK), self.parts, drops, rows_per_expert=rows
        )
        return self._count(permutation) if rows is None else self._even(permutation, rows)

    def _parts_of(self, experts_TK: Tensor) -> Tensor:
        """T × K·etp: part j of expert e is on rank (e // L)·etp + j, which has parts rank·L to
        (rank + 1)·L.
        """
        if self.etp == 1:
            return experts_TK
        parts_j = torch.arange(self.etp, device=experts_TK.device)
        rank_TKj = (experts_TK // self.local * self.etp)[..., None] + parts_j
        return (rank_TKj * self.local + (experts_TK % self.local)[..., None]).flatten(1)

    def _count(self, permutation: Permutation) -> AllToAllCounts:
        ranks = self.group.size()
        counts_E = permutation.ends_E.diff(prepend=permutation.ends_E.new_zeros(1))
        # source, destination, expert of the destination
        counts_PPL = counts_E.new_empty(ranks, ranks, self.local)
        all_gather(counts_PPL, counts_E, self.group)
        here_PL = counts_PPL[:, self.group.rank()]
        sizes_2P = torch.stack((counts_E.view(ranks, -1).sum(1), here_PL.sum(1)))
        ends_E = here_PL.sum(0).cumsum(0).to(torch.int32)
        return AllToAllCounts(permutation, sizes_2P, here_PL, ends_E=ends_E)

    def _uneven(
        self, counted: AllToAllCounts, sent: Sequence[int], received: Sequence[int]
    ) -> AllToAllExchange:
        order_R, inverse_R = group_by_expert(counted.here_PL, sum(received))
        return AllToAllExchange(
            counted.permutation,
            tuple(sent),
            tuple(received),
            order_R=order_R,
            inverse_R=inverse_R,
            ends_E=counted.ends_E,
        )

    def _even(self, permutation: Permutation, rows: int) -> AllToAllExchange:
        ranks = self.group.size()
        local = self.local
        split = (local * rows,) * ranks
        rows_R = torch.arange(sum(split), device=permutation.ends_E.device)
        order_R, inverse_R = (
            rows_R.view(a, b, rows).transpose(0, 1).flatten()
            for a, b in ((ranks, local), (local, ranks))
        )
        return AllToAllExchange(
            permutation,
            split,
            split,
            order_R=order_R,
            inverse_R=inverse_R,
            ends_E=permutation.ends_E[:local] * ranks,
        )

    def dispatch(self, x_TD: Tensor, record: Prepared) -> tuple[Tensor, AllToAllExchange]:
        """T × D -> R × D, expert-major; waits for the counts where there are any."""
        if isinstance(record, AllToAllExchange):
            rows = permute(x_TD, record.permutation)
            exchange = record
        else:
            assert isinstance(record, AllToAllCounts), OTHERS
            arrive = start_to_host(record.sizes_2P)
            permutation = record.permutation
            if permutation.kept_TK is None:
                rows, (sent, received) = permute(x_TD, permutation), arrive()
            else:  # what is dropped stays
                sent, received = arrive()
                token_of_row_R = permutation.token_of_row_R[: sum(sent)]
                permutation = replace(permutation, token_of_row_R=token_of_row_R)
                rows = permute(x_TD, permutation)
            exchange = self._uneven(replace(record, permutation=permutation), sent, received)
        rows = _AllToAll.apply(rows, exchange.sent, exchange.received, self.group)
        return reorder(rows, exchange.order_R, exchange.inverse_R), exchange

    def combine(self, rows_RD: Tensor, probs_TK: Tensor, record: Dispatched) -> Tensor:
        """R × D -> T × D."""
        assert isinstance(record, AllToAllExchange), OTHERS
        rows = reorder(rows_RD, record.inverse_R, record.order_R)
        rows = _AllToAll.apply(rows, record.received, record.sent, self.group)
        if self.etp > 1:  # a row came back from each part of its expert
            probs_TK = probs_TK[..., None].expand(-1, -1, self.etp).flatten(1)
        return combine(rows, probs_TK, record.permutation)


class AllGatherDispatcher:
    """Every rank gets all tokens, equally many of each, and takes those of its experts.

    What its experts add to a token is summed in fp32, and a reduce-scatter in fp32 brings the sums
    home. Backward mirrors it. Moves N·D elements whatever K is, so it suits a few ranks with many
    experts per token. The host waits once, before the gather, for the number of rows, unless
    experts are padded to capacity.
    """

    host_sync = True

    def __init__(self, num_experts: int, group: dist.ProcessGroup, etp: int = 1) -> None:
        self.group = group
        self.local = num_experts * etp // group.size()
        self.first = group.rank() // etp * self.local  # global index of this rank's first expert

    def preprocess(
        self, experts_TK: Tensor, drops: bool = False, capacity: int | None = None
    ) -> Permutation | Uncounted:
        """Gather the choices; the permutation leads from all ranks' tokens to rows of own experts.

        What others' experts do is dropped here, so `drops` changes nothing.
        """
        rows = _filled(experts_TK, capacity)
        ranks = self.group.size()
        chosen_NK = _gathered(experts_TK, self.group) - self.first
        elsewhere_NK = (chosen_NK < 0) | (chosen_NK >= self.local)
        if rows is None:
            chosen_NK = chosen_NK.masked_fill(elsewhere_NK, self.local)
            return Uncounted(sort_by_expert(chosen_NK, self.local, True))
        # each rank's rows are padded to C per expert: every (expert, rank) is sorted as an expert
        rank_N = torch.arange(len(chosen_NK), device=chosen_NK.device) // max(1, len(experts_TK))
        segments_NK = chosen_NK * ranks + rank_N[:, None]
        segments_NK = segments_NK.masked_fill(elsewhere_NK, self.local * ranks)
        found = sort_by_expert(segments_NK, self.local * ranks, True, rows_per_expert=rows)
        return replace(found, ends_E=found.ends_E[ranks - 1 :: ranks].contiguous())

    def dispatch(self, x_TD: Tensor, record: Prepared) -> tuple[Tensor, Permutation]:
        """T × D -> R × D, expert-major; waits for the number of rows where it is not known."""
        if isinstance(record, Uncounted):
            found = record.permutation
            record = replace(found, token_of_row_R=found.token_of_row_R[: int(found.ends_E[-1])])
        assert isinstance(record, Permutation), OTHERS
        return _GatherRows.apply(
            x_TD, record.token_of_row_R, record.row_of_TK, record.kept_TK, self.group
        ), record

    def combine(self, rows_RD: Tensor, probs_TK: Tensor, record: Dispatched) -> Tensor:
        """R × D -> T × D."""
        assert isinstance(record, Permutation), OTHERS
        out_TD: Tensor = _BringHome.apply(
            rows_RD, probs_TK, record.token_of_row_R, record.row_of_TK, record.kept_TK, self.group
        )
        return out_TD


def group_by_expert(counts_PL: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Order from rows by (source, expert) to rows by (expert, source), and its inverse."""
    ranks, local = counts_PL.shape
    expert_PL = torch.arange(local, device=counts_PL.device).repeat(ranks)
    expert_R = expert_PL.repeat_interleave(counts_PL.flatten(), output_size=rows)
    order_R = expert_R.argsort(stable=True)
    places_R = torch.arange(rows, device=order_R.device)
    return order_R, torch.empty_like(order_R).scatter_(0, order_R, places_R)


def start_to_host(values_AB: Tensor) -> Callable[[], list[list[int]]]:
    """Start to copy a small matrix of integers to the host; returns what waits for this alone."""
    if not values_AB.is_cuda:
        return values_AB.tolist
    copy = values_AB.to("cpu", non_blocking=True, memory_format=torch.contiguous_format)
    there = torch.cuda.Event()
    there.record()

    def arrive() -> list[list[int]]:
        there.synchronize()
        return copy.tolist()

    return arrive


def _filled(experts_TK: Tensor, capacity: int | None) -> int | None:
    """Rows that pad each expert to its capacity: at most one per token of this rank."""
    return None if capacity is None else min(capacity, len(experts_TK))


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        sent: tuple[int, ...],
        received: tuple[int, ...],
        group: dist.ProcessGroup,
    ) -> Tensor:
        ctx.sent = sent
        ctx.received = received
        ctx.group = group
        return _exchange(rows, sent, received, group=group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(grad, ctx.received, ctx.sent, group=ctx.group), None, None, None


def _exchange(
    rows: Tensor, sent: tuple[int, ...], received: tuple[int, ...], group: dist.ProcessGroup
) -> Tensor:
    out = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(out, rows.contiguous(), list(received), list(sent), group=group)
    return out


class _GatherRows(torch.autograd.Function):
    """`permute` of the tokens of all ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        token_of_row_R: Tensor,
        row_of_NK: Tensor,
        kept_NK: Tensor,
        group: dist.ProcessGroup,
    ) -> Tensor:
        ctx.save_for_backward(row_of_NK, kept_NK)
        ctx.group = group
        return _gathered(x_TD, group).index_select(0, token_of_row_R)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor | None, ...]:
        row_of_NK, kept_NK = ctx.saved_tensors
        grad_ND = sum_rows(grad_RD, row_of_NK, None, kept_TK=kept_NK)
        return _scattered(grad_ND, ctx.group).to(grad_RD.dtype), None, None, None, None


class _BringHome(torch.autograd.Function):
    """`combine` for the tokens of all ranks; each rank ends up with the sums of its own."""

    @staticmethod
    def forward(
        ctx: Any,
        rows_RD: Tensor,
        probs_TK: Tensor,
        token_of_row_R: Tensor,
        row_of_NK: Tensor,
        kept_NK: Tensor,
        group: dist.ProcessGroup,
    ) -> Tensor:
        probs_NK = _gathered(probs_TK, group)
        ctx.save_for_backward(rows_RD, probs_NK, token_of_row_R, row_of_NK, kept_NK)
        ctx.group = group
        own_TD = _scattered(sum_rows(rows_RD, row_of_NK, probs_NK, kept_TK=kept_NK), group)
        return own_TD.to(rows_RD.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        grad_RD, grad_NK = combine_gradients(_gathered(grad_TD, ctx.group), *ctx.saved_tensors)
        return grad_RD, _scattered(grad_NK, ctx.group), None, None, None, None


def _gathered(own_T: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The rows of all ranks, in rank order: [T, …] -> [N, …]."""
    all_N = own_T.new_empty(group.size() * own_T.shape[0], *own_T.shape[1:])
    all_gather(all_N, own_T.contiguous(), group)
    return all_N


def _scattered(all_N: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's rows of the sum over the ranks: [N, …] -> [T, …]."""
    own_T = all_N.new_empty(all_N.shape[0] // group.size(), *all_N.shape[1:])
    reduce_scatter(own_T, all_N, group)
    return own_T
