"""Transports of static shapes on GPUs: the one by other ranks' memory brings what the one by
collectives brings, bit for bit, eagerly, captured, and every time; kernels at the sizes of
training.

torchrun --nproc-per-node 2 tests/gpu/test_peer_transport.py    prints what differs
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from app.engine.ranks.groups import process_world
from app.moe.dispatch.peer import PeerTransport
from app.moe.dispatch.transport import CollectiveTransport, TokenTransport
from tests.exchanges import Given, Sizes, all_exchanges, different, draw, named, unequal
from tests.gpu.programs import no_waits, printed_by_ranks
from tests.moe_kernels import without_kernels
from tests.peer_kernels import CHECKS, Drawn, check_expert_rows, draw_peers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BF16 = torch.bfloat16
SIZES = (
    Sizes(4096, 128, 8, 2048, dtype=BF16),
    Sizes(1000, 16, 3, 320, dtype=BF16),
    Sizes(513, 8, 2, 264, etp=2),
    Sizes(300, 12, 4, 7168, dtype=BF16),
    Sizes(64, 4, 1, 8, dtype=BF16),
)
REPEATS = 50
Run = Callable[[], dict[str, Tensor]]
plain = pytest.fixture(without_kernels)


def main() -> None:
    """Rank 0 prints a line of JSON for each size: names of what differs, by comparison."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    with process_world(rank, ranks, device):
        group = dist.new_group()
        torch.cuda.set_stream(torch.cuda.Stream())
        for sizes in SIZES:
            found = compared(sizes, group, device)
            everyones: list[dict[str, list[str]]] = [{} for _ in range(ranks)]
            dist.all_gather_object(everyones, found)
            if rank == 0:
                print(json.dumps(everyones), flush=True)


def compared(sizes: Sizes, group: dist.ProcessGroup, device: torch.device) -> dict[str, list[str]]:
    """Return differences between the transports, and between two runs on the same values."""
    rank, ranks = group.rank(), group.size()
    local = sizes.local(ranks)
    transports: dict[str, TokenTransport] = {
        "collective": CollectiveTransport(group, local, sizes.etp),
        "peer": PeerTransport(
            group,
            local,
            sizes.etp,
            tokens=sizes.tokens,
            width=sizes.width,
            top_k=sizes.top_k,
            dtype=sizes.dtype,
            device=device,
        ),
    }
    given = draw(sizes, rank, 0, "cuda")
    another = draw(sizes, rank, 1, "cuda")
    runs: dict[str, Run] = {
        name: lambda t=transport: all_exchanges(t, sizes, given, rank=rank, ranks=ranks)
        for name, transport in transports.items()
    }
    exact = runs["collective"]()  # compiles kernels and makes connections, as the next one does
    found = {"eager": different(runs["peer"](), exact)}
    with no_waits():
        flags = [unequal(runs["peer"](), exact) for _ in range(REPEATS)]
    found["eager repeats"] = named(exact, torch.stack(flags).any(dim=0))
    for name, run in runs.items():
        found |= replayed(name, run, given, another=another)
    return found


def replayed(name: str, run: Run, given: Given, another: Given) -> dict[str, list[str]]:
    """Return differences between captured and eager runs, for two sets of values in turn."""
    before = given.clone()
    exact = run()
    given.copy_(another)
    exact_other = run()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(
        graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"
    ):
        captured = run()
    flags = []
    with no_waits():
        for nth in range(REPEATS):
            given.copy_(another if nth % 2 else before)
            graph.replay()
            flags.append(unequal(captured, exact_other if nth % 2 else exact))
    found = named(exact, torch.stack(flags).any(dim=0))
    given.copy_(before)
    eager = different(run(), exact)  # behind replays, whatever halves are due
    torch.cuda.synchronize()
    dist.barrier()
    return {f"{name} replayed": found, f"{name} behind replays": eager}


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_peer_transport_equals_collectives():
    ranks = min(4, torch.cuda.device_count())
    ranks -= ranks % 2
    rows = printed_by_ranks(__file__, ranks)
    assert len(rows) == len(SIZES)
    for sizes, everyones in zip(SIZES, rows, strict=True):
        for rank, found in enumerate(everyones):
            assert len(found) == 6
            assert {name: names for name, names in found.items() if names} == {}, (sizes, rank)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize(
    "size",
    [(2, 4096, 128, 8, 2048, 1), (4, 1000, 16, 3, 5120, 2), (8, 2048, 128, 8, 2048, 1)],
    ids=str,
)
def test_kernels(
    size: tuple[int, int, int, int, int, int], check: Callable[[Drawn], None], plain: None
):
    ranks, tokens, experts, top_k, width, etp = size
    check(draw_peers(ranks, tokens, experts, top_k=top_k, width=width, dtype=BF16, etp=etp))


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "local"),
    [(8192, 128, 8, 64), (32768, 128, 8, 16), (8192, 512, 10, 256), (4096, 60, 4, 60)],
)
def test_offsets(tokens: int, experts: int, top_k: int, local: int, plain: None):
    check_expert_rows(tokens, experts, top_k, local=local, dtype=torch.int16)


if __name__ == "__main__":
    main()
