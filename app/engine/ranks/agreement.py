"""Share results and errors between ranks: all continue, or all raise the same error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from app.engine.ranks.groups import Groups
from app.errors import ConfigError

T = TypeVar("T")


def rank_zero_says(groups: Groups, decide: Callable[[], T]) -> T:
    """Return rank 0's `decide()` on every rank; its ConfigError is raised on every rank."""
    said: list[Any] = [None]  # Any: broadcast_object_list is untyped
    if groups.rank == 0:
        try:
            said = [decide()]
        except ConfigError as error:
            said = [error]
    if groups.host.size() > 1:
        dist.broadcast_object_list(said, src=0, group=groups.host)
    if isinstance(said[0], ConfigError):
        raise said[0]
    answer: T = said[0]
    return answer


def all_succeed(groups: Groups, work: Callable[[], T]) -> T:
    """Return this rank's `work()`; a ConfigError of one rank is raised on all."""
    errors: list[ConfigError | None] = [None] * groups.host.size()
    mine = None
    results: list[T] = []  # one, unless there is an error
    try:
        results.append(work())
    except ConfigError as error:
        mine = error
    dist.all_gather_object(errors, mine, group=groups.host)
    for found in errors:  # all ranks raise the same one: that of the lowest rank
        if found is not None:
            raise found
    return results[0]
