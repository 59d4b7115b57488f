"""Read the collectives under way on this rank, and their number so far in every group.

torch keeps both: its flight recorders hold the newest 2,000 collectives of the process and whether
each is done (on a GPU: by the device, however far ahead the host is), and every group counts its
own. So call sites of collectives need no notes. Both miss the replays of a CUDA graph.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from app.plan.groups import PP
from app.torch_versions import enqueued, flight_records

PIPELINE = PP.name  # left out here: `Transport` reports its sends and receives


@dataclass(frozen=True, slots=True)
class Collective:
    """Operation in which several ranks take part."""

    group: str  # name of the group
    operation: str  # all_reduce, …
    number: int  # in the sequence of this group's collectives, from 1
    since: float  # wall clock, seconds, at which this rank's host called it
    at_least: bool = False  # True if the recorder may have dropped an earlier unfinished one

    def __str__(self) -> str:
        number = f"{self.number} (or one before it)" if self.at_least else f"{self.number}"
        return f"{self.operation} {number} of {self.group}"


@dataclass(frozen=True, slots=True)
class Recorded:
    """State of this rank's flight recorders."""

    counts: dict[str, int]  # group -> collectives enqueued
    under_way: tuple[Collective, ...] = ()  # oldest unfinished collective of each group

    def without(self, group: str) -> Recorded:
        """Return the state without one group."""
        counts = {name: count for name, count in self.counts.items() if name != group}
        return Recorded(counts, tuple(each for each in self.under_way if each.group != group))


def count_enqueued(groups: Mapping[str, dist.ProcessGroup], before: Recorded) -> dict[str, int]:
    """Return the collectives enqueued so far by group, without reading the recorders."""
    return before.counts | {
        name: max(before.counts.get(name, 0), enqueued(group))
        for name, group in groups.items()
        if name != PIPELINE
    }


def read_recorders(groups: Mapping[str, dist.ProcessGroup], before: Recorded) -> Recorded:
    """Read the recorders' state of these groups; `before` is the last state read."""
    names = {group.group_name: name for name, group in groups.items()}
    counts = count_enqueued(groups, before)
    oldest: dict[str, Collective] = {}
    done: set[str] = set()  # groups with a finished collective in the recorder
    for record in _collectives():
        name = names.get(record["process_group"][0])
        finished = record["retired"] or record["state"] == "completed"
        if name is None:
            continue
        counts[name] = max(counts.get(name, 0), record["collective_seq_id"])
        if finished:
            done.add(name)
        elif name not in oldest:
            oldest[name] = _collective(
                name, record, at_least=name not in done and record["collective_seq_id"] > 1
            )
    return Recorded(counts, tuple(oldest.values()))


def _collectives() -> Iterator[dict[str, Any]]:
    """Yield records except sends and receives: a batch of these leaves entries never done."""
    for record in flight_records():
        if not record["is_p2p"] and not record["profiling_name"].endswith(":coalesced"):
            yield record


def _collective(name: str, record: dict[str, Any], at_least: bool) -> Collective:
    # nccl:_all_gather_base, nccl:all_gather_into_tensor_coalesced
    operation = re.sub(
        r"^_|_base$|(_into)?_tensor_coalesced$", "", record["profiling_name"].partition(":")[2]
    )
    return Collective(
        name,
        operation,
        record["collective_seq_id"],
        since=record["time_created_ns"] / 1e9,
        at_least=at_least,
    )


NOTHING = Recorded({})
