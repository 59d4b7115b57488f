"""Transformer Engine's `make_graphed_callables` on a CPU: what it promises, and what it demands.

A port of how version 2.20 treats callables in an order (`_order`): trial runs with gradients that
mean nothing, static inputs handed on first in, first out, one set of output gradients per kind,
outputs and input gradients held as long as it holds them. Graphs are the recordings of the
project's stand-in, in whose pools memory is handed on and filled with NaN. Replays must come in the
order of capture, which graphs that share a pool rely on.
"""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from app.engine.capture.stand_in import HostRecording, Pool
from app.optim.distributed import DistributedOptimizer

Hooks = dict[str, dict[int, Callable[[nn.Module], None]]]
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Replays:
    """Parameter hooks, which do not run when a GPU replays: here they run unheard."""

    # made last; weak, since a forked process that let go of its parent's would wait
    # for threads which it does not have
    optimizer: weakref.ref[DistributedOptimizer]

    @classmethod
    def unheard(cls) -> AbstractContextManager[object]:
        optimizer = cls.optimizer()
        assert optimizer is not None, "its engine trains"
        return optimizer.listing_arrivals()


def install(patch: pytest.MonkeyPatch) -> None:
    """Have engines take this for Transformer Engine."""
    made = DistributedOptimizer.__init__

    def noted(self: DistributedOptimizer, *given: Any, **named: Any) -> None:
        made(self, *given, **named)
        Replays.optimizer = weakref.ref(self)

    patch.setattr(DistributedOptimizer, "__init__", noted)
    for user in ("build", "step.engine"):
        patch.setattr(f"app.engine.{user}.graphed_callables", lambda: make_graphed_callables)


class Captured:
    """One callable for one microbatch, between capture and replays."""

    def __init__(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self.module = module
        self.inputs = inputs
        self.alive: list[Tensor] = []  # as graphs have written them; grad_fn included
        self.grads: list[Tensor | None] = []
        self.outputs: Sequence[Tensor] | None = None  # these own their memory, and hold it
        self.input_grads: Sequence[Tensor] | None = None
        self.forward_graph: HostRecording | None = None
        self.backward_graph: HostRecording | None = None

    def forward(self) -> list[Tensor]:
        with torch.enable_grad():
            self.alive = list(self.module(*self.inputs))
        return self.alive

    def backward(self) -> list[Tensor]:
        outputs, self.alive = self.alive, []
        assert outputs, "a forward comes before its backward"
        known = [(out, grad) for out, grad in zip(outputs, self.grads, strict=True)
                 if grad is not None]  # fmt: skip
        torch.autograd.backward([out for out, _ in known], [grad for _, grad in known])
        found = [x.grad for x in self.inputs if x.requires_grad]
        assert all(grad is not None for grad in found), "the grad is None after backward pass"
        for x in self.inputs:
            x.grad = None
        return [grad for grad in found if grad is not None]

    def garbage(self) -> None:
        """Output gradients of a trial run: memory as it was found."""
        self.grads = [torch.full_like(out, float("nan")) if out.requires_grad else None
                      for out in self.alive]  # fmt: skip


class Order:
    """Whose turn it is among the graphs of a pool."""

    def __init__(self) -> None:
        self.graphs: list[HostRecording] = []
        self.turn = 0

    def replay(self, graph: HostRecording) -> Sequence[Tensor]:
        assert self.graphs[self.turn] is graph, "graphs of a pool replay in the order of capture"
        self.turn = (self.turn + 1) % len(self.graphs)
        return graph.replay()


def make_graphed_callables(
    modules: tuple[nn.Module, ...],
    sample_args: list[tuple[Tensor, ...]],
    num_warmup_iters: int = 3,
    *,
    _order: list[int],
    _num_layers_per_chunk: list[int],
    pool: Pool,
    _reuse_graph_input_output_buffers: bool,
    capture_time_hooks: list[Hooks],
) -> tuple[Graphed, ...]:
    chunks = len(_num_layers_per_chunk)
    mbs = len(_order) // chunks // 2
    assert max(_order) == chunks and mbs * chunks * 2 == len(_order)
    assert len(modules) == len(capture_time_hooks) == sum(_num_layers_per_chunk)
    assert len(sample_args) == len(modules) * mbs
    assert _reuse_graph_input_output_buffers and num_warmup_iters >= 1
    assert all(not getattr(module, hooks) for module in modules for hooks in HOOKS)
    assert not [*nn.ModuleList(modules).parameters()], "their gradients would be returned"
    steps = list(_steps(_order, _num_layers_per_chunk, mbs))
    inputs = _handed_on(steps, sample_args)
    state = torch.get_rng_state()
    captured = [
        Captured(modules[callable_of], inputs[place])
        for place, callable_of in sorted({(place, module) for _, place, module, _ in steps})
    ]
    for _ in range(num_warmup_iters):
        for forward, place, module, _ in steps:
            one = captured[place]
            if forward:
                one.forward()
                continue
            one.garbage()
            one.backward()
            _run(capture_time_hooks[module], "backward_hooks", one.module)
    order = Order()
    _capture(steps, captured, order, pool=pool, hooks=capture_time_hooks)
    torch.set_rng_state(state)
    return tuple(Graphed(one, order) for one in captured)


Step = tuple[bool, int, int, bool]  # forward, place among samples, callable, whether last of chunk


def _steps(order: list[int], layers: list[int], mbs: int) -> list[Step]:
    """Return the steps in order; the n-th forward of a chunk belongs to its n-th backward."""
    first = [sum(layers[:chunk]) for chunk in range(len(layers))]
    seen: defaultdict[int, int] = defaultdict(int)
    found = []
    for number in order:
        chunk = abs(number) - 1
        nth = seen[number]
        seen[number] += 1
        every = range(layers[chunk]) if number > 0 else reversed(range(layers[chunk]))
        for layer in every:
            place = first[chunk] * mbs + nth * layers[chunk] + layer
            last = layer == (layers[chunk] - 1 if number > 0 else 0)
            found.append((number > 0, place, first[chunk] + layer, last))
    return found


def _handed_on(
    steps: Sequence[Step], samples: list[tuple[Tensor, ...]]
) -> list[tuple[Tensor, ...]]:
    """Static inputs: those of microbatches that have ended serve the next ones of their kind."""
    free: defaultdict[Any, deque[int]] = defaultdict(deque)
    ended: list[int] = []
    for forward, place, _, last in steps:
        kind = tuple((x.shape, x.dtype, x.layout) for x in samples[place])
        if forward:
            if free[kind]:
                samples[place] = samples[free[kind].popleft()]
            continue
        ended.append(place)
        if last:  # a chunk's are free together, in the order of its forward
            for each in reversed(ended):
                free[tuple((x.shape, x.dtype, x.layout) for x in samples[each])].append(each)
            ended.clear()
    return samples


def _capture(
    steps: Sequence[Step],
    captured: Sequence[Captured],
    order: Order,
    *,
    pool: Pool,
    hooks: Sequence[Hooks],
) -> None:
    grads: dict[Any, list[Tensor | None]] = {}
    before: Captured | None = None  # the backward before, of the same chunk
    ended: Captured | None = None  # the last backward of the chunk before
    for forward, place, module, last in steps:
        one = captured[place]
        if forward:
            one.forward_graph, one.outputs = HostRecording.of(one.forward, pool)
            order.graphs.append(one.forward_graph)
            continue
        kind = tuple((out.shape, out.dtype) for out in one.alive if out.requires_grad)
        if kind not in grads:
            one.garbage()
            grads[kind] = one.grads
        one.grads = grads[kind]
        one.backward_graph, one.input_grads = HostRecording.of(one.backward, pool)
        order.graphs.append(one.backward_graph)
        _run(hooks[module], "backward_hooks", one.module)
        one.outputs = None
        if before is not None:
            before.input_grads = None
        before = one
        if last:
            if ended is not None:
                ended.input_grads = None
            before, ended = None, one


def _run(hooks: Hooks, name: str, module: nn.Module) -> None:
    for hook in hooks.get(name, {}).values():
        assert hook(module) is None, "capture_time_hooks must not return a value"


class Graphed:
    """A captured callable: replays, copying what lies elsewhere to where graphs read it."""

    def __init__(self, captured: Captured, order: Order) -> None:
        self.captured: Captured | None = captured
        self.order = order

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return _Replay.apply(self, *inputs)

    def reset(self) -> None:
        self.captured = None

    @property
    def graphs(self) -> Captured:
        if self.captured is None:
            raise RuntimeError("This graphed callable has been reset and can no longer be used.")
        return self.captured


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graphed: Graphed, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.graphed = graphed
        for static, value in zip(graphed.graphs.inputs, inputs, strict=True):
            if static.data_ptr() != value.data_ptr():
                static.copy_(value)
        return tuple(out.detach() for out in graphed.order.replay(graphed.graphs.forward_graph))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        graphed = ctx.graphed
        for static, grad in zip(graphed.graphs.grads, grads, strict=True):
            if static is not None and static.data_ptr() != grad.data_ptr():
                static.copy_(grad)
        with Replays.unheard(), torch.enable_grad():
            found = graphed.order.replay(graphed.graphs.backward_graph)
        return None, *(grad.detach() for grad in found)
