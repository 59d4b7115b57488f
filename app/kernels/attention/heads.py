"""Split of `wqkv`'s output into contiguous queries, keys and values, with norms and rotary
positions, in one pass.

A program takes some tokens and some key/value heads with their query heads, and holds one head at a
time as two tiles: the left and the right values of its pairs. Pairs lie across the halves of the
rotated part, then across the halves of the rest.

Shapes: B sequences, S tokens of each, T = B·S, G key/value heads, P query heads per key/value head,
N = G·P, H head width, h = H / 2, R ≤ H rotated width of a head, F = G·(P + 2)·H, C tokens of a
program, J programs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from app.kernels.attention.heads_kernels import heads_backward, heads_forward
from app.kernels.tiling import head_tiling


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMSNorm weights of every query and key, applied before the rotation."""

    query_H: Tensor
    key_H: Tensor
    eps: float


def split_and_rotate(
    qkv_BSF: Tensor,
    cos_BS1R: Tensor,
    sin_BS1R: Tensor,
    num_kv_heads: int,
    queries_per_kv: int,
    norms: HeadNorms | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Map B × S × G·(P+2)·H to queries B × S × G·P × H, keys and values B × S × G × H: contiguous,
    rounded once from fp32.

    `qkv_BSF` holds, per key/value head, its P query heads, its key, its value. The tables are fp32
    with two equal halves (Su et al. 2021, rotating the two halves of a head's first R values);
    their B may be 1. H and R are even. Saves the tables for backward, and `qkv_BSF` if there are
    norms. fp32, bf16 or fp16.
    """
    rotated = cos_BS1R.shape[3]
    tiling = _Tiling(qkv_BSF.shape, num_kv_heads, queries_per_kv, rotated=rotated, norms=norms)
    heads: tuple[Tensor, Tensor, Tensor] = _SplitAndRotate.apply(
        qkv_BSF.contiguous(),
        cos_BS1R.contiguous(),
        sin_BS1R.contiguous(),
        norms.query_H if norms else None,
        norms.key_H if norms else None,
        tiling,
    )
    return heads


class _Tiling:
    """Tiling by shape alone, so that equal runs add in the same order."""

    def __init__(
        self,
        shape: torch.Size,
        num_kv_heads: int,
        queries_per_kv: int,
        rotated: int,
        norms: HeadNorms | None,
    ) -> None:
        self.shape = shape
        self.eps = norms.eps if norms else 0.0
        width = shape[2] // (num_kv_heads * (queries_per_kv + 2))
        tiling = head_tiling(num_kv_heads, queries_per_kv, width)
        self.grid = (tiling.grid(shape[0] * shape[1], num_kv_heads),)
        self.constants = {
            "G": num_kv_heads,
            "P": queries_per_kv,
            "H": width,
            "R": rotated,
            "NORMS": norms is not None,
            "TAKEN": tiling.taken,
            "C": tiling.height,
            "HALF": tiling.half,
        }

    def outputs(self, qkv_BSF: Tensor) -> tuple[Tensor, ...]:
        """Allocate queries, keys and values."""
        kv_heads, queries, width = (self.constants[name] for name in "GPH")
        return tuple(
            qkv_BSF.new_empty(*self.shape[:2], heads, width)
            for heads in (kv_heads * queries, kv_heads, kv_heads)
        )

    def sizes(self, cos_BS1R: Tensor) -> dict[str, float]:
        """Return sizes that both kernels take; `table_stride` lies between the tables of two
        sequences.
        """
        batch, length, _ = self.shape
        return {
            "eps": self.eps,
            "tokens": batch * length,
            "length": length,
            "table_stride": 0 if cos_BS1R.shape[0] == 1 else cos_BS1R.stride(0),
        }


class _SplitAndRotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv_BSF: Tensor,
        cos_BS1R: Tensor,
        sin_BS1R: Tensor,
        query_H: Tensor | None,
        key_H: Tensor | None,
        tiling: _Tiling,
    ) -> tuple[Tensor, ...]:
        ctx.tiling = tiling
        q_BSNH, k_BSGH, v_BSGH = tiling.outputs(qkv_BSF)
        kept = () if query_H is None else (qkv_BSF, query_H, key_H)
        ctx.save_for_backward(cos_BS1R, sin_BS1R, *kept)
        heads_forward[tiling.grid](
            qkv_TF=qkv_BSF,
            q_TNH=q_BSNH,
            k_TGH=k_BSGH,
            v_TGH=v_BSGH,
            cos_TR=cos_BS1R,
            sin_TR=sin_BS1R,
            query_H=query_H,
            key_H=key_H,
            **tiling.sizes(cos_BS1R),
            **tiling.constants,
        )
        return q_BSNH, k_BSGH, v_BSGH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        tiling = ctx.tiling
        cos_BS1R, sin_BS1R, *kept = ctx.saved_tensors
        qkv_BSF, query_H, key_H = kept or (None, None, None)
        dq, dk, dv = (grad if grad.stride(3) == 1 else grad.contiguous() for grad in grads)
        grad_BSF = dq.new_empty(tiling.shape)
        partial_J2H = None
        if kept:
            partial_J2H = grad_BSF.new_empty(
                *tiling.grid, 2, tiling.constants["H"], dtype=torch.float32
            )
        heads_backward[tiling.grid](
            dq=dq,
            dk=dk,
            dv=dv,
            q_of_sequence=dq.stride(0),
            q_of_token=dq.stride(1),
            q_of_head=dq.stride(2),
            k_of_sequence=dk.stride(0),
            k_of_token=dk.stride(1),
            k_of_head=dk.stride(2),
            v_of_sequence=dv.stride(0),
            v_of_token=dv.stride(1),
            v_of_head=dv.stride(2),
            grad_TF=grad_BSF,
            partial_J2H=partial_J2H,
            cos_TR=cos_BS1R,
            sin_TR=sin_BS1R,
            qkv_TF=qkv_BSF,
            query_H=query_H,
            key_H=key_H,
            **tiling.sizes(cos_BS1R),
            **tiling.constants,
        )
        if partial_J2H is None or query_H is None:
            return grad_BSF, None, None, None, None, None
        grad_query_H, grad_key_H = partial_J2H.sum(0).to(query_H.dtype)
        return grad_BSF, None, None, grad_query_H, grad_key_H, None
