"""Attention sinks: a learnt logit per query head that takes part in the softmax's denominator and
has no value (GPT-OSS, arXiv 2508.10925).

Attention without sinks and the logarithm of its denominator, which kernels return, give the result
exactly: out · sigmoid(lse − sink). Backward of the same kernel is right once it gets this result
and the logarithm of the larger denominator.

Shapes: as in `app.model.attention.modules`; P query heads share a key/value head.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from app.model.attention.transformer_engine import TransformerEngineAttention
from app.model.layers.attend import Attend, DocumentOffsets, TorchAttention, by_flash, visible


def with_sinks(attend: Attend, sinks_N: Tensor) -> Attend:
    """Return attention by the same kernels with these sinks of its query heads."""
    match attend:
        case TorchAttention():
            return TorchSinks(sinks_N, attend.deterministic)
        case TransformerEngineAttention():
            return attend.with_sinks(sinks_N)
    raise AssertionError(f"{type(attend).__name__} has no sinks")


def look_with_sinks(
    q_BGPH: Tensor, k_BGKH: Tensor, v_BGKH: Tensor, *, bias: Tensor, sinks_N: Tensor, scale: float
) -> Tensor:
    """Attend with the queries of one token per sequence: B × G × P × H. `bias` is added to the
    scores.
    """
    scores = (q_BGPH @ k_BGKH.transpose(-1, -2)).float() * scale + bias
    sinks_GP1 = sinks_N.float().view(q_BGPH.shape[1], -1, 1)
    sinks = sinks_GP1.expand(*scores.shape[:-1], 1)
    probs = torch.cat((scores, sinks), dim=-1).softmax(dim=-1)[..., :-1]
    return probs.to(v_BGKH.dtype) @ v_BGKH


@dataclass(frozen=True, slots=True)
class TorchSinks:
    """torch's Flash kernels (`Attend`) with sinks; GEMMs where they do not apply (`by_flash`)."""

    sinks_N: Tensor
    deterministic: bool

    def __call__(
        self,
        q_BSNH: Tensor,
        k_BKGH: Tensor,
        v_BKGH: Tensor,
        *,
        window: int | None,
        documents: DocumentOffsets | None,
        scale: float | None,
    ) -> Tensor:
        """See `Attend`."""
        width = q_BSNH.shape[3]
        factor = width**-0.5 if scale is None else scale
        if window is not None and window >= k_BKGH.shape[1]:
            window = None
        flash = q_BSNH.is_cuda and by_flash(q_BSNH.dtype, width)
        kernels = (_Flash if flash else _Gemms)(window, documents, factor, self.deterministic)
        out_BSNH: Tensor = _WithSinks.apply(q_BSNH, k_BKGH, v_BKGH, self.sinks_N, kernels)
        return out_BSNH


class _WithSinks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_BSNH: Tensor,
        k_BKGH: Tensor,
        v_BKGH: Tensor,
        sinks_N: Tensor,
        kernels: _Flash | _Gemms,
    ) -> Tensor:
        out, lse, *kept = kernels.forward(q_BSNH, k_BKGH, v_BKGH)
        larger = torch.logaddexp(lse, sinks_N.to(lse.dtype)[:, None])
        out *= (lse - larger).exp_().transpose(-1, -2)[..., None]
        ctx.save_for_backward(q_BSNH, k_BKGH, v_BKGH, sinks_N, out, larger, *kept)
        ctx.kernels = kernels
        return out.view(q_BSNH.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BSNH: Tensor) -> tuple[Tensor | None, ...]:
        q_BSNH, k_BKGH, v_BKGH, sinks_N, out, lse, *kept = ctx.saved_tensors
        grad = grad_BSNH.contiguous().view(out.shape)
        grads = ctx.kernels.backward(grad, (q_BSNH, k_BKGH, v_BKGH), out=out, lse=lse, kept=kept)
        # −Σ p · (grad · out) of each head, p the probability of its sink; torch's order is fixed
        dots = (grad.to(lse.dtype) * out).sum(-1).transpose(-1, -2)
        found = dots * (sinks_N.to(lse.dtype)[:, None] - lse).exp_()
        sums_N = found.sum(-1).view(-1, len(sinks_N)).sum(0).neg_()
        return *grads, sums_N.to(sinks_N.dtype), None


@dataclass(frozen=True, slots=True)
class _Gemms:
    """Attention by GEMMs, of heads B × S × N × H, with lse B × N × S in fp32 or wider."""

    window: int | None
    documents: DocumentOffsets | None
    scale: float
    deterministic: bool

    def forward(self, q_BSNH: Tensor, k_BKGH: Tensor, v_BKGH: Tensor) -> list[Tensor]:
        """Return the output and the logarithm of the softmax's denominator."""
        scores = self._scores(q_BSNH, k_BKGH)
        lse_BGPS = scores.logsumexp(-1)
        probs = scores.sub_(lse_BGPS[..., None]).exp_()
        out_BGPSH = probs.to(v_BKGH.dtype) @ _of_groups(v_BKGH)
        out_BSNH = out_BGPSH.flatten(1, 2).transpose(1, 2).contiguous()
        return [out_BSNH, lse_BGPS.flatten(1, 2)]

    def backward(
        self,
        grad: Tensor,
        heads: tuple[Tensor, Tensor, Tensor],
        *,
        out: Tensor,
        lse: Tensor,
        kept: list[Tensor],
    ) -> list[Tensor]:
        """Return the gradients of queries, keys and values."""
        q_BSNH, k_BKGH, v_BKGH = heads
        groups = k_BKGH.shape[2]
        q, grad_out = _by_groups(q_BSNH, groups), _by_groups(grad, groups)
        probs = self._scores(q_BSNH, k_BKGH).sub_(lse.unflatten(1, (groups, -1))[..., None]).exp_()
        v_grad = (probs.transpose(-1, -2) @ grad_out.to(probs.dtype)).sum(2)
        slopes = (grad_out @ _of_groups(v_BKGH).transpose(-1, -2)).to(probs.dtype)
        slopes -= (grad_out.to(probs.dtype) * _by_groups(out, groups)).sum(-1, keepdim=True)
        slopes *= probs.mul_(self.scale)
        slopes = slopes.to(q.dtype)
        q_grad = (slopes @ _of_groups(k_BKGH)).flatten(1, 2)
        k_grad = (slopes.transpose(-1, -2) @ q).sum(2)
        made = zip((q_grad, k_grad, v_grad), heads, strict=True)
        return [each.transpose(1, 2).to(head.dtype) for each, head in made]

    def _scores(self, q_BSNH: Tensor, k_BKGH: Tensor) -> Tensor:
        """Return masked scores, B × G × P × S × K."""
        batch, queries = q_BSNH.shape[:2]
        keys, groups = k_BKGH.shape[1:3]
        scores = _by_groups(q_BSNH, groups) @ _of_groups(k_BKGH).transpose(-1, -2)
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32)).mul_(self.scale)
        seen = visible(batch, queries, keys, q_BSNH.device, self.window, self.documents)
        return scores.masked_fill_(~seen[:, None], -torch.inf)


def _by_groups(x_BSNH: Tensor, groups: int) -> Tensor:
    """Return query heads as B × G × P × S × H."""
    grouped: Tensor = x_BSNH.transpose(1, 2).unflatten(1, (groups, -1))
    return grouped


def _of_groups(x_BKGH: Tensor) -> Tensor:
    """Return key or value heads as B × G × 1 × K × H."""
    return x_BKGH.transpose(1, 2)[:, :, None]


@dataclass(frozen=True, slots=True)
class _Flash:
    """torch's Flash kernels; under documents, of tokens of all sequences, with lse N × T."""

    window: int | None
    documents: DocumentOffsets | None
    scale: float
    deterministic: bool

    def forward(self, q_BSNH: Tensor, k_BKGH: Tensor, v_BKGH: Tensor) -> list[Tensor]:
        """Return the output, the logarithm of the softmax's denominator, and a random state."""
        heads = [self._rows(each) for each in (q_BSNH, k_BKGH, v_BKGH)]
        made = torch.ops.aten._flash_attention_forward(
            *heads, *self._lengths(q_BSNH, k_BKGH), False, **self._limits
        )
        return list(made[:4])

    def backward(
        self,
        grad: Tensor,
        heads: tuple[Tensor, Tensor, Tensor],
        *,
        out: Tensor,
        lse: Tensor,
        kept: list[Tensor],
    ) -> list[Tensor]:
        """Return the gradients of queries, keys and values."""
        rows = [self._rows(each) for each in heads]
        lengths = self._lengths(*heads[:2])
        with _ordered(self.deterministic):
            grads = torch.ops.aten._flash_attention_backward(
                grad, *rows, out, lse, *lengths, *kept, **self._limits
            )
        return [each.view(head.shape) for each, head in zip(grads, heads, strict=True)]

    def _rows(self, heads: Tensor) -> Tensor:
        return heads if self.documents is None else heads.flatten(0, 1)

    def _lengths(self, q_BSNH: Tensor, k_BKGH: Tensor) -> tuple[object, ...]:
        """Return offsets of documents, lengths, dropout, and whether attention is causal, which a
        window says by its right end.
        """
        documents = self.documents
        ends = (None, None) if documents is None else (documents.queries, documents.keys)
        return *ends, q_BSNH.shape[1], k_BKGH.shape[1], 0.0, self.window is None

    @property
    def _limits(self) -> dict[str, object]:
        left = -1 if self.window is None else self.window - 1
        return {"scale": self.scale, "window_size_left": left, "window_size_right": 0}


@contextmanager
def _ordered(deterministic: bool) -> Iterator[None]:
    """Have torch's kernels add in a fixed order inside; the switch is global."""
    before = torch.are_deterministic_algorithms_enabled()
    if deterministic:
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
