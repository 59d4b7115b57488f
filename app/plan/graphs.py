"""CUDA graphs and static buffers of each action, and the proof that none is overwritten in use.

One graph is captured per layer, per kind of compute, and per *set*. A set is one instance of all
graphs of a chunk; it serves one microbatch at a time. A *slot* holds the static inputs that one
microbatch in a chunk owns from its forward to the end of its backward (its BackwardWeight if that
is split). Slots are reused first in, first out. A *pool* is a CUDA graph memory pool.

    in flight              sets of graphs        graphs                   slots
    never more than one    one per chunk         2·layers                 1
    key microbatch         one per microbatch    2·layers·microbatches    peak over all chunks
    key slot               one per slot          2·Σ layers·slots         sum of the chunks' peaks

Layers count over all chunks. The factor is 3 instead of 2 if backward is split, and 1 for forwards
alone.

Graphs are captured in the order of the list. The memory of a tensor returns to its pool when the
tensor is dead, and graphs captured later reuse it. That is sound for graphs that replay once per
step, in the order of their capture. At replay, a reused set may coexist with different microbatches
than at capture. It needs its own pool, unless no other set is alive at the same time, and sent
tensors must first be copied out of it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from typing import Literal

from app.plan.actions import Action, Backward, Compute, Forward, MicrobatchChunk, Wait

Key = Literal["microbatch", "slot"]
Held = tuple[str, int, int]  # name of the buffer, microbatch, chunk
Static = tuple[str, int, int]  # name of the buffer; chunk and set, or for inputs -1 and slot
Address = tuple[str, int, int]  # "slot" or "pool", its number, block in it


TOUCHED: Mapping[str, tuple[str, ...]] = {
    "F": ("input", "saved", "output", "scratch F"),
    "B": ("input", "saved", "output", "gradient", "scratch B"),
    "I": ("input", "saved", "output", "gradient", "queue", "scratch I"),
    "W": ("input", "saved", "queue", "scratch W"),
}  # letter of an action -> buffers of its microbatch that it reads or writes


@dataclass(frozen=True, slots=True)
class PoolOrder:
    """Capture order of the graphs of one pool, as Transformer Engine takes it."""

    chunks: tuple[int, ...]  # chunks that have graphs in the pool
    # per chunk: the first microbatch of each of its sets, in the order of their forwards
    firsts: tuple[tuple[int, ...], ...]
    order: tuple[int, ...]  # n for a forward through chunks[n - 1], −n for its backward

    def inputs(self, layers: Sequence[int]) -> int:
        """Return the most layer inputs alive at once; `layers` counts the layers of each chunk."""
        peak = now = 0
        for number in self.order:
            count = layers[self.chunks[abs(number) - 1]]
            now += count if number > 0 else -count
            peak = max(peak, now)
        return peak


@dataclass(frozen=True, slots=True)
class GraphPlan:
    """Graphs and static buffers that the microbatches of one rank use."""

    layers: tuple[int, ...]  # captured layers of each chunk
    kinds: int  # graphs per layer and set
    sets: Mapping[MicrobatchChunk, int]  # within the chunk
    slots: Mapping[MicrobatchChunk, int]  # over all chunks
    pool_per_slot: bool  # one pool per slot; otherwise one for all graphs
    copy_sent: bool  # outputs and gradients are copied out of graph memory before they are sent
    # per chunk: layers whose captured part needs a static input
    own_inputs: tuple[frozenset[int], ...]
    # by pool, if Transformer Engine captures; empty: we capture, in the order of the list
    orders: Mapping[int, PoolOrder] = field(default_factory=dict)

    @property
    def num_graphs(self) -> int:
        """Graphs that the rank captures: kinds · layers · sets, over its chunks."""
        return self.kinds * sum(
            self.layers[chunk]
            for chunk, _ in {(chunk, nth) for (_, chunk), nth in self.sets.items()}
        )

    @property
    def num_slots(self) -> int:
        """Slots that the rank allocates, over all chunks."""
        return len(set(self.slots.values()))

    @property
    def num_static_inputs(self) -> int:
        """Static inputs of layers: a slot has one for each layer of its chunks that needs one.

        Transformer Engine gives one to every layer, reusing the one that has been free for longest.
        """
        if self.orders:
            return sum(order.inputs(self.layers) for order in self.orders.values())
        places: dict[int, frozenset[int]] = {}
        for (_, chunk), slot in self.slots.items():
            places[slot] = places.get(slot, frozenset()) | self.own_inputs[chunk]
        return sum(map(len, places.values()))

    def set_of(self, mb: int, chunk: int) -> int:
        """Return which of the chunk's sets of graphs serves the microbatch."""
        return self.sets[mb, chunk]

    def slot_of(self, mb: int, chunk: int) -> int:
        """Return the slot that the microbatch owns while it is in flight in the chunk."""
        return self.slots[mb, chunk]

    def pool_of(self, mb: int, chunk: int) -> int:
        """Return the memory pool of the graphs that serve the microbatch."""
        return self.slots[mb, chunk] if self.pool_per_slot else 0


def plan_graphs(
    actions: Sequence[Action],
    num_layers_per_chunk: Sequence[int],
    key: Key = "microbatch",
    own_inputs: Sequence[Collection[int]] | None = None,
) -> GraphPlan:
    """Plan the graphs of one rank.

    actions: its list, lowered or not. num_layers_per_chunk: its captured layers. own_inputs: for
    each chunk, the layers (0 is its first) that have a static input, that is whose captured part
    does not directly follow that of the layer before; None means all. Raises ValueError for an
    unknown key and for a list with more chunks than num_layers_per_chunk.
    """
    if key not in ("microbatch", "slot"):
        raise ValueError(f"key={key!r} is neither microbatch nor slot")
    computes = [action for action in actions if isinstance(action, Compute)]
    layers = tuple(num_layers_per_chunk)
    chunks = {action.chunk for action in computes}
    if max(chunks, default=-1) >= len(layers):
        raise ValueError(
            f"the list has {max(chunks) + 1} chunks, but num_layers_per_chunk={list(layers)} "
            f"has {len(layers)}"
        )
    kinds = len({type(action) for action in computes})
    shared = _assign(computes, chunks)
    inputs = tuple(map(frozenset, map(range, layers) if own_inputs is None else own_inputs))
    if max(shared.values(), default=0) == 0:
        return GraphPlan(
            layers,
            kinds,
            shared,
            slots=shared,
            pool_per_slot=False,
            copy_sent=True,
            own_inputs=inputs,
        )
    if key == "microbatch":
        own = {place: place[0] for place in shared}
        return GraphPlan(
            layers,
            kinds,
            own,
            slots=shared,
            pool_per_slot=False,
            copy_sent=False,
            own_inputs=inputs,
        )
    sets: dict[MicrobatchChunk, int] = {}
    slots: dict[MicrobatchChunk, int] = {}
    for chunk in sorted(chunks):
        own = _assign(computes, [chunk])
        before = len(set(slots.values()))
        sets.update(own)
        slots.update((place, before + slot) for place, slot in own.items())
    return GraphPlan(
        layers, kinds, sets, slots=slots, pool_per_slot=True, copy_sent=True, own_inputs=inputs
    )


def for_transformer_engine(plan: GraphPlan, actions: Sequence[Action]) -> GraphPlan:
    """Return the plan for capture by Transformer Engine, one call per pool before a step.

    It counts to find the microbatch of a backward: raises ValueError for a list whose backwards of
    a chunk come in another order than its forwards, or are split. It reuses the memory of an input
    gradient after the next backward, so sent gradients are copied first.
    """
    firsts: dict[int, list[Compute]] = {}
    seen = set[tuple[str, int, int]]()
    for action in actions:
        if not isinstance(action, Compute) or not plan.layers[action.chunk]:
            continue
        if not isinstance(action, Forward | Backward):
            raise ValueError(f"{action} is half a backward, and graphs hold whole ones")
        used = action.letter, action.chunk, plan.set_of(action.mb, action.chunk)
        if used not in seen:
            seen.add(used)
            firsts.setdefault(plan.pool_of(action.mb, action.chunk), []).append(action)
    orders = {pool: _pool_order(captured) for pool, captured in firsts.items()}
    return replace(plan, copy_sent=True, orders=orders)


def _pool_order(captured: Sequence[Compute]) -> PoolOrder:
    chunks = sorted({action.chunk for action in captured})
    forwards, backwards = (
        [tuple(a.mb for a in captured if isinstance(a, kind) and a.chunk == c) for c in chunks]
        for kind in (Forward, Backward)
    )
    if forwards != backwards:
        raise ValueError(f"backwards of microbatches {backwards} after forwards of {forwards}")
    numbers = [
        (1 if isinstance(action, Forward) else -1) * (1 + chunks.index(action.chunk))
        for action in captured
    ]
    return PoolOrder(tuple(chunks), tuple(forwards), order=tuple(numbers))


def _assign(computes: Sequence[Compute], chunks: Collection[int]) -> dict[MicrobatchChunk, int]:
    """Return slots for the microbatches of `chunks`: the longest free one, otherwise a new one."""
    last = {(action.mb, action.chunk): position for position, action in enumerate(computes)}
    free: deque[int] = deque()
    slots: dict[MicrobatchChunk, int] = {}
    new = 0
    for position, action in enumerate(computes):
        place = action.mb, action.chunk
        if action.chunk not in chunks:
            continue
        if place not in slots:
            slots[place] = free.popleft() if free else new
            new = max(new, slots[place] + 1)
        if last[place] == position:
            free.append(slots[place])
    return slots


def check_graphs(actions: Sequence[Action], plan: GraphPlan) -> None:
    """Capture and replay a rank's list on numbered blocks of memory, sends in flight included.

    Each graph allocates the lowest free blocks of its pool, scratch included, when the list first
    reaches it. A block is free again after the last use of its first tenant. Raises ValueError,
    with the action and both tensors, if a replay then writes to a block that another action or a
    send still needs.
    """
    touched = [list(_touches(action, plan)) for action in actions]
    ends = {block: position for position, blocks in enumerate(touched) for block in blocks}
    statics = {block: _static(block, plan) for block in ends}
    static_addresses = _capture(touched, ends, statics, plan=plan)
    addresses = {block: static_addresses[static] for block, static in statics.items()}
    live: dict[Address, Held] = {}
    for position, action in enumerate(actions):
        for block in touched[position]:
            address = addresses[block]
            holds = live.setdefault(address, block)
            if holds != block:
                raise ValueError(
                    f"{action} writes {_name(block)} where {_name(holds)} is still needed: "
                    f"{address}"
                )
        for block in touched[position]:
            if ends[block] == position:
                del live[addresses[block]]


def _touches(action: Action, plan: GraphPlan) -> Iterator[Held]:
    """Yield the buffers that an action reads or writes.

    A Wait ends the reading of the sends it waits for.
    """
    if isinstance(action, Wait) and not plan.copy_sent:
        yield from (
            ("output" if op.flow == "F" else "gradient", op.mb, op.chunk)
            for op in action.ops
            if op.send
        )
    if not isinstance(action, Compute):
        return
    for name in TOUCHED[action.letter]:
        yield name, action.mb, action.chunk


def _static(block: Held, plan: GraphPlan) -> Static:
    """Return the static buffer of a block, which the microbatches of its slot or set share."""
    name, mb, chunk = block
    if name == "input":
        return name, -1, plan.slots[mb, chunk]
    return name, chunk, plan.sets[mb, chunk]


def _capture(
    touched: Sequence[Sequence[Held]],
    ends: Mapping[Held, int],
    statics: Mapping[Held, Static],
    plan: GraphPlan,
) -> dict[Static, Address]:
    """Return addresses of all static buffers, fixed by the first microbatch that uses each."""
    addresses: dict[Static, Address] = {}
    tenants: dict[Address, Held] = {}  # tenant of each block under capture
    pools: defaultdict[int, _Pool] = defaultdict(_Pool)
    for position, blocks in enumerate(touched):
        for block in blocks:
            static = statics[block]
            if static not in addresses:
                slot = plan.slot_of(*block[1:])
                pool = plan.pool_of(*block[1:])
                address = (
                    ("slot", slot, 0) if block[0] == "input" else ("pool", pool, pools[pool].take())
                )
                addresses[static], tenants[address] = address, block
        for block in blocks:
            if ends[block] != position:
                continue
            kind, pool, number = address = addresses[statics[block]]
            if kind == "pool" and tenants[address] == block:
                heappush(pools[pool].free, number)
    return addresses


@dataclass(slots=True)
class _Pool:
    """Pool of memory blocks, numbered from 0."""

    size: int = 0
    free: list[int] = field(default_factory=list)  # a heap

    def take(self) -> int:
        """Take the lowest free block, or a new one."""
        if self.free:
            return heappop(self.free)
        self.size += 1
        return self.size - 1


def _name(block: Held) -> str:
    return f"{block[0]} of microbatch {block[1]} in chunk {block[2]}"
