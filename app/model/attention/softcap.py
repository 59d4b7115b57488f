"""Attention with capped scores, c · tanh(s / c) (Gemma 2, arXiv 2408.00118), by torch's matmuls.

No kernel of torch or cuDNN caps scores. Blocks of queries attend in turn, each to the keys that it
may see, and backward recomputes their probabilities: memory for scores is that of one block, and
sums have a fixed order.

Shapes: as in `app.model.attention.modules`; S queries, the last of K keys; C queries of a block, P
query heads for each of G key/value heads, W keys that a block may see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from app.model.layers.attend import DocumentOffsets, visible
from app.plan.parts.attention import block_queries


@dataclass(frozen=True, slots=True)
class SoftcapAttention:
    """Attention with scores capped to ±`softcap` (`Attend`)."""

    softcap: float

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
        factor = q_BSNH.shape[-1] ** -0.5 if scale is None else scale
        cap = _Cap(self.softcap, factor, window, documents)
        out_BSNH: Tensor = _Capped.apply(q_BSNH, k_BKGH, v_BKGH, cap)
        return out_BSNH


def capped(scores: Tensor, softcap: float) -> Tensor:
    """Return c · tanh(s / c)."""
    return (scores / softcap).tanh_() * softcap


@dataclass(frozen=True, slots=True)
class _Cap:
    softcap: float
    factor: float  # on the scores, before the cap
    window: int | None
    documents: DocumentOffsets | None

    def blocks(self, queries: int, keys: int, rows: int) -> Iterator[tuple[slice, slice]]:
        """Yield blocks of queries and the keys that they may see; `rows`: of one query."""
        before = keys - queries
        size = block_queries(rows, keys)
        for start in range(0, queries, size):
            stop = min(start + size, queries)
            first = 0 if self.window is None else max(0, before + start - self.window + 1)
            yield slice(start, stop), slice(first, before + stop)

    def hidden(self, batch: int, queries: int, keys: int, device: torch.device) -> _Hidden:
        """Return the function from a block to where its queries must not attend to its keys."""
        if self.documents is None:
            return lambda some, seen: (
                ~visible(batch, some.stop - some.start, seen.stop, device, self.window, None)[
                    :, :, None, :, seen
                ]
            )
        whole = ~visible(batch, queries, keys, device, self.window, self.documents)
        return lambda some, seen: whole[:, :, None, some, seen]


# block of queries, keys that it may see -> bool, B or 1 × 1 × 1 × C × W
_Hidden = Callable[[slice, slice], Tensor]


def _probabilities(
    q_BGPCH: Tensor, k_BGWH: Tensor, hidden: Tensor, cap: _Cap
) -> tuple[Tensor, Tensor]:
    """Return fp32 probabilities B × G × P × C × W, and tanh of the scores over the cap."""
    scores = q_BGPCH @ k_BGWH[:, :, None].transpose(-1, -2)
    tanh = scores.to(torch.promote_types(scores.dtype, torch.float32))
    tanh = tanh.mul_(cap.factor / cap.softcap).tanh_()
    return (tanh * cap.softcap).masked_fill_(hidden, -torch.inf).softmax(-1), tanh


def _by_group(x_BSNH: Tensor, groups: int) -> Tensor:
    """Return B × G × P × S × H, a view."""
    apart: Tensor = x_BSNH.unflatten(2, (groups, -1))
    return apart.permute(0, 2, 3, 1, 4)


class _Capped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_BSNH: Tensor, k_BKGH: Tensor, v_BKGH: Tensor, cap: _Cap) -> Tensor:
        ctx.save_for_backward(q_BSNH, k_BKGH, v_BKGH)
        ctx.cap = cap
        (batch, queries, heads, _), groups = q_BSNH.shape, k_BKGH.shape[2]
        keys = k_BKGH.shape[1]
        hidden = cap.hidden(batch, queries, keys, q_BSNH.device)
        q, k, v = _by_group(q_BSNH, groups), k_BKGH.transpose(1, 2), v_BKGH.transpose(1, 2)
        out_BSNH = q_BSNH.new_empty(*q_BSNH.shape[:3], v_BKGH.shape[3])
        out = _by_group(out_BSNH, groups)
        for some, seen in cap.blocks(queries, keys, batch * heads):
            probs, _ = _probabilities(q[:, :, :, some], k[:, :, seen], hidden(some, seen), cap)
            out[:, :, :, some] = probs.to(v.dtype) @ v[:, :, None, seen]
        return out_BSNH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BSNH: Tensor) -> tuple[Tensor | None, ...]:
        q_BSNH, k_BKGH, v_BKGH = ctx.saved_tensors
        cap: _Cap = ctx.cap
        (batch, queries, heads, _), groups = q_BSNH.shape, k_BKGH.shape[2]
        keys = k_BKGH.shape[1]
        hidden = cap.hidden(batch, queries, keys, q_BSNH.device)
        q, k, v = _by_group(q_BSNH, groups), k_BKGH.transpose(1, 2), v_BKGH.transpose(1, 2)
        grad = _by_group(grad_BSNH, groups)
        dq_BSNH = torch.empty_like(q_BSNH)
        dq = _by_group(dq_BSNH, groups)
        wide = torch.promote_types(q.dtype, torch.float32)
        dk, dv = (torch.zeros_like(x, dtype=wide) for x in (k, v))
        for some, seen in cap.blocks(queries, keys, batch * heads):
            q_some, k_seen, grad_some = q[:, :, :, some], k[:, :, seen], grad[:, :, :, some]
            probs, tanh = _probabilities(q_some, k_seen, hidden(some, seen), cap)
            dv[:, :, seen] += _summed(probs.to(v.dtype), grad_some)
            slope = (grad_some @ v[:, :, None, seen].transpose(-1, -2)).to(probs.dtype)
            slope -= (slope * probs).sum(-1, keepdim=True)
            slope *= probs * (1 - tanh.square()) * cap.factor
            slopes = slope.to(q.dtype)
            dq[:, :, :, some] = slopes @ k_seen[:, :, None]
            dk[:, :, seen] += _summed(slopes, q_some)
        return dq_BSNH, *(x.to(q.dtype).transpose(1, 2) for x in (dk, dv)), None


def _summed(rows_BGPCW: Tensor, x_BGPCH: Tensor) -> Tensor:
    """Return rowsᵀ · x, summed over queries and the query heads of a group: B × G × W × H."""
    return rows_BGPCW.flatten(2, 3).transpose(-1, -2) @ x_BGPCH.flatten(2, 3)
