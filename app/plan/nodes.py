"""Placement of groups on nodes, from the sizes of the axes alone.

A node has `per_node` consecutive ranks. All groups along the same axes have the same offsets from
their first rank, so the nodes of a group depend only on its first rank's place within its node.
There are at most `per_node` such places, however large the world.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from math import gcd


@dataclass(frozen=True, slots=True)
class NodeSpan:
    """Worst placement of the groups of one kind on nodes."""

    nodes: int  # most nodes that one group spans
    # fewest ranks of a group in one of its nodes: ranks that a rank reaches over fast links, itself
    # included
    near: int


def node_span(
    sizes: Mapping[str, int], axes: Collection[str], per_node: int, ends_only: bool = False
) -> NodeSpan:
    """Return the span of groups whose ranks differ only along `axes`.

    `sizes` lists the grid, fastest axis first. ends_only: only the first and last rank of each
    group.
    """
    offsets = [0]
    places = {0}
    stride = 1
    for axis, size in sizes.items():
        if axis in axes:
            offsets = [index * stride + offset for index in range(size) for offset in offsets]
        else:
            # places in a node repeat after so many multiples of the stride
            distinct = min(size, per_node // gcd(stride, per_node))
            places = {
                (index * stride + place) % per_node for index in range(distinct) for place in places
            }
        stride *= size
    return _worst(offsets[:: max(1, len(offsets) - 1)] if ends_only else offsets, places, per_node)


def _worst(offsets: Collection[int], places: Iterable[int], per_node: int) -> NodeSpan:
    counts = [Counter((place + offset) // per_node for offset in offsets) for place in places]
    return NodeSpan(max(map(len, counts)), min(min(count.values()) for count in counts))
