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

import torch
from torch import Tensor, nn

from app.model.chunk import Chunk
from app.model.fp8.delayed import DelayedScales
from app.model.fp8.experts import Fp8GroupedLinear
from app.model.fp8.row_scaled import RowScaled
from app.model.layers.linear import ColumnParallelLinear, GroupedLinear, RowParallelLinear
from app.model.layers.quantised import Fp8Arithmetic, HeldWeight, Operand, Quantised
from app.model.layers.weight_grads import WeightGrad


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

    differentiable = False

    def __init__(self, arithmetic: Fp8Arithmetic, weight_OI: nn.Parameter) -> None:
        super().__init__(arithmetic, weight_OI)
        self.arithmetic = arithmetic

    def input_operand(self, x: Tensor) -> Quantised:
        """See the protocol."""
        with torch.no_grad():
            made = self.arithmetic.input(x.flatten(0, -2))
        return made.with_lead(x.shape[:-1])

    def grad_operand(self, grad: Tensor) -> Quantised:
        """See the protocol."""
        made = self.arithmetic.grad(grad.flatten(0, -2))
        return made.with_lead(grad.shape[:-1])

    def output(self, x: Operand, weight_OI: Tensor) -> Tensor:
        """See the protocol."""
        self.refresh()
        given = self._own(x, weight_OI)
        return _unflattened(self.arithmetic.output(given, self.held, weight_OI.dtype), given)

    def input_grad(self, grad: Operand, weight_OI: Tensor, out: Tensor | None = None) -> Tensor:
        """See the protocol."""
        given = self._own(grad, weight_OI)
        found = self.arithmetic.input_grad(given, self.held, weight_OI.dtype)
        found = _unflattened(found, given)
        return found if out is None else out.copy_(found)

    def weight_grad(self, grad: Operand, x: Operand) -> WeightGrad:
        """See the protocol."""
        left, right = self._own(grad, self.weight), self._own(x, self.weight)
        return Fp8Grad(
            self.arithmetic,
            left.for_weight_grad(),
            right.for_weight_grad(),
            dtype=self.weight.dtype,
        )

    def _own(self, operand: Operand, weight_OI: Tensor) -> Quantised:
        assert weight_OI is self.weight, "the back end belongs to another layer's weight"
        assert isinstance(operand, Quantised), "pass operands of `input_operand` or `grad_operand`"
        return operand


class Fp8Layers:
    """All FP8 layers of a rank."""

    def __init__(
        self,
        chunks: Sequence[Chunk],
        make: Callable[[str], Fp8Arithmetic] | None,
        scales: DelayedScales | None = None,
        experts: RowScaled | None = None,
    ) -> None:
        """`make` builds the arithmetic of a linear layer from the global name of its weight;
        `experts` is that of routed experts. None if there are no such layers.
        """
        self.chunks = chunks
        self.make = make
        self.experts = experts
        self.scales = scales  # from earlier steps; None scales each matrix by its own amax
        self.linears: dict[str, Fp8Linear | Fp8GroupedLinear] = {}  # by global names of weights

    def use(self, chunk: Chunk, names: Collection[str]) -> None:
        """Switch linear modules of these global names to FP8."""
        modules = dict(chunk.named_modules())
        for name in names:
            module = modules[name]
            if isinstance(module, GroupedLinear):
                assert self.experts is not None, name
                grouped = Fp8GroupedLinear(self.experts, module.weight)
                module.backend = self.linears[name] = grouped
                continue
            assert isinstance(module, ColumnParallelLinear | RowParallelLinear)
            assert self.make is not None, name
            module.backend = self.linears[name] = Fp8Linear(self.make(name), module.weight)

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
        """Run layers outside of any step within the block, to capture them.

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

    def begin_step(self) -> None:
        """Prepare for the first forward of a step, or of its rerun."""
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
