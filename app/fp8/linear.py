"""FP8 back end of linear layers, and the set of all FP8 layers of a rank.

`Fp8Layers.expire` marks weights as changed. The first forward of each layer afterwards quantises
its weight (`HeldWeight`), outside partial CUDA graphs. A full-iteration graph expires the weights
at its start, and so quantises them in every replay.

The input is quantised once in forward, and saved in the copy that the weight gradient reads: one
byte per element. Only if tokens are gathered over ranks, this rank's shard is saved unquantised,
and gathered and quantised again. Scales are local: of all gathered tokens, and of this rank's shard
of a weight.

Shapes: T rows, I input width, O output width; R × C a matrix with padding rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from app.fp8.delayed import DelayedScales
from app.fp8.experts import Fp8GroupedLinear
from app.fp8.quantised import Fp8Arithmetic, HeldWeight, Quantised
from app.fp8.ready import ReadyRows
from app.fp8.row_scaled import RowScaled
from app.model.block import StepState
from app.model.chunk import Chunk
from app.model.layers.layer_groups import (
    OptionalGroup,
    gathered,
    scattered,
    start_gather,
    start_scatter,
)
from app.model.layers.layers import expert_swiglu
from app.model.layers.linear import ColumnParallelLinear, GroupedLinear, RowParallelLinear, pushed
from app.model.layers.weight_grads import ComputedGrad, FetchedGrad, WeightGrad, WeightGradSink
from app.moe.experts import Experts


@dataclass(frozen=True, slots=True)
class Fp8Grad(WeightGrad):
    """Weight gradient gradᵀ · x over all rows, from FP8 operands."""

    arithmetic: Fp8Arithmetic
    grad: Quantised
    x: Quantised
    dtype: torch.dtype  # dtype of the gradient returned by a call

    def __call__(self) -> Tensor:
        """Return O × I."""
        return self.arithmetic.weight_grad(self.grad, self.x, self.dtype)

    def add_to(self, total: Tensor) -> None:
        """Add to `total`; the GEMM accumulates into fp32 and rounds once."""
        self.arithmetic.add_weight_grad(self.grad, self.x, total)


class Fp8Linear(HeldWeight):
    """FP8 GEMMs of one layer (`LinearBackend`)."""

    def __init__(self, arithmetic: Fp8Arithmetic, weight_OI: nn.Parameter) -> None:
        super().__init__(arithmetic, weight_OI)
        self.arithmetic = arithmetic

    def linear(
        self,
        x_BsI: Tensor,
        weight_OI: nn.Parameter,
        group: OptionalGroup,
        sink: WeightGradSink | None,
    ) -> Tensor:
        """See the protocol."""
        assert weight_OI is self.weight, "the back end belongs to another layer's weight"
        out_BSO: Tensor = _Fp8Linear.apply(x_BsI, weight_OI, group, self, sink)
        return out_BSO

    def output(self, x: Tensor, weight_OI: Tensor) -> Tensor:
        """See the protocol."""
        return self.output_of(self.quantised_input(x))

    def gradients(
        self, grad: Tensor, x: Tensor, weight_OI: Tensor, out: Tensor | None = None
    ) -> tuple[Tensor, WeightGrad]:
        """See the protocol."""
        given = self.quantised_grad(grad)
        found = self.input_grad_of(given)
        weight_grad = self.weight_grad_of(given, self.quantised_input(x))
        return found if out is None else out.copy_(found), weight_grad

    def quantised_input(self, x: Tensor) -> Quantised:
        """Quantise the input of the layer."""
        with torch.no_grad():
            made = self.arithmetic.input(x.flatten(0, -2))
        return made.with_lead(x.shape[:-1])

    def quantised_grad(self, grad: Tensor) -> Quantised:
        """Quantise the gradient of the layer's output."""
        made = self.arithmetic.grad(grad.flatten(0, -2))
        return made.with_lead(grad.shape[:-1])

    def output_of(self, x: Quantised) -> Tensor:
        """Return x · weightᵀ."""
        self.refresh()
        return _unflattened(self.arithmetic.output(x, self.held, self.weight.dtype), x)

    def input_grad_of(self, grad: Quantised) -> Tensor:
        """Return grad · weight."""
        found = self.arithmetic.input_grad(grad, self.held, self.weight.dtype)
        return _unflattened(found, grad)

    def weight_grad_of(self, grad: Quantised, x: Quantised) -> WeightGrad:
        """Return gradᵀ · x over all rows, O × I."""
        left, right = grad.for_weight_grad(), x.for_weight_grad()
        return Fp8Grad(self.arithmetic, left, right, dtype=self.weight.dtype)


class _Fp8Linear(torch.autograd.Function):
    """x · weightᵀ for the tokens of all ranks of `group`, as `app.model.layers.linear`."""

    @staticmethod
    def forward(
        ctx: Any,
        x_BsI: Tensor,
        weight_OI: nn.Parameter,
        group: OptionalGroup,
        backend: Fp8Linear,
        sink: WeightGradSink | None,
    ) -> Tensor:
        x = backend.quantised_input(x_BsI if group is None else gathered(x_BsI, group))
        if group is None:  # save the copy that the weight gradient reads
            part = x.for_weight_grad()
            ctx.save_for_backward(*part.tensors())
            ctx.emptied = part.empty()
        else:
            ctx.save_for_backward(x_BsI)
        ctx.weight_OI = weight_OI
        ctx.group = group
        ctx.backend = backend
        ctx.sink = sink
        return backend.output_of(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BSO: Tensor) -> tuple[Tensor | None, ...]:
        weight_OI, group = ctx.weight_OI, ctx.group
        backend: Fp8Linear = ctx.backend
        sink: WeightGradSink | None = ctx.sink
        grad = backend.quantised_grad(grad_BSO)
        if group is None:
            kept = ctx.emptied.with_tensors(ctx.saved_tensors)
            weight_grad = pushed(sink, weight_OI, backend.weight_grad_of(grad, kept))
            return backend.input_grad_of(grad), weight_grad, None, None, None
        (x_BsI,) = ctx.saved_tensors
        if sink is not None and sink.deferred:
            of_gathered = partial(_of_gathered, backend, grad.for_weight_grad(), x_BsI, group=group)
            sink.push(weight_OI, FetchedGrad(of_gathered))
            return scattered(backend.input_grad_of(grad), group), None, None, None, None
        # overlap: the all-gather with the first GEMM, the reduce-scatter with the second
        x_BSI = start_gather(x_BsI, group)
        grad_BsI = start_scatter(backend.input_grad_of(grad), group)
        x = backend.quantised_input(x_BSI())
        weight_grad = pushed(sink, weight_OI, backend.weight_grad_of(grad, x))
        return grad_BsI(), weight_grad, None, None, None


def _of_gathered(
    backend: Fp8Linear, grad: Quantised, x_BsI: Tensor, *, group: OptionalGroup
) -> WeightGrad:
    """Return the weight gradient after gathering the input over `group`."""
    return backend.weight_grad_of(grad, backend.quantised_input(gathered(x_BsI, group)))


class FrozenFp8Linear(Fp8Linear):
    """FP8 GEMMs of a layer whose weight has no gradient; the input is not saved."""

    def linear(
        self,
        x_BsI: Tensor,
        weight_OI: nn.Parameter,
        group: OptionalGroup,
        sink: WeightGradSink | None,
    ) -> Tensor:
        """See the protocol."""
        out_BSO: Tensor = _FrozenFp8.apply(x_BsI, group, self)
        return out_BSO

    def weight_grad_of(self, grad: Quantised, x: Quantised) -> WeightGrad:
        """Return a zero, which nothing adds to a gradient."""
        return ComputedGrad(self.weight.new_zeros(()))


class _FrozenFp8(torch.autograd.Function):
    """x · weightᵀ as `_Fp8Linear`, without a gradient of the weight."""

    @staticmethod
    def forward(ctx: Any, x_BsI: Tensor, group: OptionalGroup, backend: FrozenFp8Linear) -> Tensor:
        ctx.group = group
        ctx.backend = backend
        return backend.output_of(backend.quantised_input(gathered(x_BsI, group)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BSO: Tensor) -> tuple[Tensor | None, ...]:
        backend: FrozenFp8Linear = ctx.backend
        grad_BSI = backend.input_grad_of(backend.quantised_grad(grad_BSO))
        return scattered(grad_BSI, ctx.group), None, None


class Fp8Layers(StepState):
    """All FP8 layers of a rank."""

    def __init__(
        self,
        chunks: Sequence[Chunk],
        make: Callable[[str], Fp8Arithmetic] | None,
        scales: DelayedScales | None = None,
        experts: RowScaled | None = None,
        ready: ReadyRows | None = None,
    ) -> None:
        """`make` builds the arithmetic of a linear layer from the global name of its weight;
        `experts` is that of routed experts, whose rows may be in `ready`. None if there are no such
        layers.
        """
        self.chunks = chunks
        self.make = make
        self.experts = experts
        self.ready = ready
        self.scales = scales  # from earlier steps; None scales each matrix by its own amax
        self.linears: dict[str, Fp8Linear | Fp8GroupedLinear] = {}  # by global names of weights

    def use(self, chunk: Chunk, names: Collection[str]) -> None:
        """Switch linear modules of these global names to FP8, and the activations before them."""
        modules = dict(chunk.named_modules())
        if self.ready is not None:
            for module in modules.values():
                if isinstance(module, Experts) and module.activation is expert_swiglu:
                    module.activation = self.ready.swiglu
        for name in names:
            module = modules[name]
            if isinstance(module, GroupedLinear):
                assert self.experts is not None, name
                grouped = Fp8GroupedLinear(self.experts, module.weight, self.ready)
                module.backend = self.linears[name] = grouped
                continue
            assert isinstance(module, ColumnParallelLinear | RowParallelLinear)
            assert self.make is not None, name
            kind = Fp8Linear if module.weight.requires_grad else FrozenFp8Linear
            module.backend = self.linears[name] = kind(self.make(name), module.weight)

    def watch(self) -> None:
        """Quantise each layer's weights before its forward, outside its captured part.

        Parameter gathering must register its hooks before these.
        """
        for chunk in self.chunks:
            for layer in chunk.in_order:
                own = tuple(_inside(layer))
                if own:
                    layer.register_forward_pre_hook(lambda *_, own=own: _refresh(own))

    def expire(self) -> None:
        """Mark all weights as changed, now or when what is captured now is replayed."""
        for linear in self.linears.values():
            linear.stale = True

    @contextmanager
    def on_trial(self) -> Iterator[None]:
        """See `StepState`.

        Weights are quantised on entry, so that no such kernel is captured; parameters must not be
        gathered within.
        """
        for linear in self.linears.values():
            linear.refresh()
        yield
        self.expire()

    @property
    def capturable(self) -> bool:
        """True if the kernels of a step are those of all later steps."""
        return self.scales is None or self.scales.known

    def start_step(self) -> None:
        """See `StepState`."""
        if self.scales is not None:
            self.scales.begin_step()
            self.expire()  # a validation may have quantised weights without recording amax

    def finish_step(self, skipped: Tensor) -> None:
        """Update scales after the last backward; `skipped`: 1 if parameters are not updated,
        otherwise 0.
        """
        if self.scales is not None:
            self.scales.finish_step(skipped)

    def stepped(self, skipped: bool) -> None:
        """Note on the host whether the update was skipped."""
        if self.scales is not None and not skipped:
            self.scales.stepped()


def _inside(module: nn.Module) -> Iterator[HeldWeight]:
    for inner in module.modules():
        backend = getattr(inner, "backend", None)
        if isinstance(backend, HeldWeight):
            yield backend


def _refresh(linears: Sequence[HeldWeight]) -> None:
    for linear in linears:
        linear.refresh()


def _unflattened(found_RC: Tensor, of: Quantised) -> Tensor:
    """Drop the rows that padded the matrix, and restore the dimensions of what was quantised.

    The result is no view to autograd, which forbids writing to a view that leaves a
    `torch.autograd.Function`: attention adds its bias in place.
    """
    rows = of.lead.numel()
    kept_RC = found_RC if len(found_RC) == rows else found_RC[:rows]
    out: Tensor = torch.ops.aten._unsafe_view(kept_RC, (*of.lead, found_RC.shape[-1]))
    return out
