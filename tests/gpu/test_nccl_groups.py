"""Groups over NCCL: they join the right ranks and cost no more memory than is planned.

torchrun --nproc-per-node 2 tests/gpu/test_nccl_groups.py    prints what each communicator takes,
MiB
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from app.engine.ranks.groups import Groups, create_groups, process_world
from app.plan.groups import GROUPS, GroupKind
from app.plan.layout import ParallelLayout
from app.plan.memory.overheads import COMMUNICATOR, MIB, NCCL_ITSELF

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
ROOT = Path(__file__).parents[2]
# one channel each
CONTROL = [name for name, group in GROUPS.items() if group.kind is GroupKind.control]
OTHERS = [
    name for name, group in GROUPS.items() if group.kind in (GroupKind.stages, GroupKind.data)
]
ELEMENTS = 1 << 24  # enough to use every channel


def main() -> None:
    """Rank 0 prints a line of JSON for data-parallel ranks and one for a pipeline."""
    rank = int(os.environ["RANK"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    torch.zeros(1, device=device)
    with process_world(rank, 2, device):
        for layout in (ParallelLayout(2), ParallelLayout(2, pp=2)):
            measured = measure(layout, rank)
            if rank == 0:
                print(json.dumps({"pp": layout.pp, **measured}), flush=True)


def measure(layout: ParallelLayout, rank: int) -> dict[str, Any]:
    """MiB that creating all groups takes, and that the first uses of each take besides."""
    since = outside()
    groups = create_groups(layout, rank)
    created = outside() - since
    used = {}
    for name in CONTROL + OTHERS:
        group = getattr(groups, name)
        if group.size() > 1:
            before = outside()
            use(group, name, groups)
            used[name] = round(outside() - before, 1)
    return {"created": round(created, 1), "used": used}


def use(group: dist.ProcessGroup, name: str, groups: Groups) -> None:
    """Sum over a group, and for a pipeline send to the other rank; the results must be right."""
    device, rank = torch.device("cuda", groups.rank), groups.rank
    total = torch.full((6 if name in CONTROL else ELEMENTS,), float(rank + 1), device=device)
    dist.all_reduce(total, group=group)
    assert total.eq(3).all(), name
    if name == "pp":
        come = torch.empty(ELEMENTS, device=device)
        other = 1 - rank
        # Over one communicator what is not batched runs in its order: the two sides must agree.
        for sends in (rank == 0, rank == 1):
            work = (
                dist.isend(total * (rank + 1), other, group)
                if sends
                else dist.irecv(come, other, group)
            )
            work.wait()
        assert come.eq(3 * (other + 1)).all()


def outside() -> float:
    """MiB of this GPU that are in use, but not by torch's allocator."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return (total - free - torch.cuda.memory_reserved()) / MIB


def test_groups_over_nccl():
    line = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", __file__]
    paths = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run(
        line, capture_output=True, text=True, timeout=300, env={**os.environ, "PYTHONPATH": paths}
    )
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    rows = [json.loads(row) for row in done.stdout.splitlines() if row.startswith("{")]
    assert [row["pp"] for row in rows] == [1, 2]
    for row in rows:
        control = [name for name in row["used"] if name in CONTROL]
        planned = (NCCL_ITSELF + sum(COMMUNICATOR[GROUPS[name].kind] for name in row["used"])) / MIB
        assert row["created"] + sum(row["used"].values()) < 1.1 * planned
        later = control if row["pp"] > 1 else control[1:]  # the first sum of all loads kernels
        small = sum(row["used"][name] for name in later)
        assert small < 2 * len(later) * COMMUNICATOR[GroupKind.control] / MIB
        if row["pp"] > 1:
            assert row["used"]["pp"] < 1.3 * COMMUNICATOR[GroupKind.stages] / MIB


if __name__ == "__main__":
    main()
