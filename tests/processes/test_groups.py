"""A rank creates the groups that it is in and no others, under names that their ranks agree on."""

from __future__ import annotations

import dataclasses
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from app.collectives import all_reduce
from app.engine.groups import Groups, create_groups
from app.plan.layout import ParallelLayout
from app.plan.select import select_layout
from tests.distributed import run_distributed
from tests.training import composed

ALLOWED_S = 5.0  # for one rank of any world
LAYOUTS = [
    ParallelLayout(8, pp=4),
    ParallelLayout(12, pp=3, tp=2, ep=2, etp=1),
    ParallelLayout(16, pp=4, cp=2, ep=4, etp=1, order="ep-cp-tp-dp-pp"),
    ParallelLayout(8, tp=2, ep=4, etp=2),
    ParallelLayout(1),
]


def groups_of(groups: Groups) -> dict[str, dist.ProcessGroup]:
    """The groups by purpose."""
    found = {field.name: getattr(groups, field.name) for field in dataclasses.fields(groups)}
    return {name: group for name, group in found.items() if isinstance(group, dist.ProcessGroup)}


@contextmanager
def fake_world(rank: int, world_size: int) -> Iterator[None]:
    """One rank of a world that sends nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("world", [2048, 10240])
def test_a_large_world_starts_at_once(world: int, monkeypatch: pytest.MonkeyPatch):
    planned = select_layout(composed(["+experiment=deepseek_v3_2048"], 2048))
    layout = dataclasses.replace(planned, world_size=world)
    new_group, calls = dist.new_group, []

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(args)
        return new_group(*args, **options)

    monkeypatch.setattr(dist, "new_group", counted)
    for rank in (0, world // 2 + 3, world - 1):
        calls.clear()
        with fake_world(rank, world):
            since = time.perf_counter()
            groups = create_groups(layout, rank)
            assert time.perf_counter() - since < ALLOWED_S
        assert len(calls) <= 1 + len(groups_of(groups))  # and the one of this rank alone


def named(layout: ParallelLayout, rank: int) -> list[tuple[str, list[int], str]]:
    """Purpose, ranks and name of every group of a rank, of two sets at a time and of one more."""
    with fake_world(rank, layout.world_size):
        sets = [groups_of(create_groups(layout, rank)) for _ in range(2)]
        listed = [
            (f"{name} {n}", group)
            for n, groups in enumerate(sets)
            for name, group in groups.items()
        ]
        listed.append(("later", dist.new_group(backend="fake")))
        return [
            (name, dist.get_process_group_ranks(group), group.group_name) for name, group in listed
        ]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_ranks_of_a_group_agree_on_its_name(layout: ParallelLayout):
    names: defaultdict[tuple[str, tuple[int, ...]], set[str]] = defaultdict(set)
    for rank in range(layout.world_size):
        for purpose, ranks, name in named(layout, rank):
            assert rank in ranks
            names[purpose, tuple(ranks)].add(name)
    assert all(len(given) == 1 for given in names.values()), names


@pytest.mark.parametrize(
    ("layout", "shared"),
    [
        (ParallelLayout(1), set()),
        (ParallelLayout(2), {"host", "world", "data", "tokens", "dp", "edp"}),
        (ParallelLayout(2, pp=2), {"host", "world", "pp", "stages", "embedding"}),
    ],
    ids=["one rank", "dp", "pp"],  # a set has another text in every process
)
def test_purposes_without_a_second_rank_share_one_group(layout: ParallelLayout, shared: set[str]):
    with fake_world(0, layout.world_size):
        groups = groups_of(create_groups(layout, 0))
        assert {name for name, group in groups.items() if group.size() > 1} == shared
        assert len(set(groups.values())) == len(shared) + 1


def sums(rank: int, layout: ParallelLayout) -> list[dict[str, float]]:
    """The sum of 2^rank over every group, of two sets of groups in turn."""
    found: list[dict[str, float]] = [{}, {}]
    both = [groups_of(create_groups(layout, rank)) for _ in range(2)]
    for seen, groups in zip(found, both, strict=True):
        for name, group in groups.items():
            total = torch.tensor(2.0**rank)
            all_reduce(total, group)
            seen[name] = total.item()
    return found


def test_groups_over_gloo_join_the_right_ranks():
    layout = ParallelLayout(6, pp=3, ep=2)
    pipelines, stages = [[0, 2, 4], [1, 3, 5]], [[0, 1], [2, 3], [4, 5]]
    everybody, alone = [list(range(6))], [[rank] for rank in range(6)]
    ends = [[0, 4], [1, 5], [2], [3]]
    joined: dict[str, Any] = {
        "host": everybody, "world": everybody, "data": stages, "tokens": stages,
        "microbatch": alone, "tp": alone, "cp": alone, "dp": stages, "edp": alone, "ep": stages,
        "pp": pipelines, "stages": pipelines, "embedding": ends,
    }  # fmt: skip
    for rank, found in enumerate(run_distributed(sums, 6, layout)):
        wanted = {
            name: sum(2.0**r for r in next(g for g in groups if rank in g))
            for name, groups in joined.items()
        }
        assert found == [wanted, wanted]
