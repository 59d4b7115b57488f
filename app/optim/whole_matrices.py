"""Whole matrices of parameters that are sharded element by element, brought to one rank each and
back, for optimizers that update matrices.

State stays sharded as AdamW's (`app.plan.shards`): reduce-scatter, all-gather and checkpoints are
the same, every rank has equally many elements, and no shard needs padding to end between matrices.
An all-to-all over data-parallel ranks gives each piece (`app.plan.sharding.matrices`) to one owner,
another one over tensor-parallel ranks puts together matrices that these divide, and results take
the same way back. With n data-parallel ranks this sends 1/n as many elements as the reduce-scatter
and all-gather do, and owners are balanced over all pieces of a rank, whatever bucket they are in.

Shapes: C matrices of M × N in a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from app.kernels.momentum import MovedSlice
from app.optim.buffers import ParamSpec
from app.optim.shard import Shard
from app.plan.model.weight import Weight
from app.plan.sharding.matrices import LARGEST, Piece, PlacedPiece, Stack, placed
from app.plan.shards import Bounds, BufferLayout, Range


@dataclass(frozen=True, slots=True)
class Peers:
    """Some ranks of a group, this one included; the others send and get nothing."""

    group: dist.ProcessGroup
    ranks: tuple[int, ...]  # within the group

    @classmethod
    def whole(cls, group: dist.ProcessGroup) -> Peers:
        """Return all ranks of a group."""
        return cls(group, tuple(range(group.size())))

    def alone(self) -> Peers:
        """Return this rank only."""
        return Peers(self.group, (self.group.rank(),))

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def rank(self) -> int:
        """Index of this rank."""
        return self.ranks.index(self.group.rank())

    def all_to_all(self, parts: Tensor, sent: Sequence[int], arriving: Sequence[int]) -> Tensor:
        """Send consecutive parts of these numbers of elements to the ranks; return what arrives,
        in rank order. One rank gets its own `parts`.
        """
        if self.size == 1:
            return parts
        arrived = parts.new_empty(sum(arriving))
        dist.all_to_all_single(
            arrived, parts, self._splits(arriving), self._splits(sent), group=self.group
        )
        return arrived

    def _splits(self, sizes: Sequence[int]) -> list[int]:
        of_rank = dict(zip(self.ranks, sizes, strict=True))
        return [of_rank.get(rank, 0) for rank in range(self.group.size())]


class _Matrices(NamedTuple):
    """Matrices of one stack of a piece, and their places."""

    stack: Stack
    first: int  # index in the batch
    starts: tuple[int, ...]  # of the stack in what each tensor-parallel rank has sent


@dataclass(slots=True)
class _Batch:
    """Matrices of equal shape that are updated at once."""

    rows: int
    columns: int
    count: int = 0
    parts: list[_Matrices] = field(default_factory=list)


class WholeMatrices:
    """The matrices of all parameters in some shards, which share their data-parallel ranks.

    `inner` are the tensor-parallel ranks whose parts are put together. `cost` is the time of a
    stack of matrices in any unit, `scale` the factor on updates of a matrix by rows and columns.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        inner: Peers,
        *,
        cost: Callable[[Stack], float],
        scale: Callable[[int, int], float],
    ) -> None:
        self.inner = inner
        self.outer = Peers.whole(shards[0].group)
        self._known: dict[tuple[BufferLayout, int], list[list[Range]]] = {}
        self._scale = scale
        self._params = [
            (shard, index)
            for shard in shards
            for index, bucket in enumerate(shard.buffer.layout.bucket_of)
            if bucket == shard.bucket
        ]
        ranks = self.outer.size
        specs = [shard.buffer.specs[index] for shard, index in self._params]
        found, _ = placed(map(_described, specs), ranks * inner.size, cost)
        # one after the other: what goes to the same data-parallel, then tensor-parallel rank
        found.sort(key=lambda each: (each.owner % ranks, each.owner // ranks))
        self._place_own(found, shards)
        held = [each for each in found if each.owner % ranks == self.outer.rank]
        self._place_held(held)
        mine = [each for each in held if each.owner // ranks == inner.rank]
        self._mine = [sum(each.piece.numel for each in mine)] * inner.size
        self._batches = list(self._batched(mine))

    @property
    def numel(self) -> int:
        """Elements of this rank's parts of the matrices."""
        return sum(self._own)

    def update(self, own: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        """Apply `change` to batches of whole matrices, C × M × N whose rows are contiguous, and
        return this rank's parts of the results in the places of `own` (`slices`). `change` may
        overwrite its argument, and so does this function.
        """
        # 1. To the owners.
        held = self.outer.all_to_all(own, self._own, self._arriving)
        sent = held
        if self._copies:
            sent = torch.empty_like(held)
            here, there = self._copied(held, sent)
            torch._foreach_copy_(there, here)
        parts = self.inner.all_to_all(sent, self._sent, self._mine)
        # 2. Update, batch by batch.
        for batch in self._batches:
            matrices_CMN = change(self._whole(parts, batch))
            for inside, outside in self._views(matrices_CMN, parts, batch, whole=True):
                outside.copy_(inside)
        # 3. And back.
        sent = self.inner.all_to_all(parts, self._mine, self._sent)
        if self._copies:
            here, there = self._copied(held, sent)
            torch._foreach_copy_(here, there)
        else:
            held = sent
        return self.outer.all_to_all(held, self._arriving, self._own)

    def _place_own(self, found: Sequence[PlacedPiece], shards: Sequence[Shard]) -> None:
        """Lay out this rank's parts of all pieces by their owners."""
        self.slices: dict[Shard, list[MovedSlice]] = {shard: [] for shard in shards}
        self._own = [0] * self.outer.size  # elements for each data-parallel rank
        at = 0
        for each in found:
            shard, index = self._params[each.weight]
            for mine in self._ranges(shard, index, self.outer.rank):
                for start, stop, scale in self._runs(each.piece):
                    low, high = max(start, mine.param[0]), min(stop, mine.param[1])
                    if low < high:
                        local = mine.local[0] - mine.param[0]
                        self.slices[shard].append(MovedSlice(low + local, high + local, at, scale))
                        at += high - low
                        self._own[each.owner % self.outer.size] += high - low

    def _place_held(self, held: Sequence[PlacedPiece]) -> None:
        """Lay out the pieces of which this data-parallel rank is owner, by tensor-parallel owner,
        and find their parts in what arrives.
        """
        self._arriving = [0] * self.outer.size
        self._sent = [0] * self.inner.size
        self._copies: list[tuple[Bounds, Bounds]] = []  # in what arrives, in what is sent on
        starts, end = list[int](), 0
        for each in held:
            starts.append(end)
            end += each.piece.numel
            self._sent[each.owner // self.outer.size] += each.piece.numel
        at = 0
        for source in range(self.outer.size):
            for each, start in zip(held, starts, strict=True):
                first, last = each.piece.bounds
                for part in self._ranges(*self._params[each.weight], source):
                    low, high = max(first, part.param[0]), min(last, part.param[1])
                    if low < high:
                        there = start + low - first
                        self._copy((at, at + high - low), (there, there + high - low))
                        at += high - low
                        self._arriving[source] += high - low
        if self._copies == [((0, at), (0, at))]:
            self._copies = []

    def _copy(self, here: Bounds, there: Bounds) -> None:
        """Append a copy, merged with the one before if both continue."""
        if self._copies and (self._copies[-1][0][1], self._copies[-1][1][1]) == (here[0], there[0]):
            (first, _), (first_there, _) = self._copies.pop()
            here, there = (first, here[1]), (first_there, there[1])
        self._copies.append((here, there))

    def _copied(self, held: Tensor, sent: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        return (
            [held[slice(*here)] for here, _ in self._copies],
            [sent[slice(*there)] for _, there in self._copies],
        )

    def _batched(self, mine: Sequence[PlacedPiece]) -> Iterator[_Batch]:
        """Yield batches of at most LARGEST elements, or of one stack."""
        open_batches: dict[tuple[int, int], _Batch] = {}
        at = 0
        for each in mine:
            for stack in each.piece.stacks:
                rows, columns = shape = stack.shape(self.inner.size)
                batch = open_batches.get(shape)
                if batch and (batch.count + stack.count) * rows * columns > LARGEST:
                    yield open_batches.pop(shape)
                    batch = None
                if batch is None:
                    batch = open_batches[shape] = _Batch(rows, columns)
                starts = (
                    at + stack.offset + rank * self._mine[0] for rank in range(self.inner.size)
                )
                batch.parts.append(_Matrices(stack, batch.count, tuple(starts)))
                batch.count += stack.count
            at += each.piece.numel
        yield from open_batches.values()

    def _whole(self, parts: Tensor, batch: _Batch) -> Tensor:
        """Return the matrices of a batch: a view if they are one stack of this rank that lies like
        a batch, else copies.
        """
        (stack, _, starts), *others = batch.parts
        experts, halves, groups, rows, _ = stack.sizes
        by_expert, by_half, by_group, by_row, by_column = stack.strides
        if (
            not others
            and self.inner.size == 1
            and by_column == 1
            and (experts == 1 or by_expert == halves * by_half)
            and (groups == 1 or by_group == rows * by_row)
        ):
            shape = batch.count, batch.rows, batch.columns
            return parts[starts[0] :].as_strided(shape, (by_half, by_row, 1))
        matrices_CMN = parts.new_empty(batch.count, batch.rows, batch.columns)
        for inside, outside in self._views(matrices_CMN, parts, batch, whole=False):
            inside.copy_(outside)
        return matrices_CMN

    def _views(
        self, matrices_CMN: Tensor, parts: Tensor, batch: _Batch, *, whole: bool
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the part of each tensor-parallel rank in a batch, and the same part in `parts`.

        Of matrices that are not divided every rank has sent a copy: only this rank's own is
        yielded unless `whole`.
        """
        for stack, first, starts in batch.parts:
            _, _, groups, rows, columns = stack.sizes
            matrices = matrices_CMN[first : first + stack.count]
            for rank, start in enumerate(starts):
                inside = matrices
                if stack.divided == 0:
                    inside = matrices[:, rank * groups * rows : (rank + 1) * groups * rows]
                elif stack.divided == 1:
                    inside = matrices[..., rank * columns : (rank + 1) * columns]
                elif rank != self.inner.rank and not whole:
                    continue
                inside = inside.unflatten(1, (groups, rows)).unflatten(0, stack.sizes[:2])
                yield inside, parts[start:].as_strided(stack.sizes, stack.strides)

    def _ranges(self, shard: Shard, index: int, rank: int) -> list[Range]:
        """Return what a data-parallel rank owns of a parameter: at most one range."""
        layout = shard.buffer.layout
        if (layout, rank) not in self._known:
            self._known[layout, rank] = layout.ranges(rank)
        return self._known[layout, rank][index]

    def _runs(self, piece: Piece) -> Iterator[tuple[int, int, float]]:
        """Yield consecutive ranges of a parameter, flattened, and the factor on their updates."""
        scales = [self._scale(*stack.shape(self.inner.size)) for stack in piece.stacks]
        start, end = piece.bounds
        if len(set(scales)) == 1:
            yield start, end, scales[0]
            return
        for _ in range(piece.stacks[0].sizes[2]):  # groups of rows of fused matrices
            for stack, scale in zip(piece.stacks, scales, strict=True):
                size = stack.sizes[3] * stack.sizes[4]
                yield start, start + size, scale
                start += size


def _described(spec: ParamSpec) -> tuple[Weight, tuple[int, ...]]:
    assert spec.weight is not None, f"{spec.name} has no record"
    return spec.weight, spec.block.sizes
