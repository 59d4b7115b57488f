"""Clones by kernels that write and read other ranks' memory over NVLink.

Weights are pushed into the slots of other ranks, behind which all ranks meet; gradients of clones
lie with the slots until all ranks have met, and the experts' ranks read them.

There is one memory for the slots of each kind of weights, and one for their gradients. Nothing may
be written before everybody has read what was there. Let a rank's kernels run one after another.
Then whoever has passed a barrier comes after all that any rank has read before it, so one barrier
between a read and the next write of the same memory is enough, of whichever exchange. Mostly one is
there already, because the kinds take turns:

- Slots: forward sends up, down, up, down …, and backward down, up, down, up …; a barrier follows
  each. Where the same kind comes twice, with nothing in between, `send` has a barrier in front.
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
from itertools import cycle

import torch
import torch.distributed as dist
from torch import Tensor

from app.kernels.clones.weights import add_clones, push_clones
from app.kernels.peer_rows import push_values
from app.moe.clones.record import Clones
from app.moe.peer_memory import Buffer, Layout, PeerMemory


class PeerClones:
    """Clones' weights and gradients between GPUs of one host that reach each other's memory.

    Has memory for s matrices of each kind, in the weights' type and once more in fp32, and 2·8·R·E
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
        """`shapes`: I × O of each kind of weights."""
        ranks = group.size()
        self.first = group.rank() * local  # global index of this rank's first expert
        slots = [Layout((spares, *shape), dtype, parted=False) for shape in shapes]
        grads = [Layout((spares, *shape), torch.float32, parted=False) for shape in shapes]
        counts = [Layout((ranks, ranks * local), torch.int64, parted=True)] * 2
        self._memory = PeerMemory(group, [*slots, *grads, *counts], device)
        kinds, buffers = len(shapes), self._memory.buffers
        self._slots = buffers[:kinds]
        self._grads = buffers[kinds : 2 * kinds]
        self._counts = cycle(buffers[2 * kinds :])
        # what some rank may still be reading: it has been given out since the last barrier
        self._read: list[Buffer] = []

    def gather_counts(self, counts_E: Tensor) -> Tensor:
        """Tokens of this rank for each expert, [E] -> of all ranks, int64 [R, E].

        The result lies in memory that the next call but one writes to: use it at once.
        """
        buffer = next(self._counts)
        assert counts_E.shape == buffer.own.shape[1:]
        push_values(counts_E, buffer.addresses_P, torch.int64)
        self._barrier()
        return buffer.own

    def send(self, kind: int, weight_LIO: Tensor, clones: Clones) -> Tensor:
        """Weights of this kind of this rank's experts -> [s, I, O], those in this rank's slots.

        Undefined where a slot is empty, and everywhere from the next call for this kind on.
        """
        slots = self._slots[kind]
        assert weight_LIO.dtype == slots.own.dtype and weight_LIO.shape[1:] == slots.own.shape[1:]
        self._make_free(slots)
        push_clones(
            weight_LIO, clones.expert_S, clones.moved_S, slots.addresses_P, first=self.first
        )
        self._barrier()
        self._read.append(slots)
        return slots.own

    def grads(self, kind: int) -> Tensor:
        """[s, I, O] fp32, where this rank writes the gradients of its slots for `add_home`; what
        lies there is undefined. To be called for every time that it is written.
        """
        grads = self._grads[kind]
        self._make_free(grads)
        return grads.own

    def add_home(self, kind: int, total_LIO: Tensor, clones: Clones) -> None:
        """total[l] += the gradients of all ranks' slots with this rank's expert l, in order of
        slots: in fp32, rounded once to the type of the total.
        """
        grads = self._grads[kind]
        assert total_LIO.shape[1:] == grads.own.shape[1:]
        self._barrier()
        add_clones(total_LIO, clones.expert_S, clones.moved_S, grads.addresses_P, first=self.first)
        self._read.append(grads)

    def _make_free(self, buffer: Buffer) -> None:
        """Behind this, nobody reads what was there before."""
        if any(buffer is other for other in self._read):
            self._barrier()

    def _barrier(self) -> None:
        self._memory.barrier()
        self._read.clear()
