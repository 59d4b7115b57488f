"""Collectives of tokens between tensor-parallel ranks, before and after sharded matrices.

Between the matrices of a layer, tokens are sharded along the sequence (sequence parallelism,
Korthikanti et al. 2022): they are all-gathered before a matrix and reduce-scattered after it. With
one rank, nothing is sent.

Shapes: B sequences, S tokens per sequence of a context-parallel rank, s = S / tp of them here, D
width, P ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from app.collectives import all_gather, reduce_scatter
from app.model.layers.layer_groups import size

OptionalGroup = dist.ProcessGroup | None  # None stands for a single rank


def scatter_tokens(x_BSD: Tensor, group: OptionalGroup) -> Tensor:
    """Reduce-scatter along the sequence: B × S × D -> B × s × D."""
    return x_BSD if size(group) == 1 else _ScatterTokens.apply(x_BSD, group)


def gather_tokens(x_BsD: Tensor, group: OptionalGroup) -> Tensor:
    """All-gather along the sequence, B × s × D -> B × S × D; gradients are reduce-scattered, since
    each rank uses the tokens differently.
    """
    return x_BsD if size(group) == 1 else _GatherTokens.apply(x_BsD, group)


def gathered(x_BsD: Tensor, group: OptionalGroup) -> Tensor:
    """All-gather along the sequence, without a gradient: B × s × D -> B × S × D."""
    return x_BsD if group is None or group.size() == 1 else start_gather(x_BsD, group)()


def scattered(x_BSD: Tensor, group: OptionalGroup) -> Tensor:
    """Reduce-scatter along the sequence, without a gradient: B × S × D -> B × s × D."""
    return x_BSD if group is None or group.size() == 1 else start_scatter(x_BSD, group)()


Pending = Callable[[], Tensor]  # waits for the collective and returns its result


def start_gather(x_BsD: Tensor, group: dist.ProcessGroup) -> Pending:
    """Start `gathered` over several ranks and return a function that waits for the result."""
    own_BsD = x_BsD.contiguous()
    parts_PBsD = x_BsD.new_empty(group.size(), *x_BsD.shape)
    work = all_gather(parts_PBsD, own_BsD, group, wait=False)
    assert work is not None, "the group has several ranks"

    def arrive() -> Tensor:
        work.wait()
        return parts_PBsD.transpose(0, 1).flatten(1, 2)

    return arrive


def start_scatter(x_BSD: Tensor, group: dist.ProcessGroup) -> Pending:
    """Start `scattered` over several ranks and return a function that waits for the result."""
    parts_PBsD = x_BSD.unflatten(1, (group.size(), -1)).transpose(0, 1).contiguous()
    own_BsD = torch.empty_like(parts_PBsD[0])
    work = reduce_scatter(own_BsD, parts_PBsD, group, wait=False)
    assert work is not None, "the group has several ranks"

    def arrive(sent: Tensor = parts_PBsD) -> Tensor:  # held until it has been read
        work.wait()
        return own_BsD

    return arrive


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BsD: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return gathered(x_BsD, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BSD: Tensor) -> tuple[Tensor, None]:
        return scattered(grad_BSD, ctx.group), None


class _ScatterTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BSD: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return scattered(x_BSD, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BsD: Tensor) -> tuple[Tensor, None]:
        return gathered(grad_BsD, ctx.group), None
