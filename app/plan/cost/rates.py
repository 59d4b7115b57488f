"""Seconds of kernels and of what ranks send, by a measured profile of a GPU; docs/planning.md has
the formulas and where they come from.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import log2

from app.choices import Fp8Recipe
from app.config import HardwareProfile, Run
from app.plan.cost.nodes import NodeSpan, node_span
from app.plan.cost.traffic import share_across
from app.plan.dispatchers.choose import run_dispatcher
from app.plan.dispatchers.static import PlannedStatic
from app.plan.groups import ETP_EP, Group, Way
from app.plan.layout import ParallelLayout
from app.plan.trace.fp8 import MOVED, MOVED_ROWS
from app.plan.trace.parts import BYTES
from app.plan.trace.trace import Operation, Work

TERA, GIGA, MICRO = 1e12, 1e9, 1e-6
MIXED_BYTES = 2  # of an element that profiles are measured with
SUMS = 8  # bytes of reading and writing an element's float32 sum
# speed of cuDNN's backward in a fixed order, over that of its fastest, by head width
CUDNN_ORDERED = ((64, 0.76), (128, 0.89), (192, 0.75))
FLASH_ANY_ORDER = 1.66  # speed of torch's Flash backward in no fixed order, over that in one
FLASH = (Work.ordered_attention, Work.gathered_attention)

Pair = tuple[float, ...]  # forward, backward


@dataclass(frozen=True, slots=True)
class Kernels:
    """Seconds of operations on one GPU."""

    profile: HardwareProfile

    def memory(self, work: Work) -> Pair:
        """GB/s of a kind of kernels that wait for memory."""
        profile = self.profile
        match work:
            case Work.activation:
                return profile.activation_gb_s
            case Work.heads:
                return profile.heads_gb_s
            case Work.norm:
                return profile.norm_gb_s
            case Work.loss:
                return profile.loss_gb_s
            case Work.rows:
                return profile.rows_gb_s
            case _:
                return profile.other_gb_s

    def moved(self, moved: float, work: Work, backward: bool = False) -> float:
        """Of so many bytes read and written."""
        return moved / (self.memory(work)[backward] * GIGA)

    def started(self, kernels: int) -> float:
        """From the end of each kernel to the start of the next."""
        return kernels * self.profile.kernel_us * MICRO

    def gemm(self, op: Operation, gradient: bool = False) -> float:
        """Of one of an operation's products: forward's, backward's, or that of the gradient of the
        weight, whose bytes are those of its sum.
        """
        profile = self.profile
        flops = op.flops
        rate = profile.gemm_tflops
        if op.work is Work.grouped:
            # tiles that experts fill with others' rows, or nobody's
            flops += round(2 * profile.grouped_tile * op.weight / MIXED_BYTES)
            rate = profile.grouped_tflops
        elif op.work is Work.router_matmul:
            rate = profile.router_tflops
        rate *= self.speedup(op, gradient)
        moved = op.used * (_read(op) + _made(op)) + (0 if gradient else op.weight)
        return flops / (rate * TERA) + profile.gemm_memory * self.moved(moved, Work.other)

    def speedup(self, op: Operation, gradient: bool = False) -> float:
        """Of its products over those in 16 bits, or of the gradient of its weight; where nobody
        measured them, with all that they quantise.
        """
        how = op.fp8
        if how is None:
            return 1.0
        if how.recipe is None and self.profile.fp8_grouped_tflops is not None:
            # the gradient of the weight is a product in 16 bits
            return (
                1.0 if gradient else self.profile.fp8_grouped_tflops / self.profile.grouped_tflops
            )
        measured = fp8_tflops(self.profile, how.recipe)
        if measured is None:
            return how.speedups[gradient]
        return measured / self.profile.gemm_tflops

    def quantised(self, elements: int, recipe: Fp8Recipe | None) -> float:
        """Of quantising so many elements; `recipe`: None for rows of experts."""
        if recipe is None and self.profile.fp8_grouped_tflops is not None:
            return self.moved(MOVED_ROWS * elements, Work.other)
        rate = self.profile.fp8_quantise_gb_s
        if rate is None or recipe is None or fp8_tflops(self.profile, recipe) is None:
            return 0.0
        return MOVED[recipe] * elements / (rate * GIGA)

    def sums(self, op: Operation) -> float:
        """Of adding the gradient of a weight to its sum."""
        return SUMS * op.weight / MIXED_BYTES / (self.profile.sums_gb_s * GIGA)

    def attention(self, op: Operation, width: int, length: int) -> tuple[float, float]:
        """Forward and backward, by head width and tokens of a sequence: rates between two measured
        widths in proportion, and between two lengths by their logarithms.
        """
        ordered = 2 if op.work in FLASH else 0
        forward, backward = (
            self._attention_rate(width, length, column + ordered) for column in (2, 3)
        )
        if op.work is Work.gathered_attention:
            backward *= FLASH_ANY_ORDER
        elif op.work is Work.cudnn_ordered_attention:
            backward *= _between(CUDNN_ORDERED, width)
        return op.flops / (forward * TERA), 2 * op.flops / (backward * TERA)

    def _attention_rate(self, width: int, length: int, column: int) -> float:
        by_width: dict[float, list[tuple[float, float]]] = defaultdict(list)
        for row in self.profile.attention:
            by_width[row[0]].append((log2(row[1]), row[column]))
        rates = [(own, _between(found, log2(length))) for own, found in by_width.items()]
        return _between(rates, width)


def fp8_tflops(profile: HardwareProfile, recipe: Fp8Recipe | None) -> float | None:
    """Of products in FP8 by a recipe; None: not measured."""
    match recipe:
        case Fp8Recipe.current:
            return profile.fp8_current_tflops
        case Fp8Recipe.delayed:
            return profile.fp8_delayed_tflops
        case Fp8Recipe.block:
            return profile.fp8_block_tflops
        case None:
            return None


def _read(op: Operation) -> int:
    return sum(value.bytes for value in op.reads)


def _made(op: Operation) -> int:
    return sum(value.bytes for value in op.makes)


def _between(points: Sequence[tuple[float, float]], at: float) -> float:
    """By linear interpolation between sorted points; outside of them the nearest one's."""
    for (low, first), (high, second) in pairwise(points):
        if low <= at <= high:
            return first + (at - low) / (high - low) * (second - first)
    return min(points, key=lambda point: abs(point[0] - at))[1]


@dataclass(frozen=True, slots=True)
class Links:
    """Seconds of what a rank sends in its groups."""

    run: Run
    layout: ParallelLayout
    profile: HardwareProfile
    peers: bool  # whether tokens travel through the memory of other GPUs
    spans: dict[Group, NodeSpan] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, run: Run, layout: ParallelLayout, profile: HardwareProfile) -> Links:
        """Of a run's groups in this layout."""
        dispatcher = run_dispatcher(run, layout)
        peers = isinstance(dispatcher, PlannedStatic) and dispatcher.peer
        return cls(run, layout, profile, peers=peers)

    def by_peers(self, group: Group) -> bool:
        """Whether a group's kernels move what they compute themselves."""
        return self.peers and group is ETP_EP

    def seconds(self, group: Group, way: Way, size: int) -> float:
        """Of a collective, or an exchange by peers, in which this rank sends `size` bytes."""
        if not size:
            return 0.0
        return self.profile.collective_us * MICRO + max(self.parts(group, way, size))

    def parts(self, group: Group, way: Way, size: int) -> tuple[float, float]:
        """Seconds of bytes inside of nodes and across, which run at the same time."""
        share = share_across(way, self._span(group), group.size(self.layout))
        rate = self._rate(group, way)
        network = self.run.hardware.network_gb_s
        return size * float(1 - share) / (rate * GIGA), size * float(share) / (network * GIGA)

    def _rate(self, group: Group, way: Way) -> float:
        if self.by_peers(group):
            return self.profile.peer_gb_s
        rates: Mapping[Way, float] = {
            Way.ring: self.profile.ring_gb_s,
            Way.all_to_all: self.profile.all_to_all_gb_s,
            Way.neighbours: self.profile.send_gb_s,
        }
        return rates[way]

    def _span(self, group: Group) -> NodeSpan:
        if group not in self.spans:
            sizes = self.layout.sizes(group.expert)
            per_node = self.run.parallel.gpus_per_node
            ends = group.ends_only
            self.spans[group] = node_span(sizes, group.axes, per_node, ends_only=ends)
        return self.spans[group]


def measured(run: Run) -> HardwareProfile | None:
    """The profile that a run's times are planned from; None: none is given, or elements are not of
    16 bits, for which none is measured.
    """
    return run.hardware.profile if BYTES[run.precision.params] == MIXED_BYTES else None
