"""Process groups of one rank whose other ranks do not exist: their messages are made up here.

Nothing is sent. What arrives has the shape, dtype and about the scale of the real message, so that
this rank allocates and computes what it would among the others; the values mean nothing:

- gathers: every rank sends what this rank sends, unless `FakedGroup.gathered` makes it up; gathers
  in place keep what is there, as of parameters that other ranks have not updated;
- sums of integers and of numbers over ranks: every rank has this rank's; sums of large tensors in
  reduce-scatters: those of independent values, √P times as large for P ranks;
- all-to-all: this rank's own rows, repeated in order;
- receives: normally distributed with a standard deviation of 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

FAKED = "graphfold_faked"  # backend's name in torch.distributed

# fills what a gather receives (P parts, in rank order) from this rank's part
Fill = Callable[[Tensor, Tensor], None]


class Done(dist.Work):
    """Work that is complete from the start."""

    def wait(self, timeout: Any = None) -> bool:
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """Return True."""
        return True


@dataclass(frozen=True, slots=True)
class Message:
    """A collective that this rank has called, or a send or receive."""

    kind: str
    ranks: int  # of the group
    bytes: int  # of this rank's tensors that leave it or are summed; received ones of a receive


class FakedGroup(dist.ProcessGroup):
    """Process group in which this rank is alone; other ranks' messages are made up.

    torch 2.13 renamed some of the methods, which here have both names.
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # torch's types lack it
        self.messages: list[Message] | None = None  # where calls are noted; None: nowhere
        self.standing_in: Callable[[], AbstractContextManager[None]] = nullcontext
        self._fill: Fill = repeat

    @contextmanager
    def gathered(self, fill: Fill) -> Iterator[None]:
        """Let `fill` make up what gathers within the block receive."""
        self._fill = fill
        try:
            yield
        finally:
            self._fill = repeat

    def getBackendName(self) -> str:
        """Return the backend's name."""
        return FAKED

    def _note(self, kind: str, tensor: Tensor) -> AbstractContextManager[None]:
        if self.messages is not None:
            self.messages.append(Message(kind, self.size(), tensor.nbytes))
        return self.standing_in()

    def _allgather_base(self, output: Tensor, shard: Tensor, opts: Any = None) -> dist.Work:
        with self._note("all-gather", shard), torch.no_grad():
            if not _same_memory(output, shard):
                self._fill(output.view(self.size(), *shard.shape), shard)
        return Done()

    all_gather_single = _allgather_base  # type: ignore[assignment]

    def allgather_into_tensor_coalesced(
        self, outputs: Sequence[Tensor], shards: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        """Gather each shard into its output."""
        for output, shard in zip(outputs, shards, strict=True):
            self._allgather_base(output, shard)
        return Done()

    all_gather_single_coalesced = allgather_into_tensor_coalesced  # type: ignore[assignment]

    def allgather(  # type: ignore[override]
        self, outputs: Sequence[Sequence[Tensor]], shards: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        """Gather a list of tensors: objects of other ranks equal this rank's."""
        with self._note("all-gather", shards[0]), torch.no_grad():
            for output in outputs[0]:
                output.copy_(shards[0])
        return Done()

    def _reduce_scatter_base(self, shard: Tensor, buffer: Tensor, opts: Any = None) -> dist.Work:
        with self._note("reduce-scatter", buffer), torch.no_grad():
            own = buffer.view(self.size(), *shard.shape)[self.rank()]
            if shard.is_floating_point():
                torch.mul(own, self.size() ** 0.5, out=shard)
            else:
                torch.mul(own, self.size(), out=shard)
        return Done()

    reduce_scatter_single = _reduce_scatter_base  # type: ignore[assignment]

    def reduce_scatter_tensor_coalesced(
        self, shards: Sequence[Tensor], buffers: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        """Leave this rank's part of each buffer in its shard."""
        for shard, buffer in zip(shards, buffers, strict=True):
            self._reduce_scatter_base(shard, buffer)
        return Done()

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced  # type: ignore[assignment]

    def allreduce(  # type: ignore[override]
        self, tensors: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        """Reduce over ranks that all have this rank's numbers."""
        sums = opts is None or opts.reduceOp == dist.ReduceOp.SUM
        for tensor in tensors:
            with self._note("all-reduce", tensor), torch.no_grad():
                if sums:
                    tensor.mul_(self.size())
        return Done()

    def alltoall_base(
        self,
        output: Tensor,
        rows: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> dist.Work:
        """Receive this rank's own rows, as often as the output has room for them."""
        with self._note("all-to-all", rows), torch.no_grad():
            if not len(rows):
                output.zero_()
                return Done()
            for start in range(0, len(output), len(rows)):
                part = output[start : start + len(rows)]
                part.copy_(rows[: len(part)])
        return Done()

    all_to_all_single = alltoall_base  # type: ignore[assignment]

    def broadcast(  # type: ignore[override]
        self, tensors: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        """Keep this rank's values."""
        with self._note("broadcast", tensors[0]):
            return Done()

    def send(self, tensors: Sequence[Tensor], rank: int, tag: int) -> dist.Work:
        """Drop the tensor."""
        with self._note("send", tensors[0]):
            return Done()

    def recv(self, tensors: Sequence[Tensor], rank: int, tag: int) -> dist.Work:
        """Draw hidden states, or their gradients."""
        with self._note("receive", tensors[0]), torch.no_grad():
            tensors[0].normal_()
        return Done()

    def barrier(self, opts: Any = None) -> dist.Work:
        """Return at once: nobody else is there."""
        return Done()


def repeat(parts: Tensor, shard: Tensor) -> None:
    """Fill all parts of a gather with this rank's own."""
    parts.copy_(shard.expand_as(parts))


def _same_memory(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _create(options: Any, _: Any) -> FakedGroup:
    return FakedGroup(options.group_rank, options.group_size)


@contextmanager
def faked_world(rank: int, world_size: int) -> Iterator[None]:
    """Have a default process group of so many ranks within the block, of which only `rank` exists.

    Groups created within are `FakedGroup`s. Raises RuntimeError within another world.
    """
    if dist.is_initialized():
        raise RuntimeError("this process already has a torch.distributed world")
    dist.Backend.register_backend(FAKED, _create, extended_api=True, devices=["cpu", "cuda"])
    store = dist.HashStore()
    dist.init_process_group(FAKED, rank=rank, world_size=world_size, store=store)
    try:
        yield
    finally:
        dist.destroy_process_group()
