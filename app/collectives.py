"""Collectives over a process group.

A group of one rank takes the same calls and sends nothing.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from app.torch_versions import (
    all_gather_single,
    all_gather_together,
    reduce_scatter_single,
    reduce_scatter_together,
)


def all_gather(
    output: Tensor, shard: Tensor, group: dist.ProcessGroup, wait: bool = True
) -> dist.Work | None:
    """Gather the equal `shard`s of `group`'s ranks into `output`, in rank order; both contiguous.

    With wait=False the collective runs in the background; wait on the returned work before use.
    """
    if group.size() > 1:
        work: dist.Work | None = all_gather_single(
            output.view(-1), shard.view(-1), group=group, async_op=not wait
        )
        return work
    if output.data_ptr() != shard.data_ptr():
        output.copy_(shard.view_as(output))
    return None


def reduce_scatter(
    shard: Tensor, buffer: Tensor, group: dist.ProcessGroup, wait: bool = True
) -> dist.Work | None:
    """Sum `buffer` over `group` and leave this rank's equal part in `shard`; both contiguous.

    `wait` as in `all_gather`.
    """
    if group.size() > 1:
        work: dist.Work | None = reduce_scatter_single(
            shard.view(-1), buffer.view(-1), group=group, async_op=not wait
        )
        return work
    if shard.data_ptr() != buffer.data_ptr():
        shard.copy_(buffer.view_as(shard))
    return None


def all_gather_each(output: Tensor, shard: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start to gather each entry of the first dimension on its own: output[n] gets shard[n] of all
    ranks of `group`, of which there are several, in rank order. Both are contiguous; wait on the
    returned work before use.
    """
    return all_gather_together(_entries(output), _entries(shard), group)


def reduce_scatter_each(shard: Tensor, buffer: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start to sum each entry of the first dimension over `group` on its own, and to leave this
    rank's equal part of buffer[n] in shard[n]. Otherwise as `all_gather_each`.
    """
    return reduce_scatter_together(_entries(shard), _entries(buffer), group)


def _entries(tensor: Tensor) -> list[Tensor]:
    return list(tensor.view(len(tensor), -1).unbind())


def all_reduce(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Sum `tensor` in place over all ranks of `group`."""
    if group.size() > 1:
        dist.all_reduce(tensor, group=group)


def all_to_all(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send parts[p] to rank p of `group`, one entry of the first dimension per rank.

    Return what arrived, in rank order.
    """
    arrived = torch.empty_like(parts)
    dist.all_to_all_single(arrived, parts, group=group)
    return arrived
