"""Advice of a finished run about clones of hot experts that it did not use."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist

from app.choices import DispatcherKind
from app.config import HardwareConfig, ParallelConfig, Run, TrainConfig
from app.config.experts import EchoConfig
from app.engine.report.clones import clones_would_pay
from app.plan.cost.clones import OVERHEAD, CloneCosts
from app.plan.parts.dispatcher import with_clones
from app.rules import check
from tests.distributed import run_distributed
from tests.runs import TINY, make_run

LINKS = HardwareConfig(peak_tflops=1e-3, efficiency=0.5, node_gb_s=10.0)
EVEN, SKEWED = [8] * 8, [32, 32, 8, 8, 4, 4, 4, 4]


def run_of(
    ep: int = 4, links: HardwareConfig = LINKS, spares: int = 0, node: int = 8, **moe: object
) -> Run:
    echo = EchoConfig(spares=spares)
    model = dataclasses.replace(TINY, moe=dataclasses.replace(TINY.moe, echo=echo, **moe))
    parallel = ParallelConfig(ep=ep, dp=ep, gpus_per_node=node)
    train = TrainConfig(steps=20, seq_len=16, micro_batch=2, global_batch=4 * ep)
    return make_run(model, parallel=parallel, hardware=links, train=train)


def said(rank: int, run: Run, counts_LE: list[list[int]], peak: float | None) -> str | None:
    """Every rank is a stage with one of the layers."""
    mine_LE = torch.tensor(counts_LE[rank : rank + 1])
    group = dist.new_group()
    dist.barrier()  # a rank that leaves at once would fail one that still makes the group
    return clones_would_pay(run, mine_LE, group, peak=peak, device=torch.device("cpu"))


def test_it_pays_where_loads_are_uneven():
    """One rank has 64 of 96 rows, 2.67 times the mean, and keeps 24, as three clones leave it. The
    other layer is even.
    """
    run = run_of()
    first, second = run_distributed(said, 2, run, [SKEWED, EVEN], 1.0)
    costs = CloneCosts.of(with_clones(run, 2))
    seconds = costs.saved((64 / 24 + 1) / 2, 1.0, 3 / 2) * run.num_microbatches * 2
    assert (
        first
        == second
        == "the busiest rank had 1.83 times the mean number of dispatched tokens; with "
        "model.moe.dispatcher=static model.moe.echo.spares=2 it would have had 1.00 times, and a "
        f"step would have been an estimated {1e3 * seconds:,.3g} ms shorter (docs/moe.md)"
    )


@pytest.mark.parametrize(
    ("run", "peak"),
    [
        (run_of(links=dataclasses.replace(LINKS, node_gb_s=1e-6)), 1.0),  # weights take too long
        (run_of(links=dataclasses.replace(LINKS, network_gb_s=1e-6), node=2), 1.0),  # two nodes
        (run_of(), None),  # on a CPU
        (run_of(spares=1, dispatcher=DispatcherKind.static), 1.0),  # has them
        (run_of(ep=1), 1.0),  # nowhere to go
    ],
    ids=["slow links", "slow network", "CPU", "has them", "one rank"],
)
def test_no_advice_when_unavailable(run: Run, peak: float | None):
    assert run_distributed(said, 2, check(run), [SKEWED, EVEN], peak) == [None, None]


def test_no_advice_for_even_loads():
    assert run_distributed(said, 2, run_of(), [EVEN, EVEN], 1.0) == [None, None]


def test_costs_by_hand():
    """Three matrices of 32 × 16; 2 · 16 tokens, two experts each; 2 FLOPs, three times."""
    expert, rows = 3 * 32 * 16, 32 * 2
    costs = CloneCosts.of(run_of(spares=2, dispatcher=DispatcherKind.static))
    assert costs.mean == pytest.approx(6 * expert * rows / (1e-3 * 1e12 * 0.5))
    assert costs.clone == pytest.approx(expert * (4 + 4 + 4) / 10e9)
    assert costs.saved(2.0, 1.5, 2) == pytest.approx(0.5 * costs.mean - 2 * costs.clone - OVERHEAD)


def test_collectives_carry_all_slots():
    """Over two nodes: of the three other ranks, whatever is cloned."""
    links = dataclasses.replace(LINKS, network_gb_s=1.0)
    costs = CloneCosts.of(run_of(spares=2, links=links, node=2, dispatcher=DispatcherKind.static))
    assert costs.clone == 0
    assert costs.always == pytest.approx(OVERHEAD + 3 * 2 * 3 * 32 * 16 * (4 + 4 + 4) / 1e9)
