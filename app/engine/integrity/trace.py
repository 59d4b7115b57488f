"""Trace of a replay: what a rank sends, receives and computes, in order, as sums over bits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from app.engine.integrity.bits import bits_of
from app.engine.step.executor import Transport
from app.engine.watchdog.marks import SeesCollectives
from app.plan.actions import P2POp


class ValueKind(Enum):
    """How a replay met a value."""

    sent = "sent"
    received = "received"
    computed = "computed"


@dataclass(frozen=True, slots=True)
class TracedValue:
    """Value in a trace; its `name` is the same on all ranks that take part in a message."""

    kind: ValueKind
    name: str
    senders: tuple[int, ...] = ()  # global ranks whose values are in the message


@dataclass(slots=True)
class ValueTrace:
    """Values that a rank's work meets within `watching`."""

    values: list[TracedValue] = field(default_factory=list)
    sums: list[Tensor] = field(default_factory=list)  # int64 scalars on the device
    counts: Counter[str] = field(default_factory=Counter)  # collectives of each group

    def add(
        self, kind: ValueKind, name: str, tensors: Sequence[Tensor], senders: Sequence[int] = ()
    ) -> None:
        """Note values; several as one."""
        self.values.append(TracedValue(kind, name, tuple(senders)))
        self.sums.append(torch.stack([bits_of(tensor) for tensor in tensors]).sum())

    @contextmanager
    def watching(self, names: Mapping[str, str]) -> Iterator[None]:
        """Note the collectives of groups that `names` has (torch's name -> ours) in the block."""
        self.values, self.sums, self.counts = [], [], Counter()
        with _SeesMessages(self, names):
            yield

    def collective(
        self, operation: str, group: dist.ProcessGroup, names: Mapping[str, str]
    ) -> tuple[str, list[int]]:
        """Return the name of the next collective of a group, and the ranks of it."""
        name = names[group.group_name]
        self.counts[name] += 1
        return f"{operation} {self.counts[name]} of {name}", dist.get_process_group_ranks(group)


class _SeesMessages(SeesCollectives):
    """Notes what goes into collectives and comes out."""

    def __init__(self, trace: ValueTrace, names: Mapping[str, str]) -> None:
        super().__init__()
        self.trace, self.names = trace, names

    def around(
        self,
        operation: str,
        group: dist.ProcessGroup,
        values: Mapping[str, Any],
        call: Callable[[], Any],
    ) -> Any:
        """Run a collective; note its tensors if it sends any."""
        alone = group.size() == 1 or operation == "barrier"
        if alone or group.group_name not in self.names:
            return call()
        name, ranks = self.trace.collective(operation, group, self.names)
        into, of = _tensors_of(values)
        self.trace.add(ValueKind.sent, name, of, ranks)
        done = call()
        if not values.get("async_op", True):
            work = dist.Work.unbox(_work_in(done))
            if work is not None:  # NCCL's is none: what follows on this stream waits for it anyway
                work.wait()
            self.trace.add(ValueKind.received, name, into, ranks)
        return done


def _tensors_of(values: Mapping[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Return what a collective writes, and what it reads, by names of its arguments."""
    into: list[Tensor] = []
    of: list[Tensor] = []
    for name, value in values.items():
        tensors = [each for each in _flat(value) if isinstance(each, Tensor)]
        in_place = name == "tensors"
        if in_place or name.startswith("output"):
            into += tensors
        if in_place or name.startswith("input"):
            of += tensors
    return into, of


def _work_in(done: Any) -> Any:
    return done[-1] if isinstance(done, tuple | list) else done


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for each in value:
            yield from _flat(each)
    else:
        yield value


@dataclass(slots=True, kw_only=True)
class TracedTransport(Transport):
    """Transport that notes what pipeline ranks send to each other."""

    trace: ValueTrace
    rank: int  # global
    arriving: dict[P2POp, Tensor] = field(default_factory=dict)

    def post(self, tensors: Mapping[P2POp, Tensor]) -> None:
        """See `Transport`."""
        for op, tensor in tensors.items():
            if op.send:
                self._add(ValueKind.sent, op, tensor)
            else:
                self.arriving[op] = tensor
        Transport.post(self, tensors)

    def wait(self, ops: Sequence[P2POp]) -> None:
        """See `Transport`."""
        Transport.wait(self, ops)
        for op in ops:
            if not op.send:
                self._add(ValueKind.received, op, self.arriving.pop(op))

    def _add(self, kind: ValueKind, op: P2POp, tensor: Tensor) -> None:
        other = self.ranks[op.peer]
        sender, receiver = (self.rank, other) if op.send else (other, self.rank)
        message = f"{op.flow}{op.mb} from rank {sender} to rank {receiver}"
        self.trace.counts[message] += 1  # one for each chunk that the microbatch passes
        name = f"{message}, number {self.trace.counts[message]}"
        self.trace.add(kind, name, [tensor], (sender,))
