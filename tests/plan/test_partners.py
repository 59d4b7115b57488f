"""Partners that hold copies of optimizer shards, over many sizes of world and node."""

from __future__ import annotations

from app.plan.partners import partners

SIZES = [(world, per_node) for world in range(1, 70) for per_node in range(1, 20)]


def nodes_of(world: int, per_node: int) -> dict[int, set[int]]:
    found: dict[int, set[int]] = {}
    for rank in range(world):
        found.setdefault(rank // per_node, set()).add(rank)
    return found


def test_every_rank_holds_one_copy_of_another():
    for world, per_node in SIZES:
        if (found := partners(world, per_node)) is not None:
            assert sorted(found) == list(range(world))
            assert all(rank != other for rank, other in enumerate(found))


def test_no_node_holds_a_state_and_its_copy():
    checked = 0
    for world, per_node in SIZES:
        found = partners(world, per_node)
        nodes = nodes_of(world, per_node)
        if found is None or len(nodes) < 2:
            continue
        for lost in nodes.values():
            assert not {found[rank] for rank in lost} & lost
        checked += 1
    assert checked > 500


def test_only_worlds_without_such_a_map_are_refused():
    for world, per_node in SIZES:
        largest = max(map(len, nodes_of(world, per_node).values()))
        several = world > per_node
        # copies of the ranks of a node need as many ranks elsewhere
        possible = world > 1 and (not several or 2 * largest <= world)
        assert (partners(world, per_node) is not None) == possible, (world, per_node)


def test_partners_of_two_nodes_of_four():
    assert partners(8, 4) == (4, 5, 6, 7, 0, 1, 2, 3)
    assert partners(3, 8) == (1, 2, 0)
