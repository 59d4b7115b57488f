"""Waits of a device within a captured graph, from its marks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch.distributed as dist

from app.engine.watchdog.collectives import Collective
from app.engine.watchdog.marks import Mark, Marks, Position
from app.engine.watchdog.missing import CollectiveWait

Groups = Mapping[str, dist.ProcessGroup]


def graph_counts(marks: Marks, groups: Groups) -> dict[str, int]:
    """Return the collectives begun within graphs, by `_in_graphs` of the group's name."""
    names = _names(groups)
    return {_in_graphs(names.get(group, group)): count for group, count in marks.entered().items()}


def waits_in_graph(
    position: Position, marks: Marks | None, groups: Groups, seconds: float
) -> Iterator[CollectiveWait]:
    """Yield what a device may wait in: the place itself, then collectives that run beside it.

    The place is a collective, a wait for sends and receives, or work that needs no other rank. A
    collective counts as entered once its mark is passed; the device may also be in the work behind
    it, which other ranks tell by having begun the next one (`missing.LEFT`).
    """
    assert marks is not None, "without marks there is no position"
    counts, names = graph_counts(marks, groups), _names(groups)

    def collective(mark: Mark, beside: bool) -> CollectiveWait:
        group = _in_graphs(names.get(mark.group, mark.group))
        each = Collective(group, mark.operation, counts[group], since=0.0)
        during = f"{position}; next: {position.next_words}"
        return CollectiveWait(
            str(each),
            seconds,
            mark.ranks,
            collective=each,
            during=during,
            in_graph=True,
            beside=beside,
        )

    mark = position.mark
    if mark.operation:
        yield collective(mark, beside=False)
    else:
        yield CollectiveWait(
            f"{position} of a graph",
            seconds,
            mark.ranks,
            during=f"next: {position.next_words}",
            under_way=mark.under_way,
            in_graph=True,
        )
    for each in position.beside:
        if each.group != mark.group:
            yield collective(each, beside=True)


def _names(groups: Groups) -> dict[str, str]:
    return {group.group_name: name for name, group in groups.items()}


def _in_graphs(group: str) -> str:
    return f"{group} in graphs"
