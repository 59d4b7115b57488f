"""Choices of experts by tokens of other ranks, such that this rank's experts get planned rows.

Shapes: T tokens of a rank, K experts per token, P ranks with all experts of a layer, L experts of
this rank, R rows of this rank's experts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from app.engine.rehearsal.faked import FakedGroup, Fill
from app.engine.step.engine import Engine
from app.moe.experts import Dispatched
from app.moe.phases import MoEBody
from app.moe.protocol import Dispatcher
from app.plan.parts.all_to_all import PlannedAllToAll
from app.plan.parts.dispatch_record import PlannedDispatcher
from app.plan.parts.dispatcher import run_dispatcher, tokens_per_rank


def planned_rows(planned: PlannedDispatcher, tokens: int) -> int:
    """Return R as planned: where memory is fixed, the mean that times assume."""
    return planned.rows(tokens).computed if planned.uneven else planned.mean_rows(tokens)


@dataclass(slots=True)
class PlannedRows:
    """Dispatcher around another one, in whose gathers the other ranks' choices fit the plan."""

    inner: Dispatcher[Any, Any]
    group: FakedGroup
    fill: Fill
    arrived: list[int] = field(default_factory=list)  # rows that memory was made for, by call

    def preprocess(
        self, experts_TK: Tensor, drops: bool = False, rows_per_expert: int | None = None
    ) -> Any:
        """See `Dispatcher`."""
        with self.group.gathered(self.fill):
            return self.inner.preprocess(experts_TK, drops, rows_per_expert)

    def dispatch(self, x_TD: Tensor, prepared: Any) -> tuple[Dispatched, Any]:
        """See `Dispatcher`."""
        dispatched, origin = self.inner.dispatch(x_TD, prepared)
        self.arrived.append(len(dispatched.rows_RD))
        return dispatched, origin

    def combine(self, expert_out_RD: Tensor, probs_TK: Tensor, origin: Any) -> Tensor:
        """See `Dispatcher`."""
        return self.inner.combine(expert_out_RD, probs_TK, origin)


def receive_planned_rows(engine: Engine) -> PlannedRows | None:
    """Let all MoE layers of an engine of faked groups receive the planned rows; None if nothing is
    received, or if experts are padded to a capacity, which fixes all sizes.
    """
    run = engine.plan.run
    planned, group = run_dispatcher(run), engine.groups.etp_ep
    if planned is None or group.size() == 1 or planned.moe.pad_to_capacity:
        return None
    assert isinstance(group, FakedGroup)
    rows, first = planned_rows(planned, tokens_per_rank(run)), engine.groups.coords.ep[0]
    fill = (
        partial(_counts, rows, group.rank())
        if isinstance(planned, PlannedAllToAll)  # which gathers counts, the others all choices
        else partial(_choices, rows, group.rank(), planned, first * planned.experts)
    )
    bodies = [
        module
        for chunk in engine.chunks
        for module in chunk.modules()
        if isinstance(module, MoEBody)
    ]
    if not bodies:
        return None
    wrapped = PlannedRows(bodies[0].dispatcher, group, fill)
    for body in bodies:
        body.dispatcher = wrapped
    return wrapped


def _counts(rows: int, rank: int, parts: Tensor, own: Tensor) -> None:
    """Fill in counts of rows, [source, destination × expert]: other ranks send this one what its
    own tokens leave of R, in equal parts, and each other what this rank sends.
    """
    ranks = len(parts)
    parts.copy_(own.expand_as(parts))
    here_PL = parts.view(ranks, ranks, -1)[:, rank]
    others = torch.arange(ranks, device=parts.device) != rank
    rest = (rows - here_PL[rank].sum()).clamp(min=0)
    # the n-th of all (source, expert) pairs gets its share of what is left, rounded so that the
    # sum is exact
    count = (ranks - 1) * here_PL.shape[1]
    ends = (torch.arange(count + 1, device=parts.device) * rest).div(count, rounding_mode="floor")
    here_PL[others] = ends.diff().view(ranks - 1, -1).to(parts.dtype)


def _choices(
    rows: int, rank: int, planned: PlannedDispatcher, first: int, parts: Tensor, own: Tensor
) -> None:
    """Fill in choices, [source, token × K]: tokens of other ranks choose as many of this rank's
    experts as its own tokens leave of R, in turn, and otherwise those of others.
    """
    moe, local = planned.moe, planned.experts
    ranks, top_k, away = len(parts), moe.top_k, moe.num_experts - planned.experts
    here = ((own >= first) & (own < first + local)).sum()
    count = (ranks - 1) * own.numel() // top_k
    n = torch.arange(count + 1, device=own.device)
    ends = (n * (rows - here).clamp(min=0)).div(max(count, 1), rounding_mode="floor")
    chosen_N = ends.diff().clamp(min=max(0, top_k - away), max=min(top_k, local))
    before_N = (chosen_N.cumsum(0) - chosen_N)[:, None]
    k = torch.arange(top_k, device=own.device)
    here_NK = first + (before_N + k) % local
    away_NK = (n[:-1, None] * top_k - before_N + k - chosen_N[:, None]) % max(away, 1)
    away_NK = away_NK + local * (away_NK >= first)
    made_NK = torch.where(k < chosen_N[:, None], here_NK, away_NK).sort(dim=1).values
    made = made_NK.view(ranks - 1, -1).to(parts.dtype)
    parts[:rank], parts[rank], parts[rank + 1 :] = made[:rank], own, made[rank:]
