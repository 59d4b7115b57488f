"""Write a counter of the device to host memory, within a captured graph.

A copy between device and host within a graph makes the kernels around it wait for a copy engine; a
kernel of one thread does not.
"""

from __future__ import annotations

from torch import Tensor

from app.kernels.common import jit, tl, triton


def write_mark(slots: Tensor, place: int, counter: Tensor) -> None:
    """Store `counter`, an int32 scalar, at slots[place] on the current stream.

    slots: int32, page-locked if the counter is on a GPU, which then writes to it.
    """
    if triton is None or not counter.is_cuda:
        slots[place].copy_(counter, non_blocking=True)
        return
    _write[(1,)](slots, counter, place, num_warps=1)


def _store(slots: tl.tensor, counter: tl.tensor, place: int) -> None:
    tl.store(slots + place, tl.load(counter))


_write = jit(_store, do_not_specialize=["place"])  # one kernel for all places
