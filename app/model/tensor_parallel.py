"""Matrices cut over tensor-parallel ranks, with the tokens between them cut along the sequence.

A block of two matrices costs one all-gather in front of the first and one reduce-scatter behind the
second, in either direction (Korthikanti et al. 2022). What is kept for backward is this rank's part
of the tokens: the whole is gathered once more for the gradient of the weights. With one rank,
nothing moves.

Shapes: B sequences, S tokens per sequence of a context-parallel rank, s = S / tp of them here, I
and O widths of a matrix (the cut one is this rank's part), D hidden, V rows of this rank of a
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from app.collectives import all_gather, reduce_scatter
from app.model.peers import rank, size
from app.model.weight_grads import GatheredGrad, LinearGrad, WeightGradSink, linear

Group = dist.ProcessGroup | None


def column_parallel_linear(
    x_BsI: Tensor, weight_OI: nn.Parameter, group: Group, sink: WeightGradSink | None
) -> Tensor:
    """x · weightᵀ for all ranks' tokens: B × s × I -> B × S × O; `weight_OI`: this rank's rows."""
    if size(group) == 1:
        return linear(x_BsI, weight_OI, sink)
    out_BSO: Tensor = _ColumnParallelLinear.apply(x_BsI, weight_OI, group, sink)
    return out_BSO


def row_parallel_linear(
    x_BSI: Tensor, weight_OI: nn.Parameter, group: Group, sink: WeightGradSink | None
) -> Tensor:
    """x · weightᵀ summed over the ranks, each of which keeps its tokens: B × S × I -> B × s × O.

    `weight_OI` holds this rank's columns.
    """
    return scatter_tokens(linear(x_BSI, weight_OI, sink), group)


def lookup(tokens_BS: Tensor, table_VD: Tensor, group: Group) -> Tensor:
    """Rows of a table that is cut along the vocabulary: B × S -> B × s × D.

    Every rank looks up the tokens that it has rows for and adds nothing for the others.
    `F.embedding`'s backward sorts or owns rows instead of using atomics, so it repeats bit for bit
    on CPU and GPU.
    """
    if size(group) == 1:
        return F.embedding(tokens_BS, table_VD)
    row_BS = tokens_BS - rank(group) * len(table_VD)
    elsewhere_BS = (row_BS < 0) | (row_BS >= len(table_VD))
    rows_BSD = F.embedding(row_BS.masked_fill(elsewhere_BS, 0), table_VD)
    rows_BSD = rows_BSD.masked_fill(elsewhere_BS[..., None], 0)
    return scatter_tokens(rows_BSD, group)


def scatter_tokens(x_BSD: Tensor, group: Group) -> Tensor:
    """The sum over the ranks, of which each keeps its tokens: B × S × D -> B × s × D."""
    return x_BSD if size(group) == 1 else _ScatterTokens.apply(x_BSD, group)


def gathered(x_BsD: Tensor, group: Group) -> Tensor:
    """The tokens of all ranks, without a gradient: B × s × D -> B × S × D."""
    return x_BsD if group is None or group.size() == 1 else _start_gather(x_BsD, group)()


def scattered(x_BSD: Tensor, group: Group) -> Tensor:
    """Sum over the ranks, each keeping its tokens, without a gradient: B × S × D -> B × s × D."""
    return x_BSD if group is None or group.size() == 1 else _start_scatter(x_BSD, group)()


Arrival = Callable[[], Tensor]  # waits for what is on its way, and returns it


def _start_gather(x_BsD: Tensor, group: dist.ProcessGroup) -> Arrival:
    own_BsD = x_BsD.contiguous()
    parts_PBsD = x_BsD.new_empty(group.size(), *x_BsD.shape)
    work = all_gather(parts_PBsD, own_BsD, group, wait=False)
    assert work is not None, "another rank has a part"

    def arrive() -> Tensor:
        work.wait()
        return parts_PBsD.transpose(0, 1).flatten(1, 2)

    return arrive


def _start_scatter(x_BSD: Tensor, group: dist.ProcessGroup) -> Arrival:
    parts_PBsD = x_BSD.unflatten(1, (group.size(), -1)).transpose(0, 1).contiguous()
    own_BsD = torch.empty_like(parts_PBsD[0])
    work = reduce_scatter(own_BsD, parts_PBsD, group, wait=False)
    assert work is not None, "another rank has a part"

    def arrive(sent: Tensor = parts_PBsD) -> Tensor:  # held until it has been read
        work.wait()
        return own_BsD

    return arrive


class _ScatterTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BSD: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return scattered(x_BSD, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BsD: Tensor) -> tuple[Tensor, None]:
        return gathered(grad_BsD, ctx.group), None


class _ColumnParallelLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_BsI: Tensor,
        weight_OI: nn.Parameter,
        group: dist.ProcessGroup,
        sink: WeightGradSink | None,
    ) -> Tensor:
        ctx.save_for_backward(x_BsI)
        ctx.weight_OI = weight_OI
        ctx.group = group
        ctx.sink = sink
        return F.linear(gathered(x_BsI, group), weight_OI)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BSO: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        (x_BsI,), weight_OI, group = ctx.saved_tensors, ctx.weight_OI, ctx.group
        if ctx.sink is not None and ctx.sink.deferred:
            ctx.sink.push(
                weight_OI, GatheredGrad(lambda: _product(grad_BSO, gathered(x_BsI, group)))
            )
            return scattered(grad_BSO @ weight_OI, group), None, None, None
        # the gather runs beside the first product, the scatter beside the second
        x_BSI = _start_gather(x_BsI, group)
        grad_BsI = _start_scatter(grad_BSO @ weight_OI, group)
        grad_OI = _product(grad_BSO, x_BSI())
        if ctx.sink is None:
            return grad_BsI(), grad_OI(), None, None
        ctx.sink.push(weight_OI, grad_OI)
        return grad_BsI(), None, None, None


def _product(grad_BSO: Tensor, x_BSI: Tensor) -> LinearGrad:
    return LinearGrad(grad_BSO.flatten(0, 1).T, x_BSI.flatten(0, 1))
