"""Linear modules. Each owns a weight shard, its gradient sink and the back end that computes it.

| module | weight of a rank | tokens |
|---|---|---|
| `ColumnParallelLinear` | O / tp × I, some of the rows | all-gathered before the GEMM |
| `RowParallelLinear` | O × I / tp, some of the columns | reduce-scattered after the GEMM |
| `VocabParallelEmbedding` | V / tp × D, some of the rows | reduce-scattered after the lookup |
| `GroupedLinear` | E × I × O, some of the experts | dispatched before, combined after |

A block of two matrices costs one all-gather before the first and one reduce-scatter after the
second, in forward and in backward (Korthikanti et al. 2022). These collectives are in
`app.model.layers.tensor_parallel`, those of experts in `app.moe.dispatch`. Backward saves this
rank's tokens only and gathers them again for the weight gradient. With one rank, nothing is sent.

The weight and its back end (`app.model.layers.linear_backend`) determine the precision. Weight
gradients go to a sink (`app.model.layers.weight_grads`), or to autograd if there is none. The sink
is an argument of each call and comes with the microbatch's context, not an attribute of the module:
several microbatches are in flight at once and each may have a sink of its own.

Shapes: B sequences, S tokens per sequence of a context-parallel rank, s = S / tp of them here, I
and O widths, T rows, E experts of this rank, D hidden, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from app.model.layers.layer_groups import ALONE, LayerGroups, rank, size
from app.model.layers.linear_backend import (
    GroupedLinearBackend,
    grouped_linear_backend,
    linear_backend,
    pushed,
)
from app.model.layers.tensor_parallel import OptionalGroup, scatter_tokens
from app.model.layers.weight_grads import WeightGradSink
from app.plan.model.weight import Weight


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
        self.backend = linear_backend()

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
        self.backend = linear_backend()

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
    """Embedding table whose rows are multiplied by √D when they are looked up (Gemma)."""

    def lookup(self, tokens_BS: Tensor) -> Tensor:
        """See `VocabParallelEmbedding`."""
        dtype, width = self.weight.dtype, self.weight.shape[1]
        # the factor is rounded to the weights' type, as `transformers` does
        return super().lookup(tokens_BS) * torch.tensor(math.sqrt(width), dtype=dtype).item()


class GroupedLinear(LinearModule):
    """Linear layer with one weight per expert of this rank: rows of expert e times weight[e].

    Experts are sharded over expert-parallel ranks, and one of the widths I and O over
    expert-tensor-parallel ranks. If I is sharded, the outputs are partial sums.
    """

    def __init__(self, weight: Weight, layer_groups: LayerGroups = ALONE) -> None:
        super().__init__(weight, layer_groups)
        self.backend = grouped_linear_backend()

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
