"""At the end of a run: whether clones of hot experts would have paid (docs/echo.md)."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from app.collectives import all_reduce
from app.config import Run
from app.errors import ConfigError
from app.moe.echo import plan_slots
from app.plan.cost.clones import CloneCosts
from app.plan.dispatchers.choose import clones_overrides, with_clones
from app.rules import check

SPARES = 2  # that are tried


def cloning_run(run: Run) -> Run | None:
    """The run with clones of hot experts; None: it has them, or cannot."""
    if run.model.moe is None or run.model.moe.echo.spares:
        return None
    try:
        return check(with_clones(run, SPARES))
    except ConfigError:
        return None


def clones_would_pay(
    run: Run, counts_LE: Tensor, stages: dist.ProcessGroup, peak: float | None
) -> str | None:
    """One sentence, the same on all ranks, by the tokens that experts of this stage's L layers had
    lately, on GPUs of `peak` TFLOP/s; None: clones would not have paid, or are not to be had, or
    the peak is not known.

    Loads of single microbatches are less even than their sum, so this is the least that they save.
    """
    cloning = cloning_run(run)
    if cloning is None or peak is None:
        return None
    assert cloning.model.moe is not None
    ranks, echo = run.parallel.ep, cloning.model.moe.echo
    sums_4 = torch.zeros(4, dtype=torch.float64, device=counts_LE.device)
    for counts_E in counts_LE:
        # who has the tokens changes nothing about loads
        counts_RE = torch.zeros_like(counts_E.expand(ranks, -1))
        counts_RE[0] = counts_E
        found_4 = counts_E.new_zeros(4)
        plan = plan_slots(
            counts_RE, SPARES, echo.algorithm, threshold=echo.threshold, sums_4=found_4
        )
        before, after, rows, _ = found_4
        clones = (plan.moved_S > 0).view(ranks, -1).sum(dim=1).max()
        mean = rows.clamp(min=1) / ranks
        sums_4 += torch.stack((before / mean, after / mean, clones, torch.ones_like(mean)))
    all_reduce(sums_4, stages)
    *loads, layers = sums_4.tolist()
    if not layers:
        return None
    before_mean, after_mean, clones_mean = (load / layers for load in loads)
    saved = CloneCosts.of(cloning, peak).saved(before_mean, after_mean, clones_mean)
    per_step = saved * run.num_microbatches * layers / run.parallel.pp
    if per_step <= 0:
        return None
    return (
        f"the busiest rank had {before_mean:.2f} times the mean rows of experts; with "
        f"{' '.join(clones_overrides(run, SPARES))} it would have had {after_mean:.2f} times, and "
        f"a step would have been {1e3 * per_step:,.3g} ms shorter by estimate (docs/echo.md)"
    )
