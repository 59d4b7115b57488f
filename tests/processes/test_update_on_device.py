"""An update on a GPU tells the host nothing: it could not be captured, and would be waited for."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from app.config import OptimConfig
from app.kernels.adamw import update_rates
from app.optim import adam
from app.optim.adam import AdamShard
from app.optim.buffers import FlatBuffer, ParamSpec
from app.plan.sharding.reshard import Block
from app.plan.shards import buffer_layout
from tests.distributed import run_distributed

SIZES = (8, 3)


class HostReads(TorchDispatchMode):
    """Which operations have handed numbers of a tensor to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def updates(rank: int) -> tuple[list[float], list[str]]:
    """One update that counts and one that is skipped, with the kernel of a GPU left out: numbers of
    updates, and what the host has read.
    """
    params = [nn.Parameter(torch.zeros(size)) for size in SIZES]
    specs = [
        ParamSpec(f"p{nth}", param, False, decay=False, block=Block.whole(*param.shape))
        for nth, param in enumerate(params)
    ]
    layout = buffer_layout(list(SIZES), dist.get_world_size())
    shard = AdamShard(FlatBuffer(specs, layout, torch.float32), 0, dist.group.WORLD)
    rates_2, divisor = update_rates(0.1, 0.0, torch.device("cpu")), torch.ones(())
    usable, kernel = patch.object(adam, "usable", return_value=True), "adamw_update"
    with usable, patch.object(adam, kernel) as launched, HostReads() as reads:
        for skip in (torch.zeros(()), torch.ones(())):
            shard.update(OptimConfig(), rates_2, divisor, skip)
    assert launched.call_count == 2
    return [owned.step.item() for owned in shard.param_shards], reads.found


def test_counting_updates_reads_nothing_on_the_host():
    ((counts, reads),) = run_distributed(updates, 1)
    assert counts == [1.0] * len(SIZES)
    assert reads == []
