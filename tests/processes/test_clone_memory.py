"""Clones by other ranks' memory against loops, bit for bit: forked processes share memory at equal
addresses, kernels are interpreted, half of the ranks are as late as they can be.
"""

from __future__ import annotations

import functools
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from app.moe.clones.peer import PeerClones
from tests.cases import chosen
from tests.clone_exchanges import (
    CloneSizes,
    all_clone_exchanges,
    draw_values,
    wanted_of_clones,
)
from tests.distributed import run_distributed
from tests.exchanges import different
from tests.peer_memory import share_memory, shared

pytest.importorskip("triton")


def differences(rank: int, memory: Tensor, sizes: CloneSizes, rounds: int) -> list[str]:
    """What differs from the loops."""
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
def test_clones_arrive_and_their_gradients_come_home(ranks: int, rounds: int, sizes: CloneSizes):
    compare = functools.partial(differences, memory=shared(ranks), sizes=sizes, rounds=rounds)
    assert run_distributed(compare, ranks) == [[]] * ranks


def test_equal_calls_in_a_row_need_a_barrier_more():
    """What lies there is written over while a late rank reads it; kinds in turns, as layers have
    them, come through.
    """
    sizes = SIZES[0][2]
    compare = functools.partial(differences, memory=shared(2), sizes=sizes, rounds=1)
    with patch.object(PeerClones, "_make_free", lambda *_: None):
        late = run_distributed(compare, 2)[1]
    assert [name.partition(": ")[2] for name in late] == [
        f"{what} {which} · {factor}"
        for what in ("weights", "gradients")
        for which in (0, 1)
        for factor in (1, 2)  # nothing comes after the last in the row
    ]
