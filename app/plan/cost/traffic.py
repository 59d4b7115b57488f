"""Traffic of every kind of group in a step: bytes inside and across nodes, time, better orders.

docs/planning.md has the formulas and an example. Not counted: latency, counts of tokens, norms and
losses, and a vocabulary-parallel loss's three numbers per token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import combinations, permutations, takewhile
from math import ceil, prod

from app.config import HardwareConfig, Run
from app.plan.cost.volumes import Volume, step_volumes
from app.plan.groups import ETP_EP, TP, Way
from app.plan.layout import AXES, DENSE_AXIS, EXPERT_AXIS, ParallelLayout
from app.plan.nodes import NodeSpan, node_span
from app.plan.select import select_stages
from app.plan.stages import StagePlan

Order = tuple[str, ...]  # axes from the fastest-varying one

GB = 1e9  # bytes
# groups worth another order: they communicate in every layer, and compute waits
ADVISED = (TP.name, ETP_EP.name)


@dataclass(frozen=True, slots=True)
class GroupTraffic:
    """Traffic of the groups of one kind in a step."""

    name: str  # of app.plan.groups
    collectives: str  # in words
    groups: int  # how many there are
    ranks: int  # ranks per group
    nodes: int  # most nodes that one group spans
    bytes_inside: int  # sent by one rank within its node
    bytes_across: int  # sent by one rank to other nodes
    seconds: float  # estimated: both run at the same time, so the slower one
    exposed: bool  # compute waits for it

    @property
    def bytes(self) -> int:
        """Bytes that one rank sends in a step."""
        return self.bytes_inside + self.bytes_across


@dataclass(frozen=True, slots=True)
class OrderAdvice:
    """Another order of axes that brings the groups of one kind onto fewer nodes."""

    axis: str  # the groups: tp or etp_ep
    nodes: int  # most nodes that one of its groups spans now
    order: str  # parallel.order with the least exposed time
    best_nodes: int  # most nodes that one of its groups spans then
    seconds: float  # saved per step by that order, for all axes together


def plan_traffic(run: Run, layout: ParallelLayout, stages: StagePlan) -> tuple[GroupTraffic, ...]:
    """Return the traffic of a step by kind of group; none for groups of one rank or without sends.

    Bytes are those of the pipeline rank that sends most, and of the rank with the fewest ranks of
    its group in its node.
    """
    dense = layout.sizes()
    expert = layout.sizes(expert=True)
    return tuple(
        _placed(run, expert if volume.group.expert else dense, volume)
        for volume in step_volumes(run, layout, stages)
    )


def _placed(run: Run, sizes: Mapping[str, int], volume: Volume) -> GroupTraffic:
    group = volume.group
    span = node_span(sizes, group.axes, run.parallel.gpus_per_node, ends_only=group.ends_only)
    together = prod(sizes[axis] for axis in group.axes)
    ranks = 2 if group.ends_only else together
    across = ceil(volume.bytes * share_across(volume.way, span, ranks))
    inside = volume.bytes - across
    seconds = _seconds(run.hardware, inside, across)
    groups = prod(sizes.values()) // together
    return GroupTraffic(
        group.name,
        volume.collectives,
        groups,
        ranks=ranks,
        nodes=span.nodes,
        bytes_inside=inside,
        bytes_across=across,
        seconds=seconds,
        exposed=volume.exposed,
    )


def share_across(way: Way, span: NodeSpan, ranks: int) -> Fraction:
    """Return the share of a rank's bytes that leaves its node.

    With `near` ranks of the group in every node, a ring runs as `near` rings, each with its part of
    the bytes and each leaving the node from another rank.
    """
    if span.nodes == 1:
        return Fraction(0)
    match way:
        case Way.ring:
            return Fraction(1, span.near)
        case Way.all_to_all:
            return Fraction(ranks - span.near, ranks - 1)
        case Way.neighbours:
            return Fraction(1, min(span.near, 2))


def _seconds(hardware: HardwareConfig, inside: int, across: int) -> float:
    return max(inside / (hardware.node_gb_s * GB), across / (hardware.network_gb_s * GB))


def order_advice(run: Run, layout: ParallelLayout) -> tuple[OrderAdvice, ...]:
    """Return advice for tp and etp_ep if the order with least exposed traffic spans fewer nodes.

    The search covers all orders that a run may have; among equally good ones it takes the one
    nearest to the present. Empty if no order saves time: the nearest of the best is then the
    present, or differs in axes of one rank.
    """
    volumes = [volume for volume in step_volumes(run, layout, select_stages(run)) if volume.exposed]

    @cache
    def placed(volume: Volume, grid: tuple[tuple[str, int], ...]) -> GroupTraffic:
        return _placed(run, dict(grid), volume)

    def in_order(order: Order) -> list[GroupTraffic]:
        return [placed(volume, _grid(layout, order, volume.group.expert)) for volume in volumes]

    def seconds(order: Order) -> float:
        return sum(traffic.seconds for traffic in in_order(order))

    listed = layout.order.lower().split("-")
    present = (*listed, *(axis for axis in AXES if axis not in listed))
    allowed = (order for order in legal_orders(layout) if parts_side_by_side(layout, order))
    best = min(allowed, key=lambda order: (seconds(order), _swaps(present, order)))
    saved = seconds(present) - seconds(best)
    pairs = zip(in_order(present), in_order(best), strict=True)
    return tuple(
        OrderAdvice(now.name, now.nodes, "-".join(best), best_nodes=then.nodes, seconds=saved)
        for now, then in pairs
        if now.name in ADVISED and then.nodes < now.nodes
    )


def legal_orders(layout: ParallelLayout) -> Iterator[Order]:
    """Yield the orders of all axes in which ParallelLayout accepts these degrees.

    Pipelines that do not vary slowest must have the same ranks, and so the same stride, in both
    grids.
    """
    for order in permutations(AXES):
        strides = [
            prod(
                size
                for _, size in takewhile(lambda item: item[0] != "pp", _grid(layout, order, expert))
            )
            for expert in (False, True)
        ]
        if (
            layout.pp == 1
            or order[-1] == "pp"
            or (layout.dp == layout.edp and strides[0] == strides[1])
        ):
            yield order


def parts_side_by_side(layout: ParallelLayout, order: Sequence[str]) -> bool:
    """Return whether the etp parts of an expert are adjacent in the group of etp × ep ranks.

    The token exchange assumes that they are.
    """
    return 1 in (layout.expert_tp, layout.ep) or order.index("tp") < order.index("ep")


def _grid(layout: ParallelLayout, order: Order, expert: bool) -> tuple[tuple[str, int], ...]:
    """Return (axis, size) of the dense or expert grid in another order, fastest-varying first."""
    names = EXPERT_AXIS if expert else DENSE_AXIS
    sizes = layout.sizes(expert)
    return tuple((names[axis], sizes[names[axis]]) for axis in order if axis in names)


def _swaps(first: Order, second: Order) -> int:
    """Return the number of pairs of axes in opposite order."""
    return sum(
        second.index(before) > second.index(after) for before, after in combinations(first, 2)
    )
