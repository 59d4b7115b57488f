"""Context parallelism: sharding of sequences, and the collectives attention needs.

A causal query late in a sequence attends to more keys than an early one. A sequence is therefore
split into 2P chunks, and rank r holds chunks r and 2P - 1 - r ("zigzag"), so that all ranks have
equal work. Attention needs the keys and values of the other ranks: either every rank all-gathers
them (Llama 3, arXiv 2407.21783), or an all-to-all gives each rank whole sequences of its share of
the heads, and another returns the result (Ulysses, arXiv 2309.14509).

Shapes: P ranks, B sequences, S tokens per sequence, s = S / P of them here, C = S / 2P tokens of a
chunk, F values per token.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from app.collectives import all_gather, all_to_all, reduce_scatter


def own_tokens(seq_len: int, ranks: int, rank: int, device: torch.device | None = None) -> Tensor:
    """Return positions of a rank's tokens in the sequence, int64 [seq_len / ranks].

    2 · ranks must divide seq_len.
    """
    places = torch.arange(seq_len, device=device)
    if ranks == 1:
        return places
    chunks = places.chunk(2 * ranks)
    return torch.cat((chunks[rank], chunks[-1 - rank]))


def in_sequence(parts_PBsF: Tensor) -> Tensor:
    """Reorder the shards of all ranks into sequence order: P × B × s × F -> B × S × F."""
    early, late = parts_PBsF.unflatten(2, (2, -1)).unbind(2)
    return torch.cat((*early.unbind(0), *reversed(late.unbind(0))), dim=1)


def in_parts(whole_BSF: Tensor, ranks: int) -> Tensor:
    """Split a sequence into the shards of the ranks: B × S × F -> P × B × s × F."""
    chunks = whole_BSF.chunk(2 * ranks, dim=1)
    return torch.stack(
        [torch.cat((chunks[rank], chunks[-1 - rank]), dim=1) for rank in range(ranks)]
    )


def gather_sequence(x_BsF: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-gather the tokens in sequence order: B × s × F -> B × S × F; gradients are
    reduce-scattered.
    """
    whole_BSF: Tensor = _GatherSequence.apply(x_BsF, group)
    return whole_BSF


def ulysses_to_heads(x_BsPF: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange own tokens of all heads for all tokens of own heads: B × s × P × F -> B × S × F."""
    return in_sequence(_AllToAll.apply(x_BsPF.movedim(2, 0), group))


def ulysses_to_tokens(x_BSF: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Invert `ulysses_to_heads`: B × S × F -> B × s × P × F."""
    parts_PBsF: Tensor = _AllToAll.apply(in_parts(x_BSF, group.size()), group)
    return parts_PBsF.movedim(0, 2)


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BsF: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts_PBsF = x_BsF.new_empty(group.size(), *x_BsF.shape)
        all_gather(parts_PBsF, x_BsF.contiguous(), group)
        return in_sequence(parts_PBsF)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BSF: Tensor) -> tuple[Tensor, None]:
        parts_PBsF = in_parts(grad_BSF, ctx.group.size())
        own_BsF = torch.empty_like(parts_PBsF[0])
        reduce_scatter(own_BsF, parts_PBsF, ctx.group)
        return own_BsF, None


class _AllToAll(torch.autograd.Function):
    """All-to-all over the first dimension: part p goes to rank p."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return all_to_all(parts.contiguous(), group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_to_all(grad.contiguous(), ctx.group), None
