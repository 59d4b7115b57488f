"""Clones by other ranks' memory against loops, bit for bit: processes map one file, kernels are
interpreted, half of the ranks are as late as they can be.
"""

from __future__ import annotations

import functools
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from app.kernels.clones.meeting import Arrivals, meet_if
from app.moe.clones.peer import PeerClones
from app.moe.clones.record import Clones
from tests.cases import chosen
from tests.clone_exchanges import (
    CloneSizes,
    all_clone_exchanges,
    draw_values,
    steps,
    wanted_of_clones,
)
from tests.distributed import run_distributed
from tests.exchanges import different
from tests.forks import Patches
from tests.peer_memory import map_shared, share_memory

pytest.importorskip("triton")
LAYERS = 15  # steps that are those of layers


def differences(rank: int, memory: Path, sizes: CloneSizes, rounds: int) -> list[str]:
    """Return the differences from reference loops."""
    group = dist.new_group()
    ranks = group.size()
    handle = share_memory(memory, rank, ranks)
    clones = PeerClones(
        group,
        sizes.local,
        sizes.spares,
        shapes=sizes.shapes,
        dtype=sizes.dtype,
        device=torch.device("cpu"),
    )
    drawn = [draw_values(sizes, ranks, seed) for seed in range(rounds)]
    ours = [all_clone_exchanges(clones, sizes, values, rank=rank) for values in drawn]
    handle.leave()
    theirs = [wanted_of_clones(sizes, values, rank) for values in drawn]
    return [name for one, other in zip(ours, theirs, strict=True) for name in different(one, other)]


SIZES = [
    (2, 1, CloneSizes(2, 3, ((3, 8), (4, 5)))),
    (4, 2, CloneSizes(1, 2, ((2, 8), (9, 3)), dtype=torch.bfloat16)),
    (3, 2, CloneSizes(3, 1, ((16, 8), (8, 16)))),
]


@pytest.mark.parametrize(("ranks", "rounds", "sizes"), chosen(SIZES, SIZES[:1]), ids=str)
def test_clone_weights_arrive_and_gradients_return(
    tmp_path: Path, ranks: int, rounds: int, sizes: CloneSizes
):
    memory = tmp_path / "memory"
    compare = functools.partial(differences, memory=memory, sizes=sizes, rounds=rounds)
    assert run_distributed(compare, ranks) == [[]] * ranks


@pytest.mark.full
def test_what_layers_do_not_do_needs_a_barrier_more(tmp_path: Path, monkeypatch: Patches):
    """Without it, what lies there is written over while a late rank reads it; forward and backward
    as layers have them come through, and gradients of weights that come later.
    """
    memory, sizes = tmp_path / "memory", SIZES[0][2]
    compare = functools.partial(differences, memory=memory, sizes=sizes, rounds=1)
    monkeypatch.setattr(PeerClones, "_make_free", lambda *_: None)
    late = run_distributed(compare, 2)[1]
    # of steps() those that the next with clones follows, of another layer and with nothing between
    unsettled = [("weights", 1, 2), *(("weights", 0, layer) for layer in (0, 2))]
    unsettled += [("weights", 1, 0), ("gradients", 0, 0), ("gradients", 1, 0)]
    overwritten = sorted({int(name.partition(":")[0]) for name in late})
    assert [steps()[nth] for nth in overwritten] == unsettled
    assert overwritten[0] == LAYERS


def meetings(rank: int, file: Path, ranks: int) -> list[list[int]]:
    """Return what a rank reads after each rendezvous; every second one is redundant."""
    memory = map_shared(file, 8 * ranks * (ranks + 1)).view(torch.int64)
    written_P, arrived_PP = memory[:ranks], memory[ranks:].view(ranks, ranks)
    addresses = [each[rank:].data_ptr() for each in arrived_PP]
    passed_P = torch.zeros(ranks, dtype=torch.int64)
    arrivals = Arrivals(arrived_PP[rank], torch.tensor(addresses), passed_P)
    found = []
    for nth in range(1, 7):
        needed_S = torch.tensor([0, 0, nth % 2])
        time.sleep(0.1 * ((rank + nth) % ranks == 0))
        if nth % 2:
            written_P[rank] = nth
        meet_if(needed_S, arrivals)
        found.append(written_P.tolist())
        meet_if(needed_S, arrivals)  # all have looked
    return found


def test_ranks_meet_where_it_is_needed(tmp_path: Path):
    ranks, file = 3, tmp_path / "memory"
    memory = map_shared(file, 8 * ranks * (ranks + 1)).view(torch.int64)
    for found in run_distributed(functools.partial(meetings, file=file, ranks=ranks), ranks):
        assert found[0::2] == [[nth] * ranks for nth in (1, 3, 5)]
    assert memory[ranks:].tolist() == [6] * ranks**2  # nobody has come to the others


def launches(rank: int, memory: Path, sizes: CloneSizes) -> int:
    """Kernels of all exchanges of two layers, forward and backward."""
    from triton.runtime.interpreter import GridExecutor

    share_memory(memory, rank, 1)
    group, device = dist.new_group(), torch.device("cpu")
    exchanges = PeerClones(
        group, sizes.local, sizes.spares, shapes=sizes.shapes, dtype=sizes.dtype, device=device
    )
    values, launched, run = draw_values(sizes, 1, seed=0), [], GridExecutor.__call__
    drawn = values.clones
    plans = [Clones(drawn.expert_S, drawn.moved_S) for _ in range(2)]

    def counting(executor: GridExecutor, *given: Any, **named: Any) -> None:
        launched.append(executor)
        run(executor, *given, **named)

    with patch.object(GridExecutor, "__call__", counting):
        for plan in plans:
            exchanges.gather_counts(values.counts_RE)
            for kind in (0, 1):
                exchanges.send(kind, values.weights_EIO, plan)
        for plan in reversed(plans):
            for kind in (1, 0):
                exchanges.send(kind, values.weights_EIO, plan)
                exchanges.grads(kind, plan)
                exchanges.return_grads(kind, values.totals_EIO[kind], plan)
    return len(launched)


def test_layer_launches_few_collectives(tmp_path: Path):
    """Counts; weights and a barrier, twice; a barrier and what comes home, of both kinds. Backward
    has a barrier more, right behind forward.
    """
    count = functools.partial(launches, memory=tmp_path / "memory", sizes=SIZES[0][2])
    assert run_distributed(count, 1) == [2 * (1 + 2 * 2 + 2 * 2) + 1]
