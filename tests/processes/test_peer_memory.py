"""The transport by other ranks' memory against the one by collectives, bit for bit: forked
processes share memory at equal addresses, kernels are interpreted, half of the ranks are late.
"""

from __future__ import annotations

import functools
import itertools
import mmap
import time
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from torch import Tensor

import app.moe.dispatch.expert_rows
import app.moe.dispatch.peer
from app.moe.dispatch.collective import CollectiveTransport
from app.moe.dispatch.peer import PeerTransport
from tests.cases import chosen
from tests.distributed import run_distributed
from tests.exchanges import Sizes, all_exchanges, different, draw

pytest.importorskip("triton")
SIZE = 1 << 20  # bytes of each rank
LATE_S = 0.03


@dataclass(frozen=True)
class Handle:
    """What a rendezvous returns: everybody's memory, and a barrier behind which odd ranks are late,
    when the others go on.
    """

    buffer_ptrs: list[int]
    rank: int

    def barrier(self, channel: int) -> None:
        """Of all ranks."""
        assert channel == 0
        dist.barrier()
        time.sleep(LATE_S if self.rank % 2 else 0)


def share_memory(memory: Tensor, rank: int, ranks: int) -> None:
    """Symmetric memory is taken from what this process and its siblings were forked with."""
    own = memory[rank * SIZE : (rank + 1) * SIZE]

    def empty(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        assert size <= SIZE and dtype == torch.uint8 and device.type == "cpu"
        return own[:size]

    def rendezvous(tensor: Tensor, _group: dist.ProcessGroup) -> Handle:
        assert tensor.data_ptr() == own.data_ptr()
        bases = [memory.data_ptr() + r * SIZE for r in range(ranks)]
        return Handle(bases, rank)

    symmetric.empty, symmetric.rendezvous = empty, rendezvous  # in this process, which ends soon
    app.moe.dispatch.expert_rows.usable = lambda *_: True


def both(rank: int, memory: Tensor, sizes: Sizes, rounds: int, halves: int = 2) -> list[str]:
    """What differs between the transports, in a layer's exchanges and in one after its equal."""
    group = dist.new_group()
    ranks, local = group.size(), sizes.local(group.size())
    share_memory(memory, rank, ranks)
    if halves == 1:
        app.moe.dispatch.peer.cycle = lambda buffers: itertools.repeat(buffers[0])
    size = {"tokens": sizes.tokens, "width": sizes.width, "top_k": sizes.top_k}
    kind = {"dtype": sizes.dtype, "device": torch.device("cpu")}
    peer = PeerTransport(group, local, sizes.etp, **size, **kind)
    collective = CollectiveTransport(group, local, sizes.etp)
    found = []
    for seed in range(rounds):
        given = draw(sizes, rank, seed)
        ours, theirs = (
            all_exchanges(transport, sizes, given, rank=rank, ranks=ranks)
            for transport in (peer, collective)
        )
        found += different(ours, theirs)
        found += spread_often(peer, collective, ours["row_of"], rank=rank, ranks=ranks, sizes=sizes)
    return found


def spread_often(
    peer: PeerTransport,
    collective: CollectiveTransport,
    row_of_NK: Tensor,
    rank: int,
    ranks: int,
    sizes: Sizes,
) -> list[str]:
    """Which of three exchanges of the same kind differ."""
    num_rows = sizes.rows(ranks)
    tokens = [draw(sizes, rank, seed).x_TD for seed in range(3)]
    owned = row_of_NK[row_of_NK < num_rows].unique().long()
    pairs = [
        [transport.spread(x_TD, row_of_NK, num_rows)[owned] for x_TD in tokens]
        for transport in (peer, collective)
    ]
    return [
        f"spread {nth}"
        for nth, (a, b) in enumerate(zip(*pairs, strict=True))
        if not torch.equal(a, b)
    ]


def shared(ranks: int) -> Tensor:
    """Zeros that forked processes write to together."""
    return torch.frombuffer(mmap.mmap(-1, ranks * SIZE), dtype=torch.uint8)


SIZES = [
    (2, 1, Sizes(3, 4, 2, 8, multiple=16)),
    (4, 2, Sizes(3, 8, 2, 6)),
    (4, 2, Sizes(4, 4, 3, 16, etp=2, multiple=16)),
]


@pytest.mark.parametrize(("ranks", "rounds", "sizes"), chosen(SIZES, SIZES[:1]), ids=str)
def test_peers_bring_what_collectives_bring(ranks: int, rounds: int, sizes: Sizes):
    compare = functools.partial(both, memory=shared(ranks), sizes=sizes, rounds=rounds)
    assert run_distributed(compare, ranks) == [[]] * ranks


def test_one_half_would_not_be_enough():
    compare = functools.partial(both, memory=shared(2), sizes=SIZES[0][2], rounds=1, halves=1)
    late = run_distributed(compare, 2)[1]
    assert "spread 0" in late and "spread 2" not in late
