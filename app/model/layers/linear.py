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
and O widths, T rows, E experts of this rank, G replicas of remote experts, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from app.model.layers.layer_groups import ALONE, LayerGroups, rank, size
from app.model.layers.linear_backend import (
    GroupedLinearBackend,
    LinearBackend,
    add_groups,
    grouped_linear_backend,
    linear_backend,
)
from app.model.layers.quantised import Operand, Quantised
from app.model.layers.ready import ReadyRows
from app.model.layers.recompute import Keep
from app.model.layers.replica_weight import ReplicaWeight
from app.model.layers.tensor_parallel import (
    OptionalGroup,
    gathered,
    scatter_tokens,
    scattered,
    start_gather,
    start_scatter,
)
from app.model.layers.weight_grads import (
    FetchedGrad,
    GradWithReplicas,
    ReplicaGrad,
    WeightGrad,
    WeightGradSink,
)
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
        if sink is None and self.group is None and self.backend.differentiable:
            return self.backend.output(x_BsI, self.weight)
        out_BSO: Tensor = _Linear.apply(x_BsI, self.weight, self.group, self.backend, sink)
        return out_BSO


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
        if sink is None and self.backend.differentiable:
            out_BSO = self.backend.output(x_BSI, self.weight)
        else:
            out_BSO = _Linear.apply(x_BSI, self.weight, None, self.backend, sink)
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
        keep: Keep | None = None,
        replicas: ReplicaWeight | None = None,
        ready: ReadyRows | None = None,
    ) -> Tensor:
        """Map T × I -> T × O; expert e owns rows ends[e-1] to ends[e] (int32, on the rows' device).

        Rows from ends[-1] on are uninitialised in the result and in the gradient. `keep` provides
        memory for the operands of the weight gradient if that is deferred. `replicas` supplies the
        weights of remote experts, which own the last groups of rows. `ready` may hold the rows, and
        in backward their gradient, already quantised for the back end.
        """
        if sink is None and replicas is None and self.backend.differentiable:
            return self.backend.output(rows_TI, self.weight, ends_E)
        out_TO: Tensor = _GroupedLinear.apply(
            rows_TI, self.weight, ends_E, self.backend, sink, keep, replicas, ready
        )
        return out_TO


def _shared_by(weight: Weight, layer_groups: LayerGroups) -> OptionalGroup:
    """Return the tensor-parallel group that shards the weight, or None for a single rank.

    Looked up once at construction instead of in every call.
    """
    return None if weight.tp is None or size(layer_groups.tp) == 1 else layer_groups.tp


class _Linear(torch.autograd.Function):
    """x · weightᵀ for the tokens of all ranks of `group`; of this rank only if `group` is None."""

    @staticmethod
    def forward(
        ctx: Any,
        x_BsI: Tensor,
        weight_OI: nn.Parameter,
        group: OptionalGroup,
        backend: LinearBackend,
        sink: WeightGradSink | None,
    ) -> Tensor:
        whole_BSI = x_BsI if group is None else gathered(x_BsI, group)
        as_it_is = backend.differentiable  # skips operand functions that return their argument
        x: Operand = whole_BSI if as_it_is else backend.input_operand(whole_BSI)
        if as_it_is or group is not None:
            ctx.save_for_backward(x_BsI)
        else:
            _keep(ctx, x)
        ctx.weight_OI = weight_OI
        ctx.group = group
        ctx.backend = backend
        ctx.sink = sink
        return backend.output(x, weight_OI)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BSO: Tensor) -> tuple[Tensor | None, ...]:
        weight_OI, group = ctx.weight_OI, ctx.group
        backend: LinearBackend = ctx.backend
        sink: WeightGradSink | None = ctx.sink
        as_it_is = backend.differentiable
        grad: Operand = grad_BSO if as_it_is else backend.grad_operand(grad_BSO)
        if group is None:
            x: Operand = ctx.saved_tensors[0] if as_it_is else _kept_operand(ctx)
            weight_grad = backend.weight_grad(grad, x)
            if sink is None:
                return backend.input_grad(grad, weight_OI), weight_grad(), None, None, None
            sink.push(weight_OI, weight_grad)
            return backend.input_grad(grad, weight_OI), None, None, None, None
        (x_BsI,) = ctx.saved_tensors
        if sink is not None and sink.deferred:
            kept = _for_weight_grad(grad)
            sink.push(weight_OI, FetchedGrad(lambda: _of_gathered(backend, kept, x_BsI, group)))
            grad_BSI = backend.input_grad(grad, weight_OI)
            return scattered(grad_BSI, group), None, None, None, None
        # overlap: the all-gather with the first GEMM, the reduce-scatter with the second
        x_BSI = start_gather(x_BsI, group)
        grad_BsI = start_scatter(backend.input_grad(grad, weight_OI), group)
        weight_grad = backend.weight_grad(grad, backend.input_operand(x_BSI()))
        if sink is None:
            return grad_BsI(), weight_grad(), None, None, None
        sink.push(weight_OI, weight_grad)
        return grad_BsI(), None, None, None, None


def _keep(ctx: Any, x: Operand) -> None:
    """Save the copy of a quantised input that the weight gradient reads."""
    assert isinstance(x, Quantised)
    part = x.for_weight_grad()
    ctx.save_for_backward(*part.tensors())
    ctx.emptied = part.empty()


def _kept_operand(ctx: Any) -> Quantised:
    """Return the operand that `_keep` saved."""
    quantised: Quantised = ctx.emptied.with_tensors(ctx.saved_tensors)
    return quantised


def _for_weight_grad(operand: Operand) -> Operand:
    """Return the copy of the operand that the weight gradient reads."""
    return operand.for_weight_grad() if isinstance(operand, Quantised) else operand


def _of_gathered(
    backend: LinearBackend, grad: Operand, x_BsI: Tensor, group: OptionalGroup
) -> WeightGrad:
    """Return the weight gradient after gathering the input over `group`."""
    return backend.weight_grad(grad, backend.input_operand(gathered(x_BsI, group)))


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows_TI: Tensor,
        weight_EIO: nn.Parameter,
        ends_E: Tensor,
        backend: GroupedLinearBackend,
        sink: WeightGradSink | None,
        keep: Keep | None,
        replicas: ReplicaWeight | None,
        ready: ReadyRows | None,
    ) -> Tensor:
        ctx.save_for_backward(rows_TI, ends_E)
        ctx.keep = keep
        ctx.weight_EIO = weight_EIO
        ctx.backend = backend
        ctx.sink = sink
        ctx.replicas = replicas
        ctx.ready = ready
        if replicas is None:
            rows = rows_TI if ready is None else ready.of(rows_TI)
            return backend.output(rows, weight_EIO, ends_E)
        gemm = partial(backend.output, rows_TI)
        return _with_replicas(gemm, rows_TI, weight_EIO, ends_E=ends_E, replicas=replicas)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TO: Tensor) -> tuple[Tensor | None, ...]:
        rows_TI, ends_E = ctx.saved_tensors
        weight_EIO, sink, replicas = ctx.weight_EIO, ctx.sink, ctx.replicas
        backend: GroupedLinearBackend = ctx.backend
        grad_TO = grad_TO.contiguous()
        gradient_of = partial(_gradient, backend, ends_E, len(weight_EIO), replicas=replicas)
        gradient = gradient_of(grad_TO, rows_TI)
        if ctx.keep is not None and sink is not None and sink.deferred:
            gradient = _kept(gradient_of, ctx.keep, grad_TO, rows_TI=rows_TI)
        if replicas is not None:
            # here, between fetching replicas and returning gradients, ranks have equal work
            gemm = partial(backend.input_grad, grad_TO)
            grad_TI = _with_replicas(
                gemm, grad_TO, weight_EIO, ends_E=ends_E, replicas=replicas, transposed=True
            )
        if sink is not None:
            sink.push(weight_EIO, gradient)
        if replicas is None:
            grad = grad_TO if ctx.ready is None else ctx.ready.of(grad_TO)
            grad_TI = backend.input_grad(grad, weight_EIO, ends_E)
        weight_grad = gradient() if sink is None else None
        return grad_TI, weight_grad, None, None, None, None, None, None


def _with_replicas(
    gemm: Callable[[Tensor, Tensor], Tensor],
    rows: Tensor,
    weight_EIO: Tensor,
    *,
    ends_E: Tensor,
    replicas: ReplicaWeight,
    transposed: bool = False,
) -> Tensor:
    """Run the grouped GEMM of this rank's experts, then that of the replicas it hosts.

    Fetch replica weights before the local GEMM. Otherwise receivers wait for the GEMM of the owner
    rank, which is overloaded.
    """
    replica_GIO = replicas.fetch()
    out = gemm(weight_EIO, ends_E[: len(weight_EIO)])
    add_groups(out, rows, replica_GIO, ends_E=ends_E, transposed=transposed)
    return out


def _gradient(
    backend: GroupedLinearBackend,
    ends_E: Tensor,
    own: int,
    grad_TO: Tensor,
    rows_TI: Tensor,
    *,
    replicas: ReplicaWeight | None,
) -> WeightGrad:
    """Return the weight gradient of this rank's `own` experts, the first groups of rows."""
    gradient = backend.weight_grad(grad_TO, rows_TI, ends_E[:own])
    if replicas is None:
        return gradient
    return GradWithReplicas(gradient, ReplicaGrad(rows_TI, grad_TO, ends_E, first=own), replicas)


def _kept(
    gradient_of: Callable[[Tensor, Tensor], WeightGrad],
    keep: Keep,
    grad_TO: Tensor,
    *,
    rows_TI: Tensor,
) -> WeightGrad:
    """Return a weight gradient whose operands are kept by `keep` until it is computed."""
    operands = keep(grad_TO), keep(rows_TI)
    for source, operand in zip(operands, (grad_TO, rows_TI), strict=True):
        source.add_reader(operand)
    return FetchedGrad(lambda: gradient_of(operands[0].read(), operands[1].read()))
