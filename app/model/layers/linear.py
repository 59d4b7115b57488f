"""Linear modules and the back ends that compute them. Each module owns a weight shard.

| module | weight of a rank | tokens |
|---|---|---|
| `ColumnParallelLinear` | O / tp × I, some of the rows | all-gathered before the GEMM |
| `RowParallelLinear` | O × I / tp, some of the columns | reduce-scattered after the GEMM |
| `VocabParallelEmbedding` | V / tp × D, some of the rows | reduce-scattered after the lookup |
| `GroupedLinear` | E × I × O, some of the experts | dispatched before, combined after |

A block of two matrices costs one all-gather before the first and one reduce-scatter after the
second, in forward and in backward (Korthikanti et al. 2022). These collectives are in
`app.model.layers.layer_groups`, those of experts in `app.moe.dispatch`. Backward saves this
rank's tokens only and gathers them again for the weight gradient. With one rank, nothing is sent.

The weight and its back end determine the precision. Back ends are torch's GEMMs at first; `app.fp8`
replaces them where GEMMs run in FP8, and `app.moe.clones` wraps those of experts that have
replicas. The loss calls the head's back end (`app.model.layers.loss`), for one block of logits at a
time if no rank may hold all.

Weight gradients go to a sink (`app.model.layers.weight_grads`), or to autograd if there is none.
The sink is an argument of each call and comes with the microbatch's context, not an attribute of
the module: several microbatches are in flight at once and each may have a sink of its own.

Shapes: B sequences, S tokens per sequence of a context-parallel rank, s = S / tp of them here, I
input width, O output width, T rows, E experts of this rank, D hidden, V vocabulary; rows of an
expert end at its offset in `ends_E` (int32, on the rows' device), rows behind the last one are not
defined.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from app.model.layers.layer_groups import (
    ALONE,
    LayerGroups,
    OptionalGroup,
    gathered,
    rank,
    scatter_tokens,
    scattered,
    size,
    start_gather,
    start_scatter,
)
from app.model.layers.weight_grads import (
    FetchedGrad,
    GroupedLinearGrad,
    LinearGrad,
    WeightGrad,
    WeightGradSink,
)
from app.plan.model.weight import Weight


class LinearBackend(Protocol):
    """GEMMs of a layer with one weight, over the last dimension of its input."""

    def linear(
        self,
        x_BsI: Tensor,
        weight_OI: nn.Parameter,
        group: OptionalGroup,
        sink: WeightGradSink | None,
    ) -> Tensor:
        """Return x · weightᵀ for the tokens of all ranks of `group`: B × S × O; None means this
        rank's tokens.

        Differentiable; in new memory that the caller may write to (no view for autograd). The
        gradient of the weight goes to `sink`, or to autograd without one.
        """

    def output(self, x: Tensor, weight_OI: Tensor) -> Tensor:
        """Return x · weightᵀ of this rank's tokens."""

    def gradients(
        self, grad: Tensor, x: Tensor, weight_OI: Tensor, out: Tensor | None = None
    ) -> tuple[Tensor, WeightGrad]:
        """Return grad · weight, written to `out` if given, and gradᵀ · x over all rows, O × I, as
        operands that are not multiplied yet.
        """


class GroupedLinearBackend(Protocol):
    """The three grouped GEMMs of a layer with one weight per expert."""

    @property
    def differentiable(self) -> bool:
        """True if autograd differentiates `output`."""

    @property
    def input_grad_first(self) -> bool:
        """True if backward computes the input gradient before the weight gradient."""

    def output(self, rows_TI: Tensor, weight_EIO: Tensor, ends_E: Tensor) -> Tensor:
        """Return the rows of expert e times weight[e]."""

    def input_grad(self, grad_TO: Tensor, weight_EIO: Tensor, ends_E: Tensor) -> Tensor:
        """Return the rows of the contiguous output gradient of expert e times weight[e]ᵀ."""

    def weight_grad(self, grad_TO: Tensor, rows_TI: Tensor, ends_E: Tensor) -> WeightGrad:
        """Return rows[e]ᵀ · grad[e] for every expert e, E × I × O, as operands that are not
        multiplied yet; `grad_TO` is contiguous.
        """


class TorchLinear:
    """torch's GEMMs on plain tensors, in the dtype of the weight."""

    def linear(
        self,
        x_BsI: Tensor,
        weight_OI: nn.Parameter,
        group: OptionalGroup,
        sink: WeightGradSink | None,
    ) -> Tensor:
        """See the protocol."""
        if sink is None and group is None:
            return self.output(x_BsI, weight_OI)
        out_BSO: Tensor = _Linear.apply(x_BsI, weight_OI, group, self, sink)
        return out_BSO

    def output(self, x: Tensor, weight_OI: Tensor) -> Tensor:
        """See the protocol."""
        return F.linear(x, weight_OI)

    def gradients(
        self, grad: Tensor, x: Tensor, weight_OI: Tensor, out: Tensor | None = None
    ) -> tuple[Tensor, WeightGrad]:
        """See the protocol."""
        return self.input_grad(grad, weight_OI, out), self.weight_grad(grad, x)

    def input_grad(self, grad: Tensor, weight_OI: Tensor, out: Tensor | None = None) -> Tensor:
        """Return grad · weight."""
        return torch.matmul(grad, weight_OI, out=out)

    def weight_grad(self, grad: Tensor, x: Tensor) -> WeightGrad:
        """Return gradᵀ · x over all rows, O × I."""
        return LinearGrad(grad.flatten(0, -2).T, x.flatten(0, -2))


class _Linear(torch.autograd.Function):
    """x · weightᵀ for the tokens of all ranks of `group`; of this rank only if `group` is None."""

    @staticmethod
    def forward(
        ctx: Any,
        x_BsI: Tensor,
        weight_OI: nn.Parameter,
        group: OptionalGroup,
        backend: TorchLinear,
        sink: WeightGradSink | None,
    ) -> Tensor:
        ctx.save_for_backward(x_BsI)
        ctx.weight_OI = weight_OI
        ctx.group = group
        ctx.backend = backend
        ctx.sink = sink
        return backend.output(x_BsI if group is None else gathered(x_BsI, group), weight_OI)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BSO: Tensor) -> tuple[Tensor | None, ...]:
        (x_BsI,) = ctx.saved_tensors
        weight_OI, group = ctx.weight_OI, ctx.group
        backend: TorchLinear = ctx.backend
        sink: WeightGradSink | None = ctx.sink
        if group is None:
            gradient = backend.weight_grad(grad_BSO, x_BsI)
            weight_grad = None
            if sink is None:
                weight_grad = gradient()
            else:
                sink.push(weight_OI, gradient)
            return backend.input_grad(grad_BSO, weight_OI), weight_grad, None, None, None
        if sink is not None and sink.deferred:
            of_gathered = partial(_of_gathered, backend, grad_BSO, x_BsI, group=group)
            sink.push(weight_OI, FetchedGrad(of_gathered))
            grad_BSI = backend.input_grad(grad_BSO, weight_OI)
            return scattered(grad_BSI, group), None, None, None, None
        # overlap: the all-gather with the first GEMM, the reduce-scatter with the second
        x_BSI = start_gather(x_BsI, group)
        grad_BsI = start_scatter(backend.input_grad(grad_BSO, weight_OI), group)
        weight_grad = pushed(sink, weight_OI, backend.weight_grad(grad_BSO, x_BSI()))
        return grad_BsI(), weight_grad, None, None, None


def pushed(
    sink: WeightGradSink | None, weight: nn.Parameter, gradient: WeightGrad
) -> Tensor | None:
    """Push a gradient to its sink; return it for autograd if there is none."""
    if sink is None:
        return gradient()
    sink.push(weight, gradient)
    return None


def _of_gathered(
    backend: TorchLinear, grad_BSO: Tensor, x_BsI: Tensor, *, group: OptionalGroup
) -> WeightGrad:
    """Return the weight gradient after gathering the input over `group`."""
    return backend.weight_grad(grad_BSO, gathered(x_BsI, group))


class TorchGroupedLinear:
    """torch's grouped GEMMs, which read group sizes on the device.

    fp32, bf16 and fp16; I·itemsize and O·itemsize must be multiples of 16 bytes (RuntimeError).
    """

    differentiable = True
    input_grad_first = False

    def output(self, rows_TI: Tensor, weight_EIO: Tensor, ends_E: Tensor) -> Tensor:
        """See the protocol."""
        out_TO: Tensor = F.grouped_mm(rows_TI, weight_EIO, offs=ends_E)
        if out_TO.requires_grad:
            # its backward refuses expanded gradients, such as a sum's
            out_TO.register_hook(torch.Tensor.contiguous)
        return out_TO

    def input_grad(self, grad_TO: Tensor, weight_EIO: Tensor, ends_E: Tensor) -> Tensor:
        """See the protocol."""
        grad_TI: Tensor = F.grouped_mm(grad_TO, weight_EIO.transpose(1, 2), offs=ends_E)
        return grad_TI

    def weight_grad(self, grad_TO: Tensor, rows_TI: Tensor, ends_E: Tensor) -> WeightGrad:
        """See the protocol."""
        return GroupedLinearGrad(rows_TI, grad_TO, ends_E)


class LinearModule(nn.Module):
    """Base of linear layers: owns the weight, whose global name is the module's path.

    Call `forward` directly instead of the module: it has a return type, and `__call__` spends about
    one microsecond of host time per GEMM looking for hooks that are never registered.
    """

    def __init__(self, weight: Weight, layer_groups: LayerGroups = ALONE) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(layer_groups.coords.shape(weight)))


def named_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield every parameter with its global name, in the order modules are registered.

    Checkpoints, the plan and the seeds of initial weights use these names: the attribute path
    (`attn_norm.weight`), without the trailing `weight` for linear modules (`attn.wqkv`).
    """
    for path, inner in module.named_modules():
        for name, param in inner.named_parameters(path, recurse=False):
            yield path if path and isinstance(inner, LinearModule) else name, param


class ColumnParallelLinear(LinearModule):
    """x · weightᵀ for the tokens of all ranks; each rank holds O / tp rows of the weight.

    In the papers' notation x · A these are columns of A.
    """

    def __init__(self, weight: Weight, layer_groups: LayerGroups = ALONE) -> None:
        super().__init__(weight, layer_groups)
        self.group = _shared_by(weight, layer_groups)
        self.backend: LinearBackend = TorchLinear()

    def forward(self, x_BsI: Tensor, sink: WeightGradSink | None = None) -> Tensor:
        """Map B × s × I -> B × S × O / tp."""
        return self.backend.linear(x_BsI, self.weight, self.group, sink=sink)


class RowParallelLinear(LinearModule):
    """x · weightᵀ summed over the ranks and scattered along the sequence; each rank holds I / tp
    columns of the weight.
    """

    def __init__(self, weight: Weight, layer_groups: LayerGroups = ALONE) -> None:
        super().__init__(weight, layer_groups)
        self.group = _shared_by(weight, layer_groups)
        self.backend: LinearBackend = TorchLinear()

    def forward(self, x_BSI: Tensor, sink: WeightGradSink | None = None) -> Tensor:
        """Map B × S × I / tp -> B × s × O."""
        out_BSO = self.backend.linear(x_BSI, self.weight, None, sink=sink)
        return out_BSO if self.group is None else scatter_tokens(out_BSO, self.group)


class VocabParallelEmbedding(ColumnParallelLinear):
    """Embedding table with one row per vocabulary entry; each rank holds V / tp rows.

    `forward` is the linear layer from hidden states to logits: the head when embeddings are tied.
    """

    def lookup(self, tokens_BS: Tensor) -> Tensor:
        """Return the embeddings of tokens: B × S -> B × s × D.

        Every rank looks up the tokens whose rows it holds and contributes zeros for the others.
        `F.embedding`'s backward sorts instead of using atomics, so it is bitwise reproducible on
        CPU and GPU.
        """
        table_VD = self.weight
        if self.group is None:
            return F.embedding(tokens_BS, table_VD)
        row_BS = tokens_BS - rank(self.group) * len(table_VD)
        elsewhere_BS = (row_BS < 0) | (row_BS >= len(table_VD))
        rows_BSD = F.embedding(row_BS.masked_fill(elsewhere_BS, 0), table_VD)
        rows_BSD = rows_BSD.masked_fill(elsewhere_BS[..., None], 0)
        return scatter_tokens(rows_BSD, self.group)


class ScaledEmbedding(VocabParallelEmbedding):
    """Embedding table whose rows are multiplied by a factor when they are looked up."""

    def __init__(self, weight: Weight, layer_groups: LayerGroups, factor: float) -> None:
        super().__init__(weight, layer_groups)
        self.factor = factor

    def lookup(self, tokens_BS: Tensor) -> Tensor:
        """See `VocabParallelEmbedding`."""
        return super().lookup(tokens_BS) * self.factor


class RootScaledEmbedding(VocabParallelEmbedding):
    """Embedding table whose rows are multiplied by √D when they are looked up (Gemma)."""

    def lookup(self, tokens_BS: Tensor) -> Tensor:
        """See `VocabParallelEmbedding`."""
        dtype, width = self.weight.dtype, self.weight.shape[1]
        # the factor is rounded to the weights' type, as `transformers` does
        return super().lookup(tokens_BS) * torch.tensor(math.sqrt(width), dtype=dtype).item()


def embedding_table(
    rows: Weight, layer_groups: LayerGroups, scale: float | None
) -> VocabParallelEmbedding:
    """Build the table; `scale` as `model.embedding_scale`."""
    if scale == 0:
        return RootScaledEmbedding(rows, layer_groups)
    if scale is None or scale == 1:
        return VocabParallelEmbedding(rows, layer_groups)
    return ScaledEmbedding(rows, layer_groups, scale)


class GroupedLinear(LinearModule):
    """Linear layer with one weight per expert of this rank: rows of expert e times weight[e].

    Experts are sharded over expert-parallel ranks, and one of the widths I and O over
    expert-tensor-parallel ranks. If I is sharded, the outputs are partial sums.
    """

    def __init__(self, weight: Weight, layer_groups: LayerGroups = ALONE) -> None:
        super().__init__(weight, layer_groups)
        self.backend: GroupedLinearBackend = TorchGroupedLinear()

    def forward(
        self,
        rows_TI: Tensor,
        ends_E: Tensor,
        sink: WeightGradSink | None = None,
        backend: GroupedLinearBackend | None = None,
    ) -> Tensor:
        """Map T × I -> T × O; expert e owns rows ends[e-1] to ends[e] (int32, on the rows' device).

        Rows from ends[-1] on are uninitialised in the result and in the gradient. `backend`
        computes this call in place of the module's own.
        """
        backend = backend or self.backend
        if sink is None and backend.differentiable:
            return backend.output(rows_TI, self.weight, ends_E)
        out_TO: Tensor = _GroupedLinear.apply(rows_TI, self.weight, ends_E, backend, sink)
        return out_TO


def _shared_by(weight: Weight, layer_groups: LayerGroups) -> OptionalGroup:
    """Return the tensor-parallel group that shards the weight, or None for a single rank.

    Looked up once at construction instead of in every call.
    """
    return None if weight.tp is None or size(layer_groups.tp) == 1 else layer_groups.tp


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows_TI: Tensor,
        weight_EIO: nn.Parameter,
        ends_E: Tensor,
        backend: GroupedLinearBackend,
        sink: WeightGradSink | None,
    ) -> Tensor:
        ctx.save_for_backward(rows_TI, ends_E)
        ctx.weight_EIO = weight_EIO
        ctx.backend = backend
        ctx.sink = sink
        return backend.output(rows_TI, weight_EIO, ends_E)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TO: Tensor) -> tuple[Tensor | None, ...]:
        rows_TI, ends_E = ctx.saved_tensors
        weight_EIO, sink = ctx.weight_EIO, ctx.sink
        backend: GroupedLinearBackend = ctx.backend
        grad_TO = grad_TO.contiguous()
        gradient = backend.weight_grad(grad_TO, rows_TI, ends_E)
        if sink is not None and not backend.input_grad_first:
            sink.push(weight_EIO, gradient)
            return backend.input_grad(grad_TO, weight_EIO, ends_E), None, None, None, None
        grad_TI = backend.input_grad(grad_TO, weight_EIO, ends_E)
        return grad_TI, pushed(sink, weight_EIO, gradient), None, None, None
