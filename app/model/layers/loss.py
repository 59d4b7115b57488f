"""Cross-entropy computed from hidden states, with the vocabulary sharded over tensor-parallel
ranks.

No rank ever holds all logits of a token, and with `chunk_tokens` none holds those of all its
tokens: it computes one block of logits at a time, and backward recomputes each block (after arXiv
2411.09009). The head's back end (`app.model.layers.linear`) computes the GEMMs, as in every
linear layer; this module decides when they run, and reduces the logits. Statistics are fp32. Ranks
all-reduce three numbers per token: the largest logit, the sum of exponentials and the logit of the
label.

Shapes: B sequences, S tokens per sequence of a context-parallel rank, s = S / tp of them here, T =
B · S, C tokens of a block of logits, D hidden, V rows of this rank of the vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from app.collectives import all_reduce
from app.kernels import cross_entropy
from app.kernels.common import usable
from app.model.layers.layer_groups import OptionalGroup, gathered, rank, scattered, size
from app.model.layers.linear import LinearBackend
from app.model.layers.weight_grads import ComputedGrad, WeightGrad, WeightGradSink

ROWS = 1024  # tokens whose logits are cast to fp32 at once by plain torch


def summed_loss(
    h_BsD: Tensor,
    weight_VD: nn.Parameter,
    labels_BS: Tensor,
    backend: LinearBackend,
    group: OptionalGroup = None,
    chunk_tokens: int | None = None,
    sink: WeightGradSink | None = None,
    logits: PlainLogits | None = None,
    weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy of h · weightᵀ, nats, summed over labels >= 0, an fp32 scalar; and
    that of each label, 0 for negative ones, fp32 B × S without gradients.

    The sum weighs labels by `weights`, fp32, broadcast to B × S; None weighs all the same. All
    ranks of `group` return the same. `backend` computes the GEMMs. With `chunk_tokens`, only
    logits of that many tokens exist at once; otherwise all, which are saved for backward in the
    dtype of the weight. `sink` takes the weight's gradient as in `app.model.layers.linear`.
    `logits` maps outputs of the head to logits; None leaves them as they are.
    """
    valid_BS = labels_BS >= 0
    weights_BS = valid_BS if weights is None else torch.where(valid_BS, weights, 0.0)
    total, each_T = _SummedLoss.apply(
        h_BsD,
        weight_VD,
        labels_BS.flatten(),
        weights_BS.flatten(),
        backend,
        group,
        chunk_tokens,
        sink,
        logits or PLAIN,
    )
    return total, each_T.view_as(labels_BS)


@torch.no_grad()
def token_losses(
    h_BsD: Tensor,
    weight_VD: nn.Parameter,
    labels_BS: Tensor,
    backend: LinearBackend,
    group: OptionalGroup = None,
) -> Tensor:
    """Return the cross-entropy of each label, nats, 0 for negative labels: fp32 B × S, no
    gradients.

    All ranks of `group` return the same. Only logits of ROWS tokens exist at once.
    """
    h_TD = gathered(h_BsD, group).flatten(0, 1)
    row_T = labels_BS.flatten() - rank(group) * len(weight_VD)
    parts = zip(h_TD.split(ROWS), row_T.split(ROWS), strict=True)
    found = [_statistics(backend.output(h_CD, weight_VD), row_C) for h_CD, row_C in parts]
    lse_T, label_T = _merge(torch.cat(found, dim=1), group)
    return torch.where(labels_BS >= 0, (lse_T - label_T).view_as(labels_BS), 0.0)


def _statistics(logits_CV: Tensor, row_C: Tensor) -> Tensor:
    """Return per token the largest logit, the sum of exponentials relative to it, and the label's
    logit if this rank holds it, otherwise 0: [3, C].
    """
    if usable(logits_CV):
        return cross_entropy.statistics(logits_CV, row_C)
    found = []
    for logits, row in zip(logits_CV.split(ROWS), row_C.split(ROWS), strict=True):
        wide = logits.float()
        largest = wide.amax(dim=1)
        here = (row >= 0) & (row < wide.shape[1])
        label = wide.gather(1, torch.where(here, row, 0)[:, None]).squeeze(1) * here
        found.append(torch.stack((largest, wide.sub(largest[:, None]).exp_().sum(dim=1), label)))
    return torch.cat(found, dim=1)


def _merge(statistics_3T: Tensor, group: OptionalGroup) -> tuple[Tensor, Tensor]:
    """Return (log-sum-exp, label's logit) of every token over all ranks: [T] and [T]."""
    largest_T, sums_T, label_T = statistics_3T.unbind(0)
    if group is not None and size(group) > 1:
        over_all_T = largest_T.clone()
        dist.all_reduce(over_all_T, dist.ReduceOp.MAX, group)
        both_2T = torch.stack((sums_T * (largest_T - over_all_T).exp(), label_T))
        all_reduce(both_2T, group)
        largest_T, (sums_T, label_T) = over_all_T, both_2T.unbind(0)
    return sums_T.log() + largest_T, label_T


def into_gradient(logits_CV: Tensor, row_C: Tensor, lse_C: Tensor, weight_C: Tensor) -> None:
    """Replace logits in place by the gradient of the loss: (softmax - one at the label) ·
    weight.
    """
    if usable(logits_CV):
        return cross_entropy.into_gradient(logits_CV, row_C, lse_C, weight_C=weight_C)
    parts = (part.split(ROWS) for part in (logits_CV, row_C, lse_C, weight_C))
    for logits, row, lse, weight in zip(*parts, strict=True):
        probs = logits.float().sub_(lse[:, None]).exp_()
        here = (row >= 0) & (row < probs.shape[1])
        index = torch.where(here, row, 0)[:, None]
        probs.scatter_(1, index, probs.gather(1, index) - here[:, None].float())
        logits.copy_(probs.mul_(weight[:, None]))


class PlainLogits:
    """Logits as the head's GEMM makes them."""

    def of(self, logits: Tensor) -> Tensor:
        """Return the model's logits, differentiable."""
        return logits

    def backend(self, of_head: LinearBackend) -> LinearBackend:
        """Return the back end whose outputs the loss takes."""
        return of_head

    def into_gradient(
        self, logits_CV: Tensor, row_C: Tensor, lse_C: Tensor, weight_C: Tensor
    ) -> None:
        """Replace the model's logits in place by the gradient of the head's GEMM."""
        into_gradient(logits_CV, row_C, lse_C, weight_C)


PLAIN = PlainLogits()


class _SummedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        h_BsD: Tensor,
        weight_VD: nn.Parameter,
        labels_T: Tensor,
        weights_T: Tensor,
        backend: LinearBackend,
        group: OptionalGroup,
        chunk_tokens: int | None,
        sink: WeightGradSink | None,
        logits: PlainLogits,
    ) -> tuple[Tensor, Tensor]:
        backend = logits.backend(backend)
        h_TD = gathered(h_BsD, group).flatten(0, 1)
        row_T = labels_T - rank(group) * len(weight_VD)
        chunk = chunk_tokens or len(h_TD)
        kept = []
        found = []
        for h_CD, row_C in zip(h_TD.split(chunk), row_T.split(chunk), strict=True):
            logits_CV = backend.output(h_CD, weight_VD)
            found.append(_statistics(logits_CV, row_C))
            kept += [logits_CV] if chunk_tokens is None else []
        lse_T, label_T = _merge(torch.cat(found, dim=1), group)
        ctx.save_for_backward(h_BsD, row_T, lse_T, weights_T, *kept)
        ctx.weight_VD = weight_VD
        ctx.backend = backend
        ctx.group = group
        ctx.chunk = chunk
        ctx.sink = sink
        ctx.logits = logits
        each_T = torch.where(labels_T >= 0, lse_T - label_T, 0.0)
        weighted_T = each_T if weights_T.dtype is torch.bool else each_T * weights_T
        ctx.mark_non_differentiable(each_T)
        ctx.set_materialize_grads(False)
        return weighted_T.sum(), each_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor | None, ...]:
        h_BsD, row_T, lse_T, weights_T, *kept = ctx.saved_tensors
        weight_VD = ctx.weight_VD
        h_TD = gathered(h_BsD, ctx.group).flatten(0, 1)
        weight_T = weights_T * grad
        if kept:
            ctx.logits.into_gradient(kept[0], row_T, lse_T, weight_T)
            grad_TD, weight_gradient = ctx.backend.gradients(kept[0], h_TD, weight_VD)
        else:
            grad_TD, weight_gradient = _chunked(
                ctx.backend,
                ctx.logits,
                ctx.chunk,
                h_TD,
                weight_VD=weight_VD,
                row_T=row_T,
                lse_T=lse_T,
                weight_T=weight_T,
            )
        grad_BsD = scattered(grad_TD.view(len(h_BsD), -1, h_TD.shape[1]), ctx.group)
        if ctx.sink is None:
            return grad_BsD, weight_gradient().to(weight_VD.dtype), *[None] * 7
        ctx.sink.push(weight_VD, weight_gradient)
        return grad_BsD, *[None] * 8


def _chunked(
    backend: LinearBackend,
    logits: PlainLogits,
    chunk: int,
    h_TD: Tensor,
    weight_VD: Tensor,
    row_T: Tensor,
    lse_T: Tensor,
    weight_T: Tensor,
) -> tuple[Tensor, WeightGrad]:
    """Return the gradients of hidden states [T, D] and of the weight [V, D], accumulated in
    fp32.
    """
    grad_TD = torch.empty_like(h_TD)
    sum_VD: Tensor | None = None
    parts = (part.split(chunk) for part in (grad_TD, h_TD, row_T, lse_T, weight_T))
    for grad_CD, h_CD, row_C, lse_C, weight_C in zip(*parts, strict=True):
        logits_CV = backend.output(h_CD, weight_VD)
        logits.into_gradient(logits_CV, row_C, lse_C, weight_C)
        _, weight_grad = backend.gradients(logits_CV, h_CD, weight_VD, out=grad_CD)
        sum_VD = weight_grad().float() if sum_VD is None else sum_VD.add_(weight_grad())
    assert sum_VD is not None, "a microbatch has tokens"
    return grad_TD, ComputedGrad(sum_VD)
