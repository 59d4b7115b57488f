"""Captured part of one layer for one set of graphs: forward, backward and their memory.

Shapes: B sequences, s tokens per sequence of this rank, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from app.engine.capture.recorder import Recorder, Recording
from app.engine.capture.static import Buffer
from app.engine.capture.tree import Rebuild, flatten
from app.model.block import Phase
from app.optim.distributed import DistributedOptimizer
from app.optim.grad_buckets import Arrival
from app.torch_versions import unowned


@dataclass(frozen=True, slots=True)
class PhaseRange:
    """Captured phases of a layer: those from `start` up to, not including, `stop`."""

    start: int
    stop: int

    @classmethod
    def of(cls, phases: Sequence[Phase], names: Collection[str]) -> PhaseRange | None:
        """Find the range of phases with these names, which must be adjacent; None without any."""
        places = [place for place, phase in enumerate(phases) if phase.name in names]
        if not places:
            return None
        start = places[0]
        stop = places[-1] + 1
        assert len(places) == stop - start, "the configuration's rules allow one part per layer"
        assert not any(phase.host_sync for phase in phases[start:stop]), (
            "nothing captured waits for the device"
        )
        return cls(start, stop)


class CapturedInterval:
    """Graphed callable: differentiable function of hidden states, recorded at its first call and
    then replayed.

    `function` takes hidden states and returns the interval's outputs by name. Its input is copied
    to a static buffer, unless the interval is chained: then the input is the output of the
    captured interval before it, which always has the same address. Parameter gradients are added
    to the main gradients within the graph; the optimizer counts their arrivals after every replay.
    """

    def __init__(
        self,
        function: Callable[[Tensor], dict[str, object]],
        recorder: Recorder,
        pool: int,
        optimizer: DistributedOptimizer,
        input_buffer: Buffer | None,
        grad_buffer: Callable[[int], Buffer | None],
    ) -> None:
        self.function = function
        self.recorder = recorder
        self.pool = pool
        self.optimizer = optimizer
        self.input_buffer = input_buffer  # None if chained
        self.grad_buffer = grad_buffer  # of the gradient of the n-th output tensor
        self.forward_recording: Recording | None = None
        self.backward_recording: Recording | None = None
        self.input: Tensor | None = None
        self.grads: list[Tensor | None] = []
        self.rebuild: Rebuild[dict[str, object]] | None = None
        self.differentiable: list[bool] = []  # per output tensor
        # input and output tensors of the last recorded forward
        self.left_for_backward: tuple[Tensor, Sequence[Tensor]] | None = None
        self.arrivals: list[Arrival] = []  # of parameter gradients, in one backward

    def __call__(self, x_BsD: Tensor) -> dict[str, object]:
        """Run the interval on hidden states and return its outputs by name."""
        outputs = _Replayed.apply(self, x_BsD)
        assert self.rebuild is not None, "set by the first forward"
        return self.rebuild(outputs)

    def forward(self, x_BsD: Tensor) -> Sequence[Tensor]:
        """Return the output tensors; records at the first call, then replays."""
        if self.forward_recording is not None:
            _put(self.input, x_BsD)
            return self.forward_recording.replay()
        self.input = _place(x_BsD, self.input_buffer)
        self.forward_recording, outputs = self.recorder.record(self._forward, self.pool)
        self.input = _without_owning(self.input, self.input_buffer)
        return outputs

    def _forward(self) -> Sequence[Tensor]:
        assert self.input is not None
        with torch.enable_grad():
            leaf = self.input.detach().requires_grad_()
            outputs, self.rebuild = flatten(self.function(leaf))
        self.left_for_backward = leaf, outputs
        self.differentiable = [output.requires_grad for output in outputs]
        return outputs

    def backward(self, grads: Sequence[Tensor | None]) -> Tensor:
        """Return the input's gradient from those of the output tensors."""
        if self.backward_recording is not None:
            for static, grad in zip(self.grads, grads, strict=True):
                assert (static is None) == (grad is None), (
                    "the same outputs have gradients in every microbatch"
                )
                _put(static, grad)
            # Listed, not counted: the CPU stand-in reruns the hooks, a CUDA graph runs none.
            with self.optimizer.listing_arrivals():
                grad_BsD = self.backward_recording.replay()[0]
        else:
            grad_BsD = self._record_backward(grads)
        self.optimizer.count_listed(self.arrivals)
        return grad_BsD

    def _record_backward(self, grads: Sequence[Tensor | None]) -> Tensor:
        buffers = [self.grad_buffer(nth) for nth in range(len(grads))]
        self.grads = [
            None if g is None else _place(g, buffer)
            for g, buffer in zip(grads, buffers, strict=True)
        ]
        with self.optimizer.listing_arrivals() as self.arrivals:
            self.backward_recording, (grad_BsD,) = self.recorder.record(self._backward, self.pool)
        self.grads = [
            _without_owning(g, buffer) for g, buffer in zip(self.grads, buffers, strict=True)
        ]
        return grad_BsD

    def _backward(self) -> Sequence[Tensor]:
        assert self.left_for_backward is not None, "a forward comes before its backward"
        (leaf, outputs), self.left_for_backward = self.left_for_backward, None
        known = [
            (output, grad)
            for output, grad in zip(outputs, self.grads, strict=True)
            if grad is not None
        ]
        torch.autograd.backward([output for output, _ in known], [grad for _, grad in known])
        assert leaf.grad is not None, "outputs depend on the input"
        return (leaf.grad,)


class _Replayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, interval: CapturedInterval, x_BsD: Tensor) -> tuple[Tensor, ...]:
        ctx.interval = interval
        ctx.set_materialize_grads(False)
        outputs = tuple(output.detach() for output in interval.forward(x_BsD))
        ctx.mark_non_differentiable(
            *(out for out, grad in zip(outputs, interval.differentiable, strict=True) if not grad)
        )
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, Tensor]:
        return None, ctx.interval.backward(grads).detach()


def _place(value: Tensor, buffer: Buffer | None) -> Tensor:
    """Return the tensor that recordings read: a copy in the buffer, or the value without one."""
    return value if buffer is None else buffer(value).copy_(value)


def _put(static: Tensor | None, value: Tensor | None) -> None:
    """Copy this microbatch's value to where recordings read it, unless it is there already."""
    if static is not None and value is not None and static.data_ptr() != value.data_ptr():
        static.copy_(value)


def _without_owning(static: Tensor | None, buffer: Buffer | None) -> Tensor | None:
    """Return the tensor without ownership of its memory if it has no buffer of its own.

    It then lies in the memory of another interval, and a reference here must not keep that alive.
    """
    return unowned(static) if static is not None and buffer is None else static
