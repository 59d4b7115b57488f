"""Dispatcher that all-gathers all tokens; each rank takes those of its experts.

Shapes: T tokens of this rank, D hidden, K experts per token, L experts of this rank, P ranks, N =
P·T tokens of all of them, R rows of this rank's experts, C rows per expert and rank; `ends_E` has L
entries.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from app.moe.experts import Dispatched
from app.moe.permute import Permutation, sort_by_expert
from app.moe.row_collectives import combine_and_scatter, gather_and_permute, gathered


@dataclass(frozen=True, slots=True)
class Selected:
    """Layout of the rows of this rank's experts among all ranks' tokens."""

    permutation: Permutation
    counted: bool  # the host knows the number of rows; otherwise only the device does


class AllGatherDispatcher:
    """All-gathers tokens, equally many of each rank; each rank takes those of its experts.

    1. `preprocess` all-gathers the choices of all ranks and sorts those of this rank's experts by
       (expert, rank): expert-major from the start.
    2. `dispatch` waits for the number of rows, unless experts are padded to capacity, all-gathers
       the tokens, and copies out the rows.
    3. `combine` adds up what the experts here make of every token, in fp32; a reduce-scatter in
       fp32 returns the sums to the source ranks.

    Backward mirrors it. Sends N·D elements whatever K is, so it suits few ranks with many experts
    per token.
    """

    def __init__(self, num_experts: int, group: dist.ProcessGroup, etp: int = 1) -> None:
        self.group = group
        self.local = num_experts * etp // group.size()
        self.first = group.rank() // etp * self.local  # global index of this rank's first expert

    def preprocess(
        self, experts_TK: Tensor, drops: bool = False, rows_per_expert: int | None = None
    ) -> Selected:
        """All-gather the choices and build the permutation from all ranks' tokens to rows of own
        experts.

        Choices of other ranks' experts are dropped here, so `drops` changes nothing.
        """
        ranks = self.group.size()
        chosen_NK = gathered(experts_TK, self.group) - self.first
        elsewhere_NK = (chosen_NK < 0) | (chosen_NK >= self.local)
        if rows_per_expert is None:
            chosen_NK = chosen_NK.masked_fill(elsewhere_NK, self.local)
            return Selected(sort_by_expert(chosen_NK, self.local, True), counted=False)
        # C rows per expert from each rank: every (expert, rank) is sorted as an expert
        rank_N = torch.arange(len(chosen_NK), device=chosen_NK.device) // max(1, len(experts_TK))
        segments_NK = chosen_NK * ranks + rank_N[:, None]
        segments_NK = segments_NK.masked_fill(elsewhere_NK, self.local * ranks)
        found = sort_by_expert(
            segments_NK, self.local * ranks, True, rows_per_expert=rows_per_expert
        )
        ends_E = found.ends_E[ranks - 1 :: ranks].contiguous()
        return Selected(replace(found, ends_E=ends_E), counted=True)

    def dispatch(self, x_TD: Tensor, prepared: Selected) -> tuple[Dispatched, Permutation]:
        """Map T × D -> R × D, expert-major; waits for the number of rows if it is not known."""
        permutation = prepared.permutation
        if not prepared.counted:
            rows = int(permutation.ends_E[-1])
            permutation = replace(permutation, token_of_row_R=permutation.token_of_row_R[:rows])
        rows_RD = gather_and_permute(x_TD, permutation, self.group)
        return Dispatched(rows_RD, permutation.ends_E), permutation

    def combine(self, expert_out_RD: Tensor, probs_TK: Tensor, origin: Permutation) -> Tensor:
        """Map R × D -> T × D."""
        return combine_and_scatter(expert_out_RD, probs_TK, origin, group=self.group)
