"""Measure the links of a node, over a process group of all its GPUs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

import torch
import torch.distributed as dist

from app.collectives import all_gather, all_to_all
from app.engine.calibration import solve
from app.engine.calibration.clock import Clock
from app.engine.calibration.solve import GIGA, MICRO


def link_speeds(clock: Clock, group: dist.ProcessGroup, sizes: Sequence[int]) -> dict[str, float]:
    """Measure the link keys of `HardwareProfile`; every rank of `group` must call it.

    `sizes` are the bytes that a rank sends. All ranks return the results of the slowest.
    """
    found: dict[str, float] = {}
    for name, prepare in WAYS.items():
        times = [(size, _slowest(clock, group, prepare(clock, group, size))) for size in sizes]
        before, rate = solve.line(times)
        found[f"{name}_gb_s"] = rate / GIGA
        if name in STARTS:
            found[STARTS[name]] = before / MICRO
    return found


def _slowest(clock: Clock, group: dist.ProcessGroup, run: Callable[[], object]) -> float:
    """Return the median seconds of the slowest rank."""
    meeting = torch.zeros(1, device=clock.device)
    # align ranks first, so that waiting for a late rank does not count as communication
    together = partial(dist.all_reduce, meeting, group=group)
    seconds = torch.tensor(clock.seconds(run, before=together), device=clock.device)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX, group=group)
    return float(seconds)


def _gathering(clock: Clock, group: dist.ProcessGroup, size: int) -> Callable[[], object]:
    own = torch.zeros(_elements(size, group), dtype=torch.bfloat16, device=clock.device)
    whole = own.new_empty(group.size() * len(own))
    return lambda: all_gather(whole, own, group)


def _trading(clock: Clock, group: dist.ProcessGroup, size: int) -> Callable[[], object]:
    shape = group.size(), _elements(size, group)
    parts = torch.zeros(shape, dtype=torch.bfloat16, device=clock.device)
    return lambda: all_to_all(parts, group)


def _elements(size: int, group: dist.ProcessGroup) -> int:
    """Return the elements per other rank if a rank sends `size` bytes in all."""
    return size // (2 * (group.size() - 1))


def _sending(clock: Clock, group: dist.ProcessGroup, size: int) -> Callable[[], object]:
    """Prepare a send to the next rank of the ring and a receive from the previous one."""
    sent = torch.zeros(size // 2, dtype=torch.bfloat16, device=clock.device)
    got = torch.empty_like(sent)
    ranks, here = group.size(), group.rank()
    after, before = ((here + step) % ranks for step in (1, -1))

    def run() -> None:
        send = dist.P2POp(dist.isend, sent, group=group, group_peer=after)
        receive = dist.P2POp(dist.irecv, got, group=group, group_peer=before)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()

    return run


Prepare = Callable[[Clock, dist.ProcessGroup, int], Callable[[], object]]
WAYS: Mapping[str, Prepare] = MappingProxyType(
    {"ring": _gathering, "all_to_all": _trading, "send": _sending}
)
STARTS = {"ring": "collective_us", "send": "send_us"}  # keys of the latencies
