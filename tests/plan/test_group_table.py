"""The one table of process groups: what its names say, its ranks, and that everything that is
planned and documented of groups is planned and documented of those of the table.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections import defaultdict
from pathlib import Path

import pytest

from app.plan.groups import CHECKPOINT, EVERYBODY, GROUPS, Group, GroupKind
from app.plan.layout import ParallelLayout
from app.plan.memory.rank_memory import communicators
from app.planner.plan import Plan
from tests.config import load
from tests.plan.group_table import small_layouts

DOCS = Path(__file__).parents[2] / "docs"
EVERYTHING = (
    "model=mixtral_8x7b", "model.tie_embeddings=true", "parallel.tp=2", "parallel.cp=2",
    "parallel.pp=2", "parallel.dp=2", "parallel.ep=2", "parallel.etp=2", "train.micro_batch=1",
    "train.global_batch=8",
)  # fmt: skip


LAYOUTS = list(small_layouts(range(1, 9)))


def by_coordinates(group: Group, layout: ParallelLayout) -> list[list[int]]:
    """The ranks that have the same place on every axis but the group's, by their lowest."""
    found: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank in range(layout.world_size):
        coords = layout.coords(rank, group.expert)
        found[tuple(coords[axis] for axis in coords if axis not in group.axes)].append(rank)
    return sorted(found.values())


@pytest.mark.full
def test_every_rank_is_in_one_group_per_name_along_its_axes():
    assert len(LAYOUTS) > 300 and any(layout.pp > 1 and layout.ep > 1 for layout in LAYOUTS)
    for layout, group in itertools.product(LAYOUTS, GROUPS.values()):
        members = group.members(layout)
        listed = [rank for ranks in members for rank in ranks]
        assert len(set(listed)) == len(listed)
        assert {len(ranks) for ranks in members} == {group.size(layout)}
        if not group.ends_only:
            assert sorted(map(sorted, members)) == by_coordinates(group, layout)


def test_the_embedding_is_shared_by_the_ends_of_pipelines():
    (group,) = (group for group in GROUPS.values() if group.ends_only)
    for layout in LAYOUTS:
        ends = {rank for ranks in group.members(layout) for rank in ranks}
        for rank in range(layout.world_size):
            pp_rank = layout.coords(rank)["pp"]
            assert (rank in ends) == (pp_rank in (0, layout.pp - 1))
            assert group.joins(layout, pp_rank) == (rank in ends and layout.pp > 1)


@pytest.mark.parametrize("name", GROUPS)
def test_a_name_is_that_of_the_axes(name: str):
    group = GROUPS[name]
    suffix = "_control" if group.kind is GroupKind.control else ""
    special = group.axes == EVERYBODY or group.ends_only
    assert group.name == name and (special or name == "_".join(group.axes) + suffix)


@pytest.mark.every(2)
@pytest.mark.parametrize("moe", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_communicators_are_planned_for_every_used_group(moe: bool, tied: bool):
    model = load("model=mixtral_8x7b" if moe else "model=llama3_8b").model
    model = dataclasses.replace(model, tie_embeddings=tied)
    layout = ParallelLayout(96, tp=2, cp=2, pp=3, ep=2, etp=2)
    unused = (set() if moe else {"etp_ep", "edp"}) | (set() if tied else {"embedding"})
    for pp_rank in range(3):
        alone = {"host"} | ({"embedding"} if pp_rank == 1 else set())
        found = [group.name for group in communicators(model, layout, pp_rank)]
        assert found == [name for name in GROUPS if name not in unused | alone]


def test_everything_that_carries_data_has_its_traffic():
    plan = Plan(load(*EVERYTHING))
    carrying = (GroupKind.stages, GroupKind.data)
    carriers = {name for name, group in GROUPS.items() if group.kind in carrying}
    assert {traffic.name for traffic in plan.traffic} == carriers
    for traffic in plan.traffic:
        members = GROUPS[traffic.name].members(plan.layout)
        assert (traffic.groups, traffic.ranks) == (len(members), len(members[0]))


def row(group: Group) -> str:
    """A line of the table in docs/parallelism.md."""
    over = "all axes" if group.axes == EVERYBODY else " · ".join(group.axes)
    over = f"{over}, both ends" if group.ends_only else over
    grid = "experts" if group.expert else "dense"
    return f"| `{group.name}` | {over} | {grid} | {group.kind.value} | {group.purpose} |"


def test_the_documentation_lists_them():
    text = (DOCS / "parallelism.md").read_text()
    section = text.partition("## What runs where")[2].partition("\n## ")[0]
    listed = re.findall(r"^\| `\w+` \| .*$", section, re.MULTILINE)
    assert listed == [row(group) for group in (*GROUPS.values(), CHECKPOINT)]
