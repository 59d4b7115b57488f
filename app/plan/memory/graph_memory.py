"""Memory of CUDA graphs: graph objects, static inputs, tensors that leave graphs, and pools.

Graphs with key=microbatch share one pool and reuse in it the memory of dead microbatches: it is as
large as the most that is alive at once. Graphs of a slot have a pool of their own, which holds all
that one microbatch needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from app.plan.graphs import GraphPlan
from app.plan.memory.activations import ChunkActivations, GraphShare
from app.plan.memory.overheads import BACKWARD_KERNELS, GRAPH, GRAPH_KERNEL, MIB
from app.plan.memory.peak import Peak


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """One line of a rank's memory."""

    name: str
    bytes: int
    note: str  # how it comes about, with its numbers


def partial_graph_parts(
    plan: GraphPlan, chunks: Sequence[ChunkActivations], peak: Peak
) -> tuple[MemoryPart, ...]:
    """Return the memory that partial graphs add to everything outside of them."""
    shares = [chunk.usual.graph for chunk in chunks]
    border = chunks[0].border
    sets = [
        len({nth for (_, chunk), nth in plan.sets.items() if chunk == index})
        for index in range(len(chunks))
    ]
    forward = sum(count * share.kernels for count, share in zip(sets, shares, strict=True))
    kernels = forward * (1 + BACKWARD_KERNELS)
    kept, cut, how = _pools(plan, shares, sets, peak=peak)
    return (
        graph_objects(plan.num_graphs, kernels),
        _static_inputs(plan, shares, border),
        MemoryPart("cut tensors", cut, f"what graphs hand on, {how}"),
        MemoryPart("graph pool", kept, f"kept in graphs and their scratch, {how}"),
    )


def _static_inputs(plan: GraphPlan, shares: Sequence[GraphShare], border: int) -> MemoryPart:
    """Return the static buffers: inputs and context per slot, and shared output gradients."""
    inputs = plan.num_static_inputs
    context = max(share.context for share in shares)
    gradients = _gradients(plan, shares)
    size = inputs * border + plan.num_slots * context + gradients
    parts = (
        f"{inputs} inputs × {border / MIB:.1f} MiB, {plan.num_slots} contexts × "
        f"{context / MIB:.1f} MiB"
    )
    return MemoryPart(
        "static inputs",
        size,
        f"{parts}, gradients of layers' outputs {gradients / MIB:.1f} MiB",
    )


def _gradients(plan: GraphPlan, shares: Sequence[GraphShare]) -> int:
    """Return bytes of static gradients of layers' outputs.

    All graphs share one buffer; with Transformer Engine, all of a kind in a pool do.
    """

    def kinds(chunks: Iterable[int]) -> list[int]:
        found = {part: size for chunk in chunks for part, size in shares[chunk].gradients.items()}
        return list(found.values())

    if plan.orders:
        return sum(sum(kinds(order.chunks)) for order in plan.orders.values())
    return max(kinds(range(len(shares))), default=0)


def _pools(
    plan: GraphPlan, shares: Sequence[GraphShare], sets: Sequence[int], peak: Peak
) -> tuple[int, int, str]:
    """Return bytes saved with scratch, bytes of tensors that leave graphs, and a note."""
    if not plan.pool_per_slot:
        scratch = max(share.scratch for share in shares)
        return peak.pool_kept + scratch, peak.pool_cut, "at most at once in one pool"
    kept = sum(
        count * (share.kept + share.scratch) for count, share in zip(sets, shares, strict=True)
    )
    return (
        kept,
        sum(count * share.cut for count, share in zip(sets, shares, strict=True)),
        f"in {sum(sets)} pools",
    )


def graph_objects(graphs: int, kernels: int) -> MemoryPart:
    """Return the driver's memory of instantiated graphs."""
    note = f"{graphs} × {GRAPH // 1024} KiB, {kernels:,} kernels × {GRAPH_KERNEL:,} bytes"
    return MemoryPart("graph objects", graphs * GRAPH + kernels * GRAPH_KERNEL, note)
