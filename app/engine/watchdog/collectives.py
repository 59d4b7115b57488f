"""The collectives that are under way on this rank, and how many there have been in every group.

torch keeps both: its flight recorders have the newest 2,000 collectives of the process and whether
each is done (on a GPU: whether the device has finished it, however far ahead the host is), and
every group counts its own. So nothing has to be noted where collectives are called. What a CUDA
graph replays is in neither.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from app.plan.groups import PP
from app.torch_versions import enqueued, flight_records

PIPELINE = PP.name  # its sends and receives are the transport's to tell


@dataclass(frozen=True, slots=True)
class Collective:
    """An operation in which several ranks meet."""

    group: str  # name of the group
    operation: str  # all_reduce, …
    number: int  # in the sequence of this group's collectives, from 1
    since: float  # wall clock, seconds, at which this rank's host came to it
    at_least: bool = False  # the recorder may have dropped an earlier one that is not done either

    def __str__(self) -> str:
        number = f"{self.number} (or one before it)" if self.at_least else f"{self.number}"
        return f"{self.operation} {number} of {self.group}"


@dataclass(frozen=True, slots=True)
class Recorded:
    """What this rank's recorders say now."""

    counts: dict[str, int]  # group -> collectives enqueued
    under_way: tuple[Collective, ...] = ()  # of every group the oldest that is not done

    def without(self, group: str) -> Recorded:
        """What they say of the other groups."""
        counts = {name: count for name, count in self.counts.items() if name != group}
        return Recorded(counts, tuple(each for each in self.under_way if each.group != group))


def count_enqueued(groups: Mapping[str, dist.ProcessGroup], before: Recorded) -> dict[str, int]:
    """Group -> collectives that this rank has enqueued there, without a look at the recorders."""
    return before.counts | {
        name: max(before.counts.get(name, 0), enqueued(group))
        for name, group in groups.items()
        if name != PIPELINE
    }


def read_recorders(groups: Mapping[str, dist.ProcessGroup], before: Recorded) -> Recorded:
    """What the recorders say of these groups; `before`: what they said last."""
    names = {group.group_name: name for name, group in groups.items()}
    counts = count_enqueued(groups, before)
    oldest: dict[str, Collective] = {}
    done: set[str] = set()  # groups of which a finished one is kept
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
    """Records without sends and receives, of which a batch leaves entries that are never done."""
    for record in flight_records():
        if not record["is_p2p"] and not record["profiling_name"].endswith(":coalesced"):
            yield record


def _collective(name: str, record: dict[str, Any], at_least: bool) -> Collective:
    operation = record["profiling_name"].partition(":")[2].removeprefix("_").removesuffix("_base")
    return Collective(
        name,
        operation,
        record["collective_seq_id"],
        since=record["time_created_ns"] / 1e9,
        at_least=at_least,
    )


NOTHING = Recorded({})
