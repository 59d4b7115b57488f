"""Clones by kernels that write and read other ranks' memory over NVLink.

Weights are pushed into the slots of other ranks, behind which all ranks meet; gradients of clones
lie with the slots until all ranks have met, and the experts' ranks read them.

There is one memory for the slots of each kind of weights, and one for their gradients. Nothing may
be written before everybody has read what was there. Let a rank's kernels run one after another.
Then whoever has passed a barrier comes after all that any rank has read before it, so one barrier
between a read and the next write of the same memory is enough, of whichever exchange.

Counts have barriers that all ranks always come to. Weights and gradients have those of their
clones: every rank knows on the device whether there are any, and where there are none, nothing is
read or written, and nobody waits. So a barrier of clones settles what was read under these same
clones, and makes free what is to be written under them; what others have read stays to be settled.
Mostly both are there already:

- Slots: both kinds go out together, in forward and in backward, with a barrier behind. Backward
  exchanges gradients between the reads and the next layer's weights, forward counts. Where nothing
  is in between, `send` has a barrier in front.
- Gradients: down, up, down, up …, and a barrier between writes and reads of each. Where the same
  kind comes twice, `grads` has a barrier.
- Counts: every buffer exists twice (see `app.moe.dispatch.peer`).

A captured graph has the barriers that were due at its capture, and replays may follow each other in
another order. Then something else has to be between its first use of a kind and the last one before
it: for slots that is `gather_counts` in forward, and in backward the exchange of tokens' gradients,
in which every rank waits for all others; for gradients, that each graph of a layer's backward has
both kinds, always in the same order.

Shapes: R ranks · L experts of each, E = R·L of all · s slots of a rank, S = R·s of all · I × O a
matrix.
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
    clones: ReferenceType[Clones] | None  # under which it is read; None: under several
    met: ReferenceType[Clones] | None = None  # those of the latest barrier since


class PeerClones:
    """Clones' weights and gradients between GPUs of one host that reach each other's memory.

    Has memory for s matrices of both kinds, in the weights' type and once more in fp32, and 2·8·R·E
    bytes. Creating it is collective. All ranks of the group call the same methods in the same
    order, from one stream or from streams that wait for each other; nothing waits for the device.
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
        self._unread: set[int] = set()  # kinds that lie in slots and have not been given out
        self._sent: ReferenceType[Clones] | None = None  # whose they are
        self._read: list[Read] = []  # at most one of each memory

    def gather_counts(self, counts_CE: Tensor) -> Tensor:
        """Tokens of this rank for each expert, by blocks, [C, E] -> of all ranks, int64 [R, E].

        The result lies in memory that the next call but one writes to: use it at once.
        """
        buffer = next(self._counts)
        assert counts_CE.shape[1:] == buffer.own.shape[1:]
        all_gather_counts(counts_CE, buffer.addresses_P, self._arrivals)
        self._read.clear()
        return buffer.own

    def send(self, kind: int, weights: Sequence[Tensor], clones: Clones) -> Tensor:
        """Weights of both kinds of this rank's experts, [L, I, O] -> [s, I, O], those of this kind
        in this rank's slots. Both go out when the first is asked for.

        Undefined where a slot is empty, and everywhere from the next call for this kind on.
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
        """[s, I, O] fp32, where this rank writes the gradients of its slots for `return_grads`; what
        lies there is undefined. To be called for every time that it is written.
        """
        grads = self._grads[kind]
        self._make_free(grads, clones)
        return grads.own

    def return_grads(self, kind: int, total_LIO: Tensor, clones: Clones) -> None:
        """total[l] += the gradients of all ranks' slots with this rank's expert l, in order of
        slots: in fp32, rounded once to the type of the total.
        """
        grads = self._grads[kind]
        assert total_LIO.shape[1:] == grads.own.shape[1:]
        # This also settles reads of the other kind's weights, whose product may still be to come:
        # its gradients come home behind that product, and meet again.
        self._meet(clones)
        add_clones(total_LIO, clones.expert_S, clones.moved_S, grads.addresses_P, first=self.first)
        self._note_read(grads, clones)

    def _note_read(self, buffer: Buffer, clones: Clones) -> None:
        """It is read from here on."""
        others = [read for read in self._read if read.buffer is not buffer]
        # what is still read under other clones is not settled by a barrier of these
        alone = len(others) == len(self._read)
        self._read = [*others, Read(buffer, ref(clones) if alone else None)]

    def _make_free(self, buffer: Buffer, clones: Clones) -> None:
        """Behind this, nobody reads what was there before, if anything is cloned."""
        if any(read.buffer is buffer and read.met != ref(clones) for read in self._read):
            self._meet(clones)

    def _meet(self, clones: Clones) -> None:
        """What ranks have written before it can be read behind it, if anything is cloned."""
        meet_if(clones.moved_S, self._arrivals)
        self._read = [read for read in self._read if read.clones != ref(clones)]
        for read in self._read:
            read.met = ref(clones)
