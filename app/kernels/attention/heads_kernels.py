"""Triton kernels of `heads`: a program takes some tokens and groups of heads.

Shapes: as in `app.kernels.attention.heads`.
"""

from __future__ import annotations

from app.kernels.common import jit, tl


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
    """Return this program's first key/value head; its tokens, their sequences and positions;
    columns; and the mask of the tile.
    """
    parts: tl.constexpr = G // TAKEN
    token = tl.program_id(0) // parts * C + tl.arange(0, C)[:, None]
    # offsets may exceed 32 bits
    sequence = (token // length).to(tl.int64)
    place = (token % length).to(tl.int64)
    column = tl.arange(0, HALF)[None, :]
    first = (tl.program_id(0) % parts).to(tl.int64) * TAKEN
    return first, token.to(tl.int64), sequence, place, column, (token < tokens) & (column < H // 2)


@jit
def _load(pointers: tl.tensor, exists: tl.tensor, H: tl.constexpr) -> tuple[tl.tensor, ...]:
    """Load both halves of a head in fp32; masked values are zero."""
    left = tl.load(pointers, mask=exists, other=0.0).to(tl.float32)
    return left, tl.load(pointers + H // 2, mask=exists, other=0.0).to(tl.float32)


@jit
def _store(
    pointers: tl.tensor, left: tl.tensor, right: tl.tensor, exists: tl.tensor, H: tl.constexpr
) -> None:
    tl.store(pointers, left, mask=exists)
    tl.store(pointers + H // 2, right, mask=exists)


@jit
def _rotated(
    left: tl.tensor, right: tl.tensor, cos: tl.tensor, sin: tl.tensor
) -> tuple[tl.tensor, ...]:
    return left * cos - right * sin, right * cos + left * sin


@jit
def _inverse_rms(left: tl.tensor, right: tl.tensor, eps: float, H: tl.constexpr) -> tl.tensor:
    """Return 1 / rms per token: C × 1."""
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
    """Normalise and rotate a query or a key."""
    left, right = _load(source, exists, H)
    if NORMS:
        inverse = _inverse_rms(left, right, eps, H=H)
        weight_left, weight_right = _load(weight_H + column, column < H // 2, H)
        left = left * inverse * weight_left
        right = right * inverse * weight_right
    left, right = _rotated(left, right, cos, sin=sin)
    _store(target, left, right, exists=exists, H=H)


@jit
def heads_forward(
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
    """Normalise and rotate the queries, keys and values of some tokens and groups of heads."""
    first, token, sequence, place, column, exists = _place(
        tokens, length, G, H=H, TAKEN=TAKEN, C=C, HALF=HALF
    )
    cos = tl.load(cos_TH + sequence * table_stride + place * H + column, mask=exists, other=0.0)
    sin = tl.load(sin_TH + sequence * table_stride + place * H + column, mask=exists, other=0.0)
    for index in tl.static_range(TAKEN):
        group = first + index
        source = qkv_TF + (token * G + group) * (P + 2) * H + column
        key = (token * G + group) * H + column
        for head in range(P):
            query = ((token * G + group) * P + head) * H + column
            _one_forward(
                source + head * H,
                q_TNH + query,
                query_H,
                cos=cos,
                sin=sin,
                column=column,
                exists=exists,
                eps=eps,
                H=H,
                NORMS=NORMS,
            )
        _one_forward(
            source + P * H,
            k_TGH + key,
            key_H,
            cos=cos,
            sin=sin,
            column=column,
            exists=exists,
            eps=eps,
            H=H,
            NORMS=NORMS,
        )
        left, right = _load(source + (P + 1) * H, exists, H)
        _store(v_TGH + key, left, right, exists=exists, H=H)


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
    """Write the gradient of a query or key to that of `qkv`; return the weight gradient's partial
    sums: C × h.
    """
    left, right = _load(grad, exists, H)
    left, right = _rotated(left, right, cos, sin=-sin)
    if NORMS:
        x_left, x_right = _load(source, exists, H)
        inverse = _inverse_rms(x_left, x_right, eps, H=H)
        x_left = x_left * inverse
        x_right = x_right * inverse
        sum_left = sum_left + left * x_left
        sum_right = sum_right + right * x_right
        weight_left, weight_right = _load(weight_H + column, column < H // 2, H)
        left = left * weight_left
        right = right * weight_right
        along = tl.sum(left * x_left + right * x_right, 1)[:, None] / H
        left = (left - x_left * along) * inverse
        right = (right - x_right * along) * inverse
    _store(target, left, right, exists=exists, H=H)
    return sum_left, sum_right


@jit
def heads_backward(
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
    """Compute the gradient of `qkv`; output gradients may have any strides except in a head's
    values.
    """
    first, token, sequence, place, column, exists = _place(
        tokens, length, G, H=H, TAKEN=TAKEN, C=C, HALF=HALF
    )
    cos = tl.load(cos_TH + sequence * table_stride + place * H + column, mask=exists, other=0.0)
    sin = tl.load(sin_TH + sequence * table_stride + place * H + column, mask=exists, other=0.0)
    dq += sequence * q_of_sequence + place * q_of_token + column
    dk += sequence * k_of_sequence + place * k_of_token + column
    dv += sequence * v_of_sequence + place * v_of_token + column
    none = tl.zeros((C, HALF), tl.float32)
    q_left = none
    q_right = none
    k_left = none
    k_right = none
    for index in tl.static_range(TAKEN):
        group = first + index
        at = (token * G + group) * (P + 2) * H + column
        source = qkv_TF + at if NORMS else at
        target = grad_TF + at
        for head in range(P):
            grad = dq + (group * P + head) * q_of_head
            x = source + head * H
            dx = target + head * H
            q_left, q_right = _one_backward(
                grad,
                x,
                dx,
                weight_H=query_H,
                sum_left=q_left,
                sum_right=q_right,
                cos=cos,
                sin=sin,
                column=column,
                exists=exists,
                eps=eps,
                H=H,
                NORMS=NORMS,
            )
        grad = dk + group * k_of_head
        x = source + P * H
        dx = target + P * H
        k_left, k_right = _one_backward(
            grad,
            x,
            dx,
            weight_H=key_H,
            sum_left=k_left,
            sum_right=k_right,
            cos=cos,
            sin=sin,
            column=column,
            exists=exists,
            eps=eps,
            H=H,
            NORMS=NORMS,
        )
        left, right = _load(dv + group * v_of_head, exists, H)
        _store(target + (P + 1) * H, left, right, exists=exists, H=H)
    if NORMS:
        sums = partial_J2H + tl.program_id(0).to(tl.int64) * 2 * H + column
        _store(
            sums,
            tl.sum(q_left, 0)[None, :],
            tl.sum(q_right, 0)[None, :],
            exists=column < H // 2,
            H=H,
        )
        _store(
            sums + H,
            tl.sum(k_left, 0)[None, :],
            tl.sum(k_right, 0)[None, :],
            exists=column < H // 2,
            H=H,
        )
