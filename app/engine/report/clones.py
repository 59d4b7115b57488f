"""Estimate at the end of a run whether clones of hot experts would have paid (docs/moe.md).

Shapes: L MoE layers of this stage, E experts of each on R ranks, S slots for clones of all ranks.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from app.collectives import all_reduce
from app.config import Run
from app.config.experts import EchoConfig
from app.engine.ranks.memory import fits
from app.errors import ConfigError
from app.kernels.common import moves_tiles, triton
from app.moe.echo import plan_slots
from app.plan.cost.clones import CloneCosts
from app.plan.parts.dispatcher import clones_overrides, with_clones
from app.programs import page
from app.rules import check

SPARES = 2  # spare slots per rank that are tried


def cloning_run(run: Run) -> Run | None:
    """Return the run with clones of hot experts; None if it has them already, or cannot."""
    if run.model.moe is None or run.model.moe.echo.spares:
        return None
    try:
        return check(with_clones(run, SPARES))
    except ConfigError:
        return None


def clones_would_pay(
    run: Run,
    counts_LE: Tensor,
    stages: dist.ProcessGroup,
    *,
    peak: float | None,
    device: torch.device,
) -> str | None:
    """Return a sentence if clones would have shortened steps, else None; same on all ranks.

    `counts_LE` are recent tokens per expert in the L layers of this stage, `peak` is the GPU's
    TFLOP/s. None also if clones are unavailable or the peak is unknown.
    """
    cloning = cloning_run(run)
    if cloning is None or peak is None:
        return None
    assert cloning.model.moe is not None
    ranks, echo = run.parallel.ep, cloning.model.moe.echo
    sums_4 = torch.zeros(4, dtype=torch.float64, device=counts_LE.device)
    for counts_E in counts_LE:
        sums_4[:3] += _loads(counts_E, ranks, echo)
        sums_4[3] += 1
    all_reduce(sums_4, stages)
    *loads, layers = sums_4.tolist()
    if not layers:  # nothing was counted: no log interval since the start
        return None
    before, after, clones = (load / layers for load in loads)
    saved = CloneCosts.of(cloning, peak).saved(before, after, clones)
    per_step = saved * run.num_microbatches * layers / run.parallel.pp
    available = device.type != "cuda" or (triton is not None and moves_tiles(device))
    if per_step <= 0 or not available or not fits(cloning, device):
        return None
    return (
        f"the busiest rank had {before:.2f} times the mean number of dispatched tokens; with "
        f"{' '.join(clones_overrides(run, SPARES))} it would have had {after:.2f} times, and "
        f"a step would have been an estimated {1e3 * per_step:,.3g} ms shorter ({page('moe.md')})"
    )


def _loads(counts_E: Tensor, ranks: int, echo: EchoConfig) -> Tensor:
    """Return (load before, load after, most clones that leave or reach one rank), fp64 [3].

    Loads are dispatched tokens of the busiest rank over the mean, without and with clones.
    """
    # all tokens on rank 0: loads do not depend on where tokens come from
    counts_RE = torch.zeros_like(counts_E.expand(ranks, -1))
    counts_RE[0] = counts_E
    sums_4 = counts_E.new_zeros(4)
    plan = plan_slots(
        counts_RE, echo.spares, echo.algorithm, threshold=echo.threshold, sums_4=sums_4
    )
    before, after, rows, _ = sums_4
    filled_S = (plan.moved_S > 0).long()
    owner_S = plan.expert_S // (len(counts_E) // ranks)
    leave_R = filled_S.new_zeros(ranks).scatter_add_(0, owner_S, filled_S)
    arrive_R = filled_S.view(ranks, -1).sum(dim=1)
    mean = rows.clamp(min=1).double() / ranks
    most = torch.maximum(leave_R.max(), arrive_R.max()).double()
    return torch.stack((before / mean, after / mean, most))
