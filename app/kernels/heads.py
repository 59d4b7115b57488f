"""From the product of `wqkv` to contiguous queries, keys and values: split, optional norms, rotary positions, in one pass.

A program takes some tokens and some key/value heads with their query heads, and holds the two halves of one head at a time.

Shapes: B sequences, S tokens of each, T = B·S, G key/value heads, P query heads per key/value head, H head width,
h = H / 2, C tokens of a program, J programs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from app.kernels.common import block_of, jit, tl, triton

TILE = 1024  # values of half a head that a program holds: 8 per thread, so 16 bytes of bf16
HEADS = 6  # that a program takes at least, where there are so many: the tables are read once for all


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMSNorm of every query and key, in front of the rotation."""

    query_H: Tensor
    key_H: Tensor
    eps: float


def split_and_rotate(
    qkv_BSF: Tensor, cos_BS1H: Tensor, sin_BS1H: Tensor, num_kv_heads: int, queries_per_kv: int, norms: HeadNorms | None
) -> tuple[Tensor, Tensor, Tensor]:
    """B × S × G·(P+2)·H -> queries B × S × G·P × H, keys and values B × S × G × H: contiguous, rounded once from fp32.

    `qkv_BSF` holds, per key/value head, its P query heads, its key, its value. The tables are fp32 with two equal halves
    (Su et al. 2021, rotating the two halves of a head); their B may be 1. H is even. Keeps the tables for backward, and
    `qkv_BSF` if there are norms. fp32, bf16 or fp16.
    """
    cut = _Cut(qkv_BSF.shape, num_kv_heads, queries_per_kv, norms)
    weights = (norms.query_H, norms.key_H) if norms else (None, None)
    return _SplitAndRotate.apply(qkv_BSF.contiguous(), cos_BS1H.contiguous(), sin_BS1H.contiguous(), *weights, cut)


class _Cut:
    """How the work is cut: by shape alone, so that equal runs add in the same order."""

    def __init__(self, shape: torch.Size, num_kv_heads: int, queries_per_kv: int, norms: HeadNorms | None) -> None:
        self.shape, self.eps = shape, norms.eps if norms else 0.0
        wanted = -(-HEADS // (queries_per_kv + 2))
        taken = wanted if num_kv_heads % wanted == 0 else 1
        width = shape[2] // (num_kv_heads * (queries_per_kv + 2))
        half = block_of(width // 2)
        height = max(1, TILE // half)
        self.grid = (triton.cdiv(shape[0] * shape[1], height) * (num_kv_heads // taken),)
        self.constants = {"G": num_kv_heads, "P": queries_per_kv, "H": width, "NORMS": norms is not None}
        self.constants |= {"TAKEN": taken, "C": height, "HALF": half}

    def outputs(self, qkv_BSF: Tensor) -> tuple[Tensor, ...]:
        """Memory for queries, keys and values."""
        kv_heads, queries, width = (self.constants[name] for name in "GPH")
        return tuple(qkv_BSF.new_empty(*self.shape[:2], heads, width) for heads in (kv_heads * queries, kv_heads, kv_heads))

    def sizes(self, cos_BS1H: Tensor) -> tuple[float, ...]:
        """Epsilon, numbers of tokens in all and per sequence, and how far apart the tables of two sequences are."""
        batch, length, _ = self.shape
        return self.eps, batch * length, length, 0 if cos_BS1H.shape[0] == 1 else cos_BS1H.stride(0)


class _SplitAndRotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv_BSF: Tensor, cos_BS1H: Tensor, sin_BS1H: Tensor, query_H: Tensor | None, key_H: Tensor | None, cut: _Cut
    ) -> tuple[Tensor, ...]:
        ctx.cut, outs = cut, cut.outputs(qkv_BSF)
        ctx.save_for_backward(cos_BS1H, sin_BS1H, *(() if query_H is None else (qkv_BSF, query_H, key_H)))
        _forward[cut.grid](qkv_BSF, *outs, cos_BS1H, sin_BS1H, query_H, key_H, *cut.sizes(cos_BS1H), **cut.constants)
        return outs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (cos_BS1H, sin_BS1H, *kept), cut = ctx.saved_tensors, ctx.cut
        grads = tuple(grad if grad.stride(3) == 1 else grad.contiguous() for grad in grads)
        strides = [stride for grad in grads for stride in grad.stride()[:3]]
        grad_BSF, partial_J2H = grads[0].new_empty(cut.shape), None
        if kept:
            partial_J2H = grad_BSF.new_empty(*cut.grid, 2, cut.constants["H"], dtype=torch.float32)
        tensors = grad_BSF, partial_J2H, cos_BS1H, sin_BS1H, *(kept or (None, None, None))
        _backward[cut.grid](*grads, *strides, *tensors, *cut.sizes(cos_BS1H), **cut.constants)
        grad_norms = (None, None) if partial_J2H is None else partial_J2H.sum(0).to(kept[1].dtype)
        return grad_BSF, None, None, *grad_norms, None


@jit
def _place(
    tokens: int,
    length: int,
    G: tl.constexpr,
    H: tl.constexpr,
    TAKEN: tl.constexpr,
    C: tl.constexpr,
    HALF: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """This program's first key/value head; its tokens, their sequences and places there; columns; what exists of the tile."""
    parts: tl.constexpr = G // TAKEN
    token = tl.program_id(0) // parts * C + tl.arange(0, C)[:, None]
    sequence, place = (token // length).to(tl.int64), (token % length).to(tl.int64)  # offsets may exceed 32 bits
    column = tl.arange(0, HALF)[None, :]
    first = (tl.program_id(0) % parts).to(tl.int64) * TAKEN
    return first, token.to(tl.int64), sequence, place, column, (token < tokens) & (column < H // 2)


@jit
def _load(pointers: tl.tensor, exists: tl.tensor, H: tl.constexpr) -> tuple[tl.tensor, ...]:
    """Both halves of a head in fp32; zeros where nothing is."""
    left = tl.load(pointers, mask=exists, other=0.0).to(tl.float32)
    return left, tl.load(pointers + H // 2, mask=exists, other=0.0).to(tl.float32)


@jit
def _store(pointers: tl.tensor, left: tl.tensor, right: tl.tensor, exists: tl.tensor, H: tl.constexpr) -> None:
    tl.store(pointers, left, mask=exists)
    tl.store(pointers + H // 2, right, mask=exists)


@jit
def _turned(left: tl.tensor, right: tl.tensor, cos: tl.tensor, sin: tl.tensor) -> tuple[tl.tensor, ...]:
    return left * cos - right * sin, right * cos + left * sin


@jit
def _inverse_rms(left: tl.tensor, right: tl.tensor, eps: float, H: tl.constexpr) -> tl.tensor:
    """C × 1."""
    return tl.rsqrt(tl.sum(left * left + right * right, 1)[:, None] / H + eps)


@jit
def _one_forward(
    source: tl.tensor,
    target: tl.tensor,
    weight_H: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    column: tl.tensor,
    exists: tl.tensor,
    eps: float,
    H: tl.constexpr,
    NORMS: tl.constexpr,
) -> None:
    """A query or a key: normed and turned."""
    left, right = _load(source, exists, H)
    if NORMS:
        inverse = _inverse_rms(left, right, eps, H)
        weight_left, weight_right = _load(weight_H + column, column < H // 2, H)
        left, right = left * inverse * weight_left, right * inverse * weight_right
    left, right = _turned(left, right, cos, sin)
    _store(target, left, right, exists, H)


@jit
def _forward(
    qkv_TF: tl.tensor,
    q_TNH: tl.tensor,
    k_TGH: tl.tensor,
    v_TGH: tl.tensor,
    cos_TH: tl.tensor,
    sin_TH: tl.tensor,
    query_H: tl.tensor,
    key_H: tl.tensor,
    eps: float,
    tokens: int,
    length: int,
    table_stride: int,
    G: tl.constexpr,
    P: tl.constexpr,
    H: tl.constexpr,
    NORMS: tl.constexpr,
    TAKEN: tl.constexpr,
    C: tl.constexpr,
    HALF: tl.constexpr,
) -> None:
    first, token, sequence, place, column, exists = _place(tokens, length, G, H, TAKEN, C, HALF)
    cos = tl.load(cos_TH + sequence * table_stride + place * H + column, mask=exists, other=0.0)
    sin = tl.load(sin_TH + sequence * table_stride + place * H + column, mask=exists, other=0.0)
    for index in tl.static_range(TAKEN):
        group = first + index
        source = qkv_TF + (token * G + group) * (P + 2) * H + column
        key = (token * G + group) * H + column
        for head in range(P):
            query = ((token * G + group) * P + head) * H + column
            _one_forward(source + head * H, q_TNH + query, query_H, cos, sin, column, exists, eps, H, NORMS)
        _one_forward(source + P * H, k_TGH + key, key_H, cos, sin, column, exists, eps, H, NORMS)
        left, right = _load(source + (P + 1) * H, exists, H)
        _store(v_TGH + key, left, right, exists, H)


@jit
def _one_backward(
    grad: tl.tensor,
    source: tl.tensor,
    target: tl.tensor,
    weight_H: tl.tensor,
    sum_left: tl.tensor,
    sum_right: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    column: tl.tensor,
    exists: tl.tensor,
    eps: float,
    H: tl.constexpr,
    NORMS: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """The gradient of a query or a key into that of `qkv`; returns the sums for the weight's gradient, C × h each."""
    left, right = _load(grad, exists, H)
    left, right = _turned(left, right, cos, -sin)
    if NORMS:
        x_left, x_right = _load(source, exists, H)
        inverse = _inverse_rms(x_left, x_right, eps, H)
        x_left, x_right = x_left * inverse, x_right * inverse
        sum_left, sum_right = sum_left + left * x_left, sum_right + right * x_right
        weight_left, weight_right = _load(weight_H + column, column < H // 2, H)
        left, right = left * weight_left, right * weight_right
        along = tl.sum(left * x_left + right * x_right, 1)[:, None] / H
        left, right = (left - x_left * along) * inverse, (right - x_right * along) * inverse
    _store(target, left, right, exists, H)
    return sum_left, sum_right


@jit
def _backward(
    dq: tl.tensor,
    dk: tl.tensor,
    dv: tl.tensor,
    q_of_sequence: int,
    q_of_token: int,
    q_of_head: int,
    k_of_sequence: int,
    k_of_token: int,
    k_of_head: int,
    v_of_sequence: int,
    v_of_token: int,
    v_of_head: int,
    grad_TF: tl.tensor,
    partial_J2H: tl.tensor,
    cos_TH: tl.tensor,
    sin_TH: tl.tensor,
    qkv_TF: tl.tensor,
    query_H: tl.tensor,
    key_H: tl.tensor,
    eps: float,
    tokens: int,
    length: int,
    table_stride: int,
    G: tl.constexpr,
    P: tl.constexpr,
    H: tl.constexpr,
    NORMS: tl.constexpr,
    TAKEN: tl.constexpr,
    C: tl.constexpr,
    HALF: tl.constexpr,
) -> None:
    """Gradients come with any strides but that of a head's values."""
    first, token, sequence, place, column, exists = _place(tokens, length, G, H, TAKEN, C, HALF)
    cos = tl.load(cos_TH + sequence * table_stride + place * H + column, mask=exists, other=0.0)
    sin = tl.load(sin_TH + sequence * table_stride + place * H + column, mask=exists, other=0.0)
    dq += sequence * q_of_sequence + place * q_of_token + column
    dk += sequence * k_of_sequence + place * k_of_token + column
    dv += sequence * v_of_sequence + place * v_of_token + column
    none = tl.zeros((C, HALF), tl.float32)
    q_left, q_right, k_left, k_right = none, none, none, none
    for index in tl.static_range(TAKEN):
        group = first + index
        at = (token * G + group) * (P + 2) * H + column
        source, target = (qkv_TF + at if NORMS else at), grad_TF + at
        for head in range(P):
            grad = dq + (group * P + head) * q_of_head
            x, dx = source + head * H, target + head * H
            q_left, q_right = _one_backward(grad, x, dx, query_H, q_left, q_right, cos, sin, column, exists, eps, H, NORMS)
        grad, x, dx = dk + group * k_of_head, source + P * H, target + P * H
        k_left, k_right = _one_backward(grad, x, dx, key_H, k_left, k_right, cos, sin, column, exists, eps, H, NORMS)
        left, right = _load(dv + group * v_of_head, exists, H)
        _store(target + (P + 1) * H, left, right, exists, H)
    if NORMS:
        sums = partial_J2H + tl.program_id(0).to(tl.int64) * 2 * H + column
        _store(sums, tl.sum(q_left, 0)[None, :], tl.sum(q_right, 0)[None, :], column < H // 2, H)
        _store(sums + H, tl.sum(k_left, 0)[None, :], tl.sum(k_right, 0)[None, :], column < H // 2, H)
