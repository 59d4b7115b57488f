"""At the end of a run: whether clones of hot experts would have paid (docs/echo.md)."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from app.collectives import all_reduce
from app.config import Run
from app.errors import ConfigError
from app.moe.echo import plan_clones
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
    ranks = run.parallel.ep
    sums_4 = torch.zeros(4, dtype=torch.float64, device=counts_LE.device)
    for counts_E in counts_LE:
        # who has the tokens changes nothing about loads
        counts_RE = torch.zeros_like(counts_E.expand(ranks, -1))
        counts_RE[0] = counts_E
        moved_ES, _ = plan_clones(counts_RE, SPARES)
        load_R = counts_E.view(ranks, -1).sum(dim=1)
        left_R = (counts_E - moved_ES.sum(dim=1)).view(ranks, -1).sum(dim=1)
        after_R = left_R + moved_ES.sum(dim=0).view(ranks, -1).sum(dim=1)
        filled_R = (moved_ES.sum(dim=0) > 0).view(ranks, -1).sum(dim=1)
        mean = load_R.sum() / ranks
        sums_4 += torch.stack(
            (load_R.max() / mean, after_R.max() / mean, filled_R.max(), torch.ones_like(mean))
        )
    all_reduce(sums_4, stages)
    before, after, clones, layers = sums_4.tolist()
    if not layers:
        return None
    before, after, clones = before / layers, after / layers, clones / layers
    saved = CloneCosts.of(cloning, peak).saved(before, after, clones)
    per_step = saved * run.num_microbatches * layers / run.parallel.pp
    if per_step <= 0:
        return None
    return (
        f"the busiest rank had {before:.2f} times the mean rows of experts; with "
        f"{' '.join(clones_overrides(run, SPARES))} it would have had {after:.2f} times, and a "
        f"step would have been {1e3 * per_step:,.3g} ms shorter by estimate (docs/echo.md)"
    )
