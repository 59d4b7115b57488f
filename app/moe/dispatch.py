"""Transport of tokens to experts: on this rank, or by an uneven all-to-all among the expert-parallel ranks.

Shapes: T tokens of this rank, D hidden, E experts of the layer, L = E / ep experts of this rank, K experts per token,
R rows on this rank after the exchange, P = ep ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from app.compat import all_gather
from app.moe.permute import Permutation, combine, permute, reorder, sort_by_expert


class LocalDispatcher:
    """Every expert is on this rank: a permutation."""

    host_sync = False

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts

    def preprocess(self, experts_TK: Tensor) -> Permutation:
        """Sort the rows by expert."""
        return sort_by_expert(experts_TK, self.num_experts)

    def dispatch(self, x_TD: Tensor, record: Permutation) -> Tensor:
        """T × D -> T·K × D, expert-major."""
        return permute(x_TD, record)

    def combine(self, rows_RD: Tensor, probs_TK: Tensor, record: Permutation) -> Tensor:
        """T·K × D -> T × D."""
        return combine(rows_RD, probs_TK, record)


@dataclass(frozen=True, slots=True)
class Exchange:
    """What preprocessing learned: how this rank's rows leave, how foreign rows arrive and are grouped by expert."""

    permutation: Permutation  # this rank's rows by expert of the whole layer, hence by destination
    sent: tuple[int, ...]  # rows to each rank
    received: tuple[int, ...]  # rows from each rank
    order_R: Tensor  # received rows (source-major) in expert-major order
    inverse_R: Tensor  # and back
    ends_E: Tensor  # int32 end offset of each of this rank's experts


class AllToAllDispatcher:
    """Dropless exchange: counts are gathered, copied to the host once, and rows travel by all_to_all."""

    host_sync = True

    def __init__(self, num_experts: int, group: dist.ProcessGroup) -> None:
        self.num_experts, self.group = num_experts, group

    def preprocess(self, experts_TK: Tensor) -> Exchange:
        """Exchange the counts and lay out what arrives; the only place where the host waits."""
        ranks = self.group.size()
        permutation = sort_by_expert(experts_TK, self.num_experts)
        counts_E = permutation.ends_E.diff(prepend=permutation.ends_E.new_zeros(1))
        counts_PE = counts_E.new_empty(ranks, self.num_experts)
        all_gather(counts_PE, counts_E, self.group)
        counts_PPL = counts_PE.view(ranks, ranks, -1)  # source, destination, expert of the destination
        here_PL = counts_PPL[:, self.group.rank()]
        splits = torch.stack((counts_E.view(ranks, -1).sum(1), here_PL.sum(1))).tolist()
        order_R, inverse_R = group_by_expert(here_PL, sum(splits[1]))
        ends_E = here_PL.sum(0).cumsum(0).to(torch.int32)
        return Exchange(permutation, tuple(splits[0]), tuple(splits[1]), order_R, inverse_R, ends_E)

    def dispatch(self, x_TD: Tensor, record: Exchange) -> Tensor:
        """T × D -> R × D, expert-major."""
        rows = permute(x_TD, record.permutation)
        rows = _AllToAll.apply(rows, record.sent, record.received, self.group)
        return reorder(rows, record.order_R, record.inverse_R)

    def combine(self, rows_RD: Tensor, probs_TK: Tensor, record: Exchange) -> Tensor:
        """R × D -> T × D."""
        rows = reorder(rows_RD, record.inverse_R, record.order_R)
        rows = _AllToAll.apply(rows, record.received, record.sent, self.group)
        return combine(rows, probs_TK, record.permutation)


def group_by_expert(counts_PL: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Order that turns rows sorted by (source, expert) into rows sorted by (expert, source), and its inverse."""
    ranks, local = counts_PL.shape
    expert_PL = torch.arange(local, device=counts_PL.device).repeat(ranks)
    expert_R = expert_PL.repeat_interleave(counts_PL.flatten(), output_size=rows)
    order_R = expert_R.argsort(stable=True)
    return order_R, torch.empty_like(order_R).scatter_(0, order_R, torch.arange(rows, device=order_R.device))


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, sent, received, group):  # noqa: ANN001, ANN205
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _exchange(rows, sent, received, group)

    @staticmethod
    def backward(ctx, grad):  # noqa: ANN001, ANN205
        return _exchange(grad, ctx.received, ctx.sent, ctx.group), None, None, None


def _exchange(rows: Tensor, sent: tuple[int, ...], received: tuple[int, ...], group: dist.ProcessGroup) -> Tensor:
    out = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(out, rows.contiguous(), list(received), list(sent), group=group)
    return out
