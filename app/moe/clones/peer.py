"""Clone transport by kernels that write and read other ranks' memory over NVLink.

Weights are pushed into the slots of other ranks, followed by a barrier. Gradients of clones stay
with the slots until a barrier, and the owner ranks read them.

Each kind of matrix has one memory for its slots and one for their gradients. Nothing may be written
before all ranks have read the previous contents. Kernels of a rank run in order, so a rank that has
passed a barrier comes after every read that any rank issued before it: one barrier between a read
and the next write of the same memory suffices, whatever the barrier belongs to.

Barriers of counts are unconditional. Barriers of weights and gradients belong to their clones:
every rank knows on the device whether there are any; if not, nothing is read or written, and nobody
waits. Such a barrier therefore orders only reads and writes under the same clones; reads under
other clones still need one of their own. Mostly it exists already:

- Slots: both kinds are sent together, in forward and in backward, followed by a barrier. Between
  these reads and the next layer's weights, backward exchanges gradients and forward counts. If
  nothing lies in between, `send` starts with a barrier.
- Gradients: the order is down, up, down, up, …, with a barrier between writes and reads of each. If
  the same kind follows itself, `grads` adds a barrier.
- Counts: every buffer exists twice (see `app.moe.dispatch.peer`).

A captured graph contains the barriers that were due at capture, and replays may follow each other
in another order. Then something else must lie between its first use of a kind and the last one
before it: for slots `gather_counts` in forward, and in backward the communication of tokens'
gradients, where every rank waits for all others; for gradients, that each graph of a layer's
backward has both kinds, always in the same order.

Shapes: R ranks (P in `app.moe.peer_memory`) · L experts of each, E = R·L of all · s slots of a
rank, S = R·s of all · C blocks of tokens · I × O a matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from weakref import ReferenceType, ref

import torch
import torch.distributed as dist
from torch import Tensor

from app.kernels.clones.meeting import Arrivals, meet_if
from app.kernels.clones.reroute import all_gather_counts
from app.kernels.clones.weights import Slots, add_clones, push_clones
from app.moe.clones.record import Clones
from app.moe.peer_memory import Buffer, Layout, PeerMemory


@dataclass(slots=True, eq=False)
class Read:
    """Memory that some rank may still be reading."""

    buffer: Buffer
    clones: ReferenceType[Clones] | None  # clones under which it is read; None if several
    met: ReferenceType[Clones] | None = None  # clones of the latest barrier since


class PeerClones:
    """Transport of clones between GPUs of one host with peer access.

    Allocates s matrices of both kinds, in the weights' dtype and in fp32, and 2·8·R·E bytes.
    Creating it is collective. All ranks of the group call the same methods in the same order, from
    one stream or from streams that wait for each other; nothing synchronizes with the device.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        local: int,
        spares: int,
        shapes: Sequence[torch.Size],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`shapes`: I × O of both kinds of weights."""
        ranks = group.size()
        self.first = group.rank() * local  # global index of this rank's first expert
        slots = [Layout((spares, *shape), dtype, parted=False) for shape in shapes]
        grads = [Layout((spares, *shape), torch.float32, parted=False) for shape in shapes]
        counts = [Layout((ranks, ranks * local), torch.int64, parted=True)] * 2
        arrivals = Layout((ranks,), torch.int64, parted=True)
        memory = PeerMemory(group, [*slots, *grads, *counts, arrivals], device)
        kinds, buffers = len(shapes), memory.buffers
        self._slots = buffers[:kinds]
        self._grads = buffers[kinds : 2 * kinds]
        self._counts = cycle(buffers[2 * kinds : -1])
        arrived = buffers[-1]
        passed_R = torch.zeros_like(arrived.own.zero_())
        self._arrivals = Arrivals(arrived.own, arrived.addresses_P, passed_R)
        memory.barrier()
        self._memory = memory  # lives as long as this
        self._unread: set[int] = set()  # kinds that are in the slots and have not been requested
        self._sent: ReferenceType[Clones] | None = None  # clones to which they belong
        self._read: list[Read] = []  # at most one per memory

    def gather_counts(self, counts_CE: Tensor) -> Tensor:
        """All-gather this rank's tokens per expert, given by blocks [C, E]: int64 [R, E].

        The result lies in memory that the next call but one overwrites: use it at once.
        """
        buffer = next(self._counts)
        assert counts_CE.shape[1:] == buffer.own.shape[1:]
        all_gather_counts(counts_CE, buffer.addresses_P, self._arrivals)
        self._read.clear()
        return buffer.own

    def send(self, kind: int, weights: Sequence[Tensor], clones: Clones) -> Tensor:
        """Send both kinds of this rank's expert matrices, [L, I, O] each, on the first request;
        return this rank's slots of this kind, [s, I, O].

        Undefined in empty slots, and everywhere from the next call for this kind on.
        """
        if self._sent != ref(clones) or kind not in self._unread:
            self._send(weights, clones)
        self._unread.discard(kind)
        return self._slots[kind].own

    def _send(self, weights: Sequence[Tensor], clones: Clones) -> None:
        up, down = (
            Slots(weight, slots.addresses_P)
            for weight, slots in zip(weights, self._slots, strict=True)
        )
        for weight, slots in zip(weights, self._slots, strict=True):
            assert weight.dtype == slots.own.dtype and weight.shape[1:] == slots.own.shape[1:]
            self._make_free(slots, clones)
        push_clones(up, down, clones.expert_S, clones.moved_S, first=self.first)
        self._meet(clones)
        for slots in self._slots:
            self._note_read(slots, clones)
        self._sent = ref(clones)
        self._unread = set(range(len(self._slots)))

    def grads(self, kind: int, clones: Clones) -> Tensor:
        """Return the buffer [s, I, O] fp32 for the gradients of this rank's slots, contents
        undefined. Call it before each write.
        """
        grads = self._grads[kind]
        self._make_free(grads, clones)
        return grads.own

    def return_grads(self, kind: int, total_LIO: Tensor, clones: Clones) -> None:
        """Add the gradients of all slots that hold experts of this rank to `total_LIO`, in order of
        slots: in fp32, rounded once to the dtype of the total.
        """
        grads = self._grads[kind]
        assert total_LIO.shape[1:] == grads.own.shape[1:]
        # This barrier also covers reads of the other kind's weights, although their GEMM may still
        # follow: its gradients are returned after that GEMM, behind another barrier.
        self._meet(clones)
        add_clones(total_LIO, clones.expert_S, clones.moved_S, grads.addresses_P, first=self.first)
        self._note_read(grads, clones)

    def _note_read(self, buffer: Buffer, clones: Clones) -> None:
        """Note that the memory may be read from here on."""
        others = [read for read in self._read if read.buffer is not buffer]
        # a barrier of these clones does not order reads under other clones
        alone = len(others) == len(self._read)
        self._read = [*others, Read(buffer, ref(clones) if alone else None)]

    def _make_free(self, buffer: Buffer, clones: Clones) -> None:
        """Wait until nobody reads the previous contents, if anything is cloned."""
        if any(read.buffer is buffer and read.met != ref(clones) for read in self._read):
            self._meet(clones)

    def _meet(self, clones: Clones) -> None:
        """Run a barrier if anything is cloned: writes before it are visible to all ranks after
        it.
        """
        meet_if(clones.moved_S, self._arrivals)
        self._read = [read for read in self._read if read.clones != ref(clones)]
        for read in self._read:
            read.met = ref(clones)
