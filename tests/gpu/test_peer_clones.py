"""Clones by other ranks' memory on GPUs: weights and gradients arrive bit for bit, eagerly,
captured, and every time.

torchrun --nproc-per-node 2 tests/gpu/test_peer_clones.py    prints what differs
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
from app.moe.clones.peer import PeerClones
from tests.clone_exchanges import (
    CloneSizes,
    CloneValues,
    all_clone_exchanges,
    draw_values,
    wanted_of_clones,
)
from tests.exchanges import different, named, unequal
from tests.gpu.programs import no_waits, printed_by_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BF16 = torch.bfloat16
SIZES = (
    CloneSizes(4, 2, ((2048, 1536), (768, 2048)), BF16),
    CloneSizes(2, 1, ((264, 77), (33, 264)), BF16),
    CloneSizes(3, 3, ((256, 512), (256, 256))),
)
REPEATS = 20
Run = Callable[[], dict[str, Tensor]]


def main() -> None:
    """Rank 0 prints a line of JSON for each size: names of what differs, by way of running."""
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


def compared(
    sizes: CloneSizes, group: dist.ProcessGroup, device: torch.device
) -> dict[str, list[str]]:
    """Return differences from reference loops, eager and replayed, for two sets of values."""
    rank, ranks = group.rank(), group.size()
    clones = PeerClones(
        group,
        sizes.local,
        sizes.spares,
        shapes=sizes.shapes,
        dtype=sizes.dtype,
        device=device,
    )
    values, *others = (draw_values(sizes, ranks, seed, device="cuda") for seed in (0, 0, 1))
    exact = [wanted_of_clones(sizes, other, rank) for other in others]

    def run() -> dict[str, Tensor]:
        return all_clone_exchanges(clones, sizes, values, rank)

    found = {"eager": different(run(), exact[0])}  # compiles kernels
    found["eager repeats"] = repeated(run, values, others, exact=exact)
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(
        graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"
    ):
        captured = run()

    def replay() -> dict[str, Tensor]:
        graph.replay()
        return captured

    found["replayed"] = repeated(replay, values, others, exact=exact)
    found["eager behind replays"] = repeated(run, values, others, exact=exact)
    torch.cuda.synchronize()
    dist.barrier()
    return found


def repeated(
    run: Run, values: CloneValues, others: list[CloneValues], exact: list[dict[str, Tensor]]
) -> list[str]:
    """Return all differences from reference loops."""
    flags = []
    with no_waits():
        for nth in range(REPEATS):
            values.copy_(others[nth % 2])
            flags.append(unequal(run(), exact[nth % 2]))
    return named(exact[0], torch.stack(flags).any(dim=0))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_clone_weights_arrive_and_gradients_return():
    ranks = min(4, torch.cuda.device_count())
    rows = printed_by_ranks(__file__, ranks)
    assert len(rows) == len(SIZES)
    for sizes, everyones in zip(SIZES, rows, strict=True):
        for rank, found in enumerate(everyones):
            assert len(found) == 4
            assert {name: names for name, names in found.items() if names} == {}, (sizes, rank)


if __name__ == "__main__":
    main()
