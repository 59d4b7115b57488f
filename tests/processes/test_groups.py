"""A rank creates the groups that it is in and no others, under names that their ranks agree on."""

from __future__ import annotations

import dataclasses
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import app.engine.ranks.groups
from app.collectives import all_reduce
from app.config import ModelConfig, MoEConfig
from app.engine.ranks.groups import Groups, create_groups
from app.model.layers.layer_groups import LayerGroups
from app.optim.distributed import OptimizerGroups
from app.plan.groups import GROUPS, GroupKind
from app.plan.layout import ParallelLayout, select_layout
from app.plan.memory.rank_memory import communicators
from tests.cases import chosen
from tests.distributed import run_distributed
from tests.plan.group_table import small_layouts
from tests.training import composed

APP = Path(__file__).parents[2] / "app"
# a model that uses every group
EVERYTHING = ModelConfig(
    tie_embeddings=True, moe=MoEConfig(num_experts=8, top_k=2, ffn_hidden_size=16)
)
ALLOWED_S = 5.0  # for one rank of any world
LAYOUTS = [
    ParallelLayout(8, pp=4),
    ParallelLayout(12, pp=3, tp=2, ep=2, etp=1),
    ParallelLayout(16, pp=4, cp=2, ep=4, etp=1, order="ep-cp-tp-dp-pp"),
    ParallelLayout(8, tp=2, ep=4, etp=2),
    ParallelLayout(1),
]


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
            since = time.process_time()
            groups = create_groups(layout, rank)
            assert time.process_time() - since < ALLOWED_S
        assert len(calls) <= 1 + len(groups.named())  # and the one of this rank alone


def named(layout: ParallelLayout, rank: int) -> list[tuple[str, list[int], str]]:
    """Purpose, ranks and name of every group of a rank, of two sets at a time and of one more."""
    with fake_world(rank, layout.world_size):
        sets = [create_groups(layout, rank).named() for _ in range(2)]
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
        (
            ParallelLayout(2),
            {"host", "world", "dp_control", "tp_cp_dp_control", "dp_cp", "edp"},
        ),
        (ParallelLayout(2, pp=2), {"host", "world", "pp", "pp_control", "embedding"}),
    ],
    ids=["one rank", "dp", "pp"],  # a set has another text in every process
)
def test_purposes_without_a_second_rank_share_one_group(layout: ParallelLayout, shared: set[str]):
    with fake_world(0, layout.world_size):
        groups = create_groups(layout, 0).named()
        assert {name for name, group in groups.items() if group.size() > 1} == shared
        assert len(set(groups.values())) == len(shared) + 1


def test_records_of_groups_have_the_names_of_the_table():
    """Nothing is created that the table does not list, and nothing is called otherwise."""

    def names(record: type) -> list[str]:
        hints = get_type_hints(record)
        kinds = (dist.ProcessGroup, dist.ProcessGroup | None)
        return [name for name, hint in hints.items() if hint in kinds]

    assert names(Groups) == list(GROUPS)
    for record in (LayerGroups, OptimizerGroups):
        # etp_shared: created by runs alone whose divided experts have adapters
        assert set(names(record)) - {"etp_shared"} < set(GROUPS)
    calls = [path.name for path in APP.rglob("*.py") if "new_group(" in path.read_text()]
    assert calls == ["groups.py"]


def check_created(layout: ParallelLayout, rank: int) -> None:
    """The groups of one rank are those of the table, and those that are planned."""
    with fake_world(rank, layout.world_size):
        created = {
            name: dist.get_process_group_ranks(group)
            for name, group in create_groups(layout, rank).named().items()
        }
    wanted = {
        name: next((ranks for ranks in group.members(layout) if rank in ranks), [rank])
        for name, group in GROUPS.items()
    }
    assert created == wanted, (layout, rank)
    several = [
        name
        for name, ranks in created.items()
        if len(ranks) > 1 and GROUPS[name].kind is not GroupKind.host
    ]
    planned = communicators(EVERYTHING, layout, layout.coords(rank)["pp"])
    assert several == [group.name for group in planned], (layout, rank)


@pytest.mark.parametrize("world", chosen(range(1, 9), [3, 4]))
def test_created_groups_match_table_and_plan(world: int):
    for layout in small_layouts(range(world, world + 1)):
        for rank in range(world):
            check_created(layout, rank)


def test_group_kind_decides_backend_and_channels(monkeypatch: pytest.MonkeyPatch):
    made: list[tuple[str, list[int], int | None]] = []

    def host_group(ranks: list[int]) -> dist.ProcessGroup:
        made.append(("host", ranks, None))
        return dist.group.WORLD

    def device_group(ranks: list[int], channels: int | None) -> dist.ProcessGroup:
        made.append(("device", ranks, channels))
        return dist.group.WORLD

    monkeypatch.setattr(app.engine.ranks.groups, "host_group", host_group)
    monkeypatch.setattr(app.engine.ranks.groups, "_device_group", device_group)
    layout = ParallelLayout(16, tp=2, cp=2, pp=2, ep=2, etp=2)
    with fake_world(0, 16):
        create_groups(layout, 0)
    several = [group for group in GROUPS.values() if group.size(layout) > 1]
    assert len(several) == len(GROUPS)
    channels = {"host": None, "control": 1, "stages": 4, "data": None}
    wanted = [
        (
            "host" if group.kind.value == "host" else "device",
            group.members(layout)[0],
            channels[group.kind.value],
        )
        for group in several
    ]
    assert made == [("host", [0], None), *wanted]


def sums(rank: int, layout: ParallelLayout) -> list[dict[str, float]]:
    """The sum of 2^rank over every group, of two sets of groups in turn."""
    found: list[dict[str, float]] = [{}, {}]
    both = [create_groups(layout, rank).named() for _ in range(2)]
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
        "host": everybody, "world": everybody, "dp_control": stages, "tp_cp_control": alone,
        "tp_cp_dp_control": stages, "pp_control": pipelines, "tp": alone, "cp": alone,
        "pp": pipelines, "dp_cp": stages, "etp_ep": stages, "edp": alone, "embedding": ends,
    }  # fmt: skip
    for rank, found in enumerate(run_distributed(sums, 6, layout)):
        wanted = {
            name: sum(2.0**r for r in next(g for g in groups if rank in g))
            for name, groups in joined.items()
        }
        assert found == [wanted, wanted]


def own_number(rank: int) -> int:
    return rank


@pytest.mark.full
def test_ranks_that_return_at_once_fail_no_others():
    for _ in range(40):
        assert run_distributed(own_number, 3) == [0, 1, 2]
