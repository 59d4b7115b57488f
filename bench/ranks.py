"""Programs that torchrun starts, a process to each GPU: how they begin, and what rank 0 writes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from app.engine.ranks.groups import process_world

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


@contextmanager
def a_gpu_each() -> Iterator[tuple[dist.ProcessGroup, torch.device]]:
    """All ranks as a group, and this one's GPU with a stream and random numbers of its own."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    with process_world(rank, ranks, device):
        group = dist.new_group()
        torch.cuda.set_stream(torch.cuda.Stream())
        torch.manual_seed(rank)
        yield group, device


def save(rows: Sequence[DataclassInstance], path: Path | None, group: dist.ProcessGroup) -> None:
    """Rows as JSON, by rank 0, where a path was given."""
    if group.rank() == 0 and path is not None:
        path.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
