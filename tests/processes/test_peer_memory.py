"""The transport by other ranks' memory against the one by collectives, bit for bit: forked
processes share memory at equal addresses, kernels are interpreted, half of the ranks are as late as
they can be.
"""

from __future__ import annotations

import functools
import itertools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import app.moe.dispatch.expert_rows
import app.moe.dispatch.peer
from app.moe.dispatch.peer import PeerTransport
from app.moe.dispatch.transport import CollectiveTransport, TokenTransport
from tests.cases import chosen
from tests.distributed import run_distributed
from tests.exchanges import Sizes, all_exchanges, different, draw
from tests.peer_memory import share_memory

pytest.importorskip("triton")


def both(rank: int, memory: Path, sizes: Sizes, rounds: int, halves: int = 2) -> list[str]:
    """Return differences between the transports, in a layer's all-to-alls and in repeated ones."""
    group = dist.new_group()
    ranks, local = group.size(), sizes.local(group.size())
    handle = share_memory(memory, rank, ranks)
    app.moe.dispatch.expert_rows.usable = lambda *_: True  # in this process, which ends soon
    if halves == 1:
        app.moe.dispatch.peer.cycle = lambda buffers: itertools.repeat(buffers[0])
    size = {"tokens": sizes.tokens, "width": sizes.width, "top_k": sizes.top_k}
    kind = {"dtype": sizes.dtype, "device": torch.device("cpu")}
    peer = PeerTransport(group, local, sizes.etp, **size, **kind)
    ours = [exchanged(peer, sizes, rank, ranks=ranks, seed=seed) for seed in range(rounds)]
    handle.leave()
    collective = CollectiveTransport(group, local, sizes.etp)
    theirs = [exchanged(collective, sizes, rank, ranks=ranks, seed=seed) for seed in range(rounds)]
    return [name for one, other in zip(ours, theirs, strict=True) for name in different(one, other)]


def exchanged(
    transport: TokenTransport, sizes: Sizes, rank: int, ranks: int, seed: int
) -> dict[str, Tensor]:
    """A layer's exchanges; then three in a row that all pull, and three that all push."""
    given = draw(sizes, rank, seed)
    found = all_exchanges(transport, sizes, given, rank=rank, ranks=ranks)
    row_of_NK, num_rows = found["row_of"], sizes.rows(ranks)
    owned = row_of_NK[row_of_NK < num_rows].unique().long()
    several = [draw(sizes, rank, seed + nth).x_TD for nth in range(3)]
    rows = [transport.spread(x_TD, row_of_NK, num_rows) for x_TD in several]
    sums = [transport.combine(each, None, row_of_NK, given.experts_TK) for each in rows]
    for nth in range(3):
        found |= {f"rows {nth}": rows[nth][owned], f"sums {nth}": sums[nth]}
    return found


SIZES = [
    (2, 1, Sizes(3, 4, 2, 8)),
    (4, 2, Sizes(3, 8, 2, 6)),
    (4, 2, Sizes(4, 4, 3, 16, etp=2)),
]


@pytest.mark.parametrize(("ranks", "rounds", "sizes"), chosen(SIZES, SIZES[:1]), ids=str)
def test_peer_transport_equals_collectives(tmp_path: Path, ranks: int, rounds: int, sizes: Sizes):
    compare = functools.partial(both, memory=tmp_path / "memory", sizes=sizes, rounds=rounds)
    assert run_distributed(compare, ranks) == [[]] * ranks


@pytest.mark.full
def test_one_half_would_not_be_enough(tmp_path: Path):
    memory, sizes = tmp_path / "memory", SIZES[0][2]
    compare = functools.partial(both, memory=memory, sizes=sizes, rounds=1, halves=1)
    late = run_distributed(compare, 2)[1]
    assert "rows 0" in late and "rows 2" not in late
    assert "sums 0" in late and "sums 2" not in late
