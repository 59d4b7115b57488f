"""Process groups over which a rank computes its layers, and their collectives of tokens.

Tensor parallelism (tp): between the matrices of a layer, tokens are sharded along the sequence
(sequence parallelism, Korthikanti et al. 2022). They are all-gathered before a matrix and
reduce-scattered after it.

Context parallelism (cp): a causal query late in a sequence attends to more keys than an early one.
A sequence is therefore split into 2P chunks, and rank r holds chunks r and 2P - 1 - r ("zigzag"),
so that all ranks have equal work. Attention needs the keys and values of the other ranks: either
every rank all-gathers them (Llama 3, arXiv 2407.21783), or an all-to-all gives each rank whole
sequences of its share of the heads, and another returns the result (Ulysses, arXiv 2309.14509).

With one rank, nothing is sent.

Shapes: P ranks of the group, B sequences, D width, F values per token. Over tp: S tokens per
sequence of a context-parallel rank, s = S / P of them here. Over cp: S tokens of a whole sequence,
s = S / P of them here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from app.choices import CpComm
from app.collectives import (
    all_gather,
    all_gather_each,
    all_to_all,
    reduce_scatter,
    reduce_scatter_each,
)
from app.plan.sharding.blocks import ShardCoords


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """Process groups that shard the tensors of a layer, by their names in `app.plan.groups`; None
    stands for a group of one rank.

    Between the matrices of a layer, tokens are sharded along the sequence, first by `cp` and each
    part by `tp` (sequence parallelism, Korthikanti et al. 2022). Inside the matrices a rank has all
    tokens of its context-parallel part, and the matrices are sharded by `tp`. Experts lie on a grid
    of their own over the same ranks: ep ranks hold different experts, and etp ranks hold one part
    each of the hidden width of the same experts.
    """

    tp: dist.ProcessGroup | None = None  # parts of matrices
    cp: dist.ProcessGroup | None = None  # parts of sequences
    cp_comm_type: CpComm = CpComm.all_gather  # collective over `cp` in attention
    tp_cp_control: dist.ProcessGroup | None = None  # all parts of the same sequences
    tp_cp_dp_control: dist.ProcessGroup | None = None  # all tokens of a step
    etp_ep: dist.ProcessGroup | None = None  # together they have all experts of a layer
    ep: int = 1  # ranks with different experts
    ep_rank: int = 0  # which share of the experts this rank has
    etp: int = 1  # ranks that share each expert
    etp_rank: int = 0  # which part of its experts' hidden width this rank has

    @property
    def coords(self) -> ShardCoords:
        """Return this rank's coordinates on the axes that shard weights."""
        return ShardCoords(
            (rank(self.tp), size(self.tp)), (self.ep_rank, self.ep), (self.etp_rank, self.etp)
        )


ALONE = LayerGroups()  # single-rank groups: nothing is sharded


def size(group: dist.ProcessGroup | None) -> int:
    """Return the number of ranks of a group; 1 for None."""
    return 1 if group is None else group.size()


def rank(group: dist.ProcessGroup | None) -> int:
    """Return this rank's index in a group; 0 for None."""
    return 0 if group is None else group.rank()


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
    sequences, tokens, width = own_BsD.shape
    x_BSD = own_BsD.new_empty(sequences, tokens * group.size(), width)
    work = all_gather_each(x_BSD, own_BsD, group)

    def arrive() -> Tensor:
        work.wait()
        return x_BSD

    return arrive


def start_scatter(x_BSD: Tensor, group: dist.ProcessGroup) -> Pending:
    """Start `scattered` over several ranks and return a function that waits for the result."""
    whole_BSD = x_BSD.contiguous()
    sequences, tokens, width = whole_BSD.shape
    own_BsD = whole_BSD.new_empty(sequences, tokens // group.size(), width)
    work = reduce_scatter_each(own_BsD, whole_BSD, group)

    def arrive(sent: Tensor = whole_BSD) -> Tensor:  # held until it has been read
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
