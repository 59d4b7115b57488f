"""Dispatcher by all-to-all: rows are sent to the ranks of their experts, and back.

Those ranks are a grid of ep × etp: ep shares of the experts, and etp parts of the hidden width of
each. A rank's index in the group is ep_rank · etp + etp_rank.

Shapes: T tokens of this rank, D hidden, E experts of the layer, L = E / ep experts of this rank, K
experts per token, R rows on this rank after dispatch, P = ep · etp ranks, j = etp parts of an
expert; in records `ends_E` has L entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from app.collectives import all_gather
from app.model.layers.layer_groups import size
from app.moe.experts import Dispatched
from app.moe.permute import Permutation, combine, permute, reorder, sort_by_expert
from app.moe.row_collectives import all_to_all_rows, start_to_host


@dataclass(frozen=True, slots=True)
class CountedRows:
    """Layout before the splits are known on the host."""

    permutation: Permutation  # this rank's rows by expert of the whole layer, hence by destination
    splits_2P: Tensor  # input splits, then output splits
    counts_PL: Tensor  # rows from each rank for each of this rank's experts
    ends_E: Tensor  # int32 end offset of each of this rank's experts


@dataclass(frozen=True, slots=True)
class AllToAllLayout:
    """Splits of the all-to-all, and the order in which received rows are grouped by expert."""

    permutation: Permutation  # this rank's rows by expert of the whole layer, hence by destination
    input_splits: tuple[int, ...]  # rows to each rank
    output_splits: tuple[int, ...]  # rows from each rank
    to_expert_major_R: Tensor  # for each row in expert-major order, its place in rank-major order
    to_rank_major_R: Tensor  # the inverse
    ends_E: Tensor  # int32 end offset of each of this rank's experts


class AllToAllDispatcher:
    """Sends rows by all-to-all; the host reads the gathered counts, unless experts are padded.

    1. `preprocess` sorts the (token, expert) pairs by expert of the whole layer, which is by
       destination, and all-gathers the counts. All of it stays on the device and can be captured.
    2. `dispatch` copies each token into its K rows while the splits are copied to the host, then
       waits for them: `input_splits` rows to each rank, `output_splits` from each.
    3. All-to-all. With experts e0, e1 here and ranks r0, r1, rows arrive rank-major:
       (e0,r0), (e1,r0), (e0,r1), (e1,r1).
    4. Rows are reordered expert-major for the grouped GEMMs: (e0,r0), (e0,r1), (e1,r0), (e1,r1).
    5. `combine` undoes 4 and 3, and adds up each token's rows, weighted, in fp32.

    An expert in etp parts counts as etp experts, one on each of the ranks that share it: a row is
    sent to all of them, and what they return is added up with the K rows of a token, in fp32. Rows
    are sent etp times, but in one all-to-all instead of an all-to-all plus an all-gather, and
    returned in one instead of a reduce-scatter plus an all-to-all.
    """

    def __init__(self, num_experts: int, group: dist.ProcessGroup, etp: int = 1) -> None:
        self.group = group
        self.etp = etp
        self.parts = num_experts * etp  # parts of experts, all equally large
        self.local = self.parts // size(group)

    def preprocess(
        self, experts_TK: Tensor, drops: bool = False, rows_per_expert: int | None = None
    ) -> CountedRows | AllToAllLayout:
        """Compute the layout of sent and received rows, as far as the device can."""
        permutation = sort_by_expert(
            self._parts_of(experts_TK), self.parts, drops, rows_per_expert=rows_per_expert
        )
        if rows_per_expert is None:
            return self._count(permutation)
        return self._even(permutation, rows_per_expert)

    def _parts_of(self, experts_TK: Tensor) -> Tensor:
        """Return the parts of chosen experts, T × K·etp: part j of expert e is on rank (e // L)·etp
        + j, which has parts rank·L to (rank + 1)·L.
        """
        if self.etp == 1:
            return experts_TK
        parts_j = torch.arange(self.etp, device=experts_TK.device)
        rank_TKj = (experts_TK // self.local * self.etp)[..., None] + parts_j
        return (rank_TKj * self.local + (experts_TK % self.local)[..., None]).flatten(1)

    def _count(self, permutation: Permutation) -> CountedRows:
        """All-gather the counts; this rank's row and column of them are its splits."""
        ranks = self.group.size()
        counts_E = permutation.ends_E.diff(prepend=permutation.ends_E.new_zeros(1))
        # source, destination, expert of the destination
        counts_PPL = counts_E.new_empty(ranks, ranks, self.local)
        all_gather(counts_PPL, counts_E, self.group)
        here_PL = counts_PPL[:, self.group.rank()]
        splits_2P = torch.stack((counts_E.view(ranks, -1).sum(1), here_PL.sum(1)))
        ends_E = here_PL.sum(0).cumsum(0).to(torch.int32)
        return CountedRows(permutation, splits_2P, here_PL, ends_E=ends_E)

    def _even(self, permutation: Permutation, rows_per_expert: int) -> AllToAllLayout:
        """Return the layout for the same number of rows of every expert from every rank: no counts
        needed.
        """
        ranks = self.group.size()
        local = self.local
        split = (local * rows_per_expert,) * ranks
        rows_R = torch.arange(sum(split), device=permutation.ends_E.device)
        to_expert_major_R, to_rank_major_R = (
            rows_R.view(a, b, rows_per_expert).transpose(0, 1).flatten()
            for a, b in ((ranks, local), (local, ranks))
        )
        return AllToAllLayout(
            permutation,
            split,
            split,
            to_expert_major_R=to_expert_major_R,
            to_rank_major_R=to_rank_major_R,
            ends_E=permutation.ends_E[:local] * ranks,
        )

    def dispatch(
        self, x_TD: Tensor, prepared: CountedRows | AllToAllLayout
    ) -> tuple[Dispatched, AllToAllLayout]:
        """Map T × D -> R × D, expert-major; waits for the splits if only the device knows them."""
        if isinstance(prepared, AllToAllLayout):
            rows, layout = permute(x_TD, prepared.permutation), prepared
        else:
            rows, layout = _permute_and_wait(x_TD, prepared)
        rows = all_to_all_rows(rows, layout.input_splits, layout.output_splits, group=self.group)
        rows = reorder(rows, layout.to_expert_major_R, layout.to_rank_major_R)
        return Dispatched(rows, layout.ends_E), layout

    def combine(self, expert_out_RD: Tensor, probs_TK: Tensor, origin: AllToAllLayout) -> Tensor:
        """Map R × D -> T × D."""
        rows = reorder(expert_out_RD, origin.to_rank_major_R, origin.to_expert_major_R)
        rows = all_to_all_rows(rows, origin.output_splits, origin.input_splits, group=self.group)
        if self.etp > 1:  # each part of an expert returned a row
            probs_TK = probs_TK[..., None].expand(-1, -1, self.etp).flatten(1)
        return combine(rows, probs_TK, origin.permutation)


def _permute_and_wait(x_TD: Tensor, counted: CountedRows) -> tuple[Tensor, AllToAllLayout]:
    """Return rows by destination, and the layout with the splits that have arrived on the host."""
    arrive = start_to_host(counted.splits_2P)
    permutation = counted.permutation
    if not permutation.drops:
        rows = permute(x_TD, permutation)
        input_splits, output_splits = arrive()
    else:  # dropped choices are not sent, so wait for the number of rows first
        input_splits, output_splits = arrive()
        token_of_row_R = permutation.token_of_row_R[: sum(input_splits)]
        permutation = replace(permutation, token_of_row_R=token_of_row_R)
        rows = permute(x_TD, permutation)
    return rows, _uneven(replace(counted, permutation=permutation), input_splits, output_splits)


def _uneven(
    counted: CountedRows, input_splits: Sequence[int], output_splits: Sequence[int]
) -> AllToAllLayout:
    to_expert_major_R, to_rank_major_R = expert_major(counted.counts_PL, sum(output_splits))
    return AllToAllLayout(
        counted.permutation,
        tuple(input_splits),
        tuple(output_splits),
        to_expert_major_R=to_expert_major_R,
        to_rank_major_R=to_rank_major_R,
        ends_E=counted.ends_E,
    )


def expert_major(counts_PL: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return the order from (rank, expert)-major to (expert, rank)-major rows, and its inverse."""
    ranks, local = counts_PL.shape
    expert_PL = torch.arange(local, device=counts_PL.device).repeat(ranks)
    expert_R = expert_PL.repeat_interleave(counts_PL.flatten(), output_size=rows)
    order_R = expert_R.argsort(stable=True)
    places_R = torch.arange(rows, device=order_R.device)
    return order_R, torch.empty_like(order_R).scatter_(0, order_R, places_R)
