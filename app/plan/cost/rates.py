"""Seconds of kernels and of communication, from a measured profile of a GPU (docs/planning.md)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import log2

from app.choices import Fp8Recipe
from app.config import HardwareProfile, Run
from app.plan.cost.traffic import share_across
from app.plan.groups import ETP_EP, Group, Way
from app.plan.layout import ParallelLayout
from app.plan.nodes import NodeSpan, node_span
from app.plan.parts.attention import MOST_QUERIES
from app.plan.parts.dispatcher import run_dispatcher
from app.plan.parts.fp8 import MOVED_ROWS, RECIPES
from app.plan.parts.static import PlannedStatic
from app.plan.parts.trace import BYTES, Operation, Work

TERA, GIGA, MICRO = 1e12, 1e9, 1e-6
MIXED_BYTES = 2  # bytes of an element in profiles
SUMS = 8  # bytes of reading and writing an element's fp32 main gradient
# speed of cuDNN's deterministic backward over its fastest one, by head width
CUDNN_ORDERED = ((64, 0.76), (128, 0.89), (192, 0.75))
FLASH_ANY_ORDER = 1.66  # speed of torch's Flash backward over its deterministic one
# bytes moved per pair of a query and a key of a block with capped scores, forward and backward, and
# passes over logits in units of reading them once: plain, scaled, capped (bench/LOG.md)
CAPPED_BYTES = 88, 205
PLAIN_LOGITS, SCALED_LOGITS, CAPPED_LOGITS = (1, 2), (3, 4), (7, 23)
# speed of the delta rule's small matmuls over that of large GEMMs: assumed, not measured
LINEAR_SHARE = 0.15
FLASH = (Work.ordered_attention, Work.gathered_attention)

Pair = tuple[float, ...]  # forward, backward


@dataclass(frozen=True, slots=True)
class Kernels:
    """Seconds of operations on one GPU."""

    profile: HardwareProfile

    def memory(self, work: Work) -> Pair:
        """Return GB/s of a kind of memory-bound kernel."""
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
        """Return seconds of reading and writing so many bytes."""
        return moved / (self.memory(work)[backward] * GIGA)

    def started(self, kernels: int) -> float:
        """Return the gaps between kernels: from the end of one to the start of the next."""
        return kernels * self.profile.kernel_us * MICRO

    def gemm(self, op: Operation, gradient: bool = False) -> float:
        """Return seconds of one of an operation's GEMMs: output, input gradient, or weight
        gradient.

        gradient=True is the weight gradient, whose output is counted by `sums`.
        """
        profile = self.profile
        flops = op.flops
        rate = profile.gemm_tflops
        if op.work is Work.grouped:
            # partial tiles at the end of each expert's rows
            flops += round(2 * profile.grouped_tile * op.weight / MIXED_BYTES)
            rate = profile.grouped_tflops
        elif op.work is Work.router_matmul:
            rate = profile.router_tflops
        rate *= self.speedup(op, gradient)
        moved = op.used * (op.reads + op.makes) + (0 if gradient else op.weight)
        return flops / (rate * TERA) + profile.gemm_memory * self.moved(moved, Work.other)

    def speedup(self, op: Operation, gradient: bool = False) -> float:
        """Return the speed of its FP8 GEMMs over 16 bits, or of its weight gradient.

        Without a measured speed, it includes quantization.
        """
        how = op.fp8
        if how is None:
            return 1.0
        if how.recipe is None and self.profile.fp8_grouped_tflops is not None:
            # the weight gradient is a 16-bit GEMM
            return (
                1.0 if gradient else self.profile.fp8_grouped_tflops / self.profile.grouped_tflops
            )
        measured = fp8_tflops(self.profile, how.recipe)
        if measured is None:
            return how.speedups[gradient]
        return measured / self.profile.gemm_tflops

    def quantised(self, elements: int, recipe: Fp8Recipe | None) -> float:
        """Return seconds of quantizing so many elements; recipe None is for rows of experts."""
        if recipe is None and self.profile.fp8_grouped_tflops is not None:
            return self.moved(MOVED_ROWS * elements, Work.other)
        rate = self.profile.fp8_quantise_gb_s
        if rate is None or recipe is None or fp8_tflops(self.profile, recipe) is None:
            return 0.0
        return RECIPES[recipe].moved * elements / (rate * GIGA)

    def sums(self, op: Operation) -> float:
        """Return seconds of accumulating a weight gradient in the main gradient."""
        return SUMS * op.weight / MIXED_BYTES / (self.profile.sums_gb_s * GIGA)

    def attention(self, op: Operation, width: int, length: int) -> tuple[float, float]:
        """Return seconds of forward and backward, by head width and tokens of a sequence.

        Speeds are interpolated linearly between measured widths, and between lengths by their
        logarithms.
        """
        if op.work is Work.capped_attention:
            return self._capped(op, width, length)
        if op.work is Work.linear_attention:
            rate = LINEAR_SHARE * self.profile.gemm_tflops * TERA
            return op.flops / rate, 2 * op.flops / rate
        ordered = 2 if op.work in FLASH else 0
        forward, backward = (
            self._attention_rate(width, length, column + ordered) for column in (2, 3)
        )
        if op.work is Work.gathered_attention:
            backward *= FLASH_ANY_ORDER
        elif op.work is Work.cudnn_ordered_attention:
            backward *= _between(CUDNN_ORDERED, width)
        return op.flops / (forward * TERA), 2 * op.flops / (backward * TERA)

    def _capped(self, op: Operation, width: int, length: int) -> tuple[float, float]:
        """Return seconds of attention with capped scores, bound by memory: in blocks on the
        diagonal, half of the scores are masked.
        """
        pairs = op.flops / (4 * width) * (1 + MOST_QUERIES / length)
        forward, backward = CAPPED_BYTES
        return (
            self.moved(forward * pairs, Work.other),
            self.moved(backward * pairs, Work.other, backward=True),
        )

    def _attention_rate(self, width: int, length: int, column: int) -> float:
        by_width: dict[float, list[tuple[float, float]]] = defaultdict(list)
        for row in self.profile.attention:
            by_width[row[0]].append((log2(row[1]), row[column]))
        rates = [(own, _between(found, log2(length))) for own, found in by_width.items()]
        return _between(rates, width)


def fp8_tflops(profile: HardwareProfile, recipe: Fp8Recipe | None) -> float | None:
    """Return the speed of FP8 GEMMs with a recipe; None if not measured."""
    return None if recipe is None else getattr(profile, f"fp8_{recipe.value}_tflops", None)


def _between(points: Sequence[tuple[float, float]], at: float) -> float:
    """Interpolate linearly between sorted points.

    Outside of them return the nearest one's value.
    """
    for (low, first), (high, second) in pairwise(points):
        if low <= at <= high:
            return first + (at - low) / (high - low) * (second - first)
    return min(points, key=lambda point: abs(point[0] - at))[1]


@dataclass(frozen=True, slots=True)
class Links:
    """Seconds of communication in a rank's groups."""

    run: Run
    layout: ParallelLayout
    profile: HardwareProfile
    peers: bool  # tokens travel through other GPUs' memory (symmetric memory)
    # seconds of a byte inside of nodes and across, by (group's name, way)
    costs: dict[tuple[str, Way], tuple[float, float]] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, run: Run, layout: ParallelLayout, profile: HardwareProfile) -> Links:
        """Build the links of a run's groups in this layout."""
        dispatcher = run_dispatcher(run, layout)
        peers = isinstance(dispatcher, PlannedStatic) and dispatcher.peer
        return cls(run, layout, profile, peers=peers)

    def by_peers(self, group: Group) -> bool:
        """Return whether the group's tokens move inside compute kernels, over symmetric memory."""
        return self.peers and group is ETP_EP

    def seconds(self, group: Group, way: Way, size: int) -> float:
        """Return seconds of a collective or peer exchange that sends `size` bytes from this
        rank.
        """
        if not size:
            return 0.0
        return self.profile.collective_us * MICRO + max(self.parts(group, way, size))

    def parts(self, group: Group, way: Way, size: int) -> tuple[float, float]:
        """Return seconds of the bytes inside of nodes and across, which run at the same time."""
        key = group.name, way
        if key not in self.costs:
            share = share_across(way, self._span(group), group.size(self.layout))
            rates = self._rate(group, way) * GIGA, self.run.hardware.network_gb_s * GIGA
            self.costs[key] = float(1 - share) / rates[0], float(share) / rates[1]
        near, far = self.costs[key]
        return size * near, size * far

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
        sizes = self.layout.sizes(group.expert)
        per_node = self.run.parallel.gpus_per_node
        return node_span(sizes, group.axes, per_node, ends_only=group.ends_only)


def measured(run: Run) -> HardwareProfile | None:
    """Return the profile that a run's times are planned from.

    None if there is none, or if parameters are not 16-bit, for which no profile exists.
    """
    return run.hardware.profile if BYTES[run.precision.params] == MIXED_BYTES else None
