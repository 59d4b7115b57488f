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
    pairs of a head's values; and the mask of the tile.
    """
    parts: tl.constexpr = G // TAKEN
    token = tl.program_id(0) // parts * C + tl.arange(0, C)[:, None]
    # offsets may exceed 32 bits
    sequence = (token // length).to(tl.int64)
    place = (token % length).to(tl.int64)
    pair = tl.arange(0, HALF)[None, :]
    first = (tl.program_id(0) % parts).to(tl.int64) * TAKEN
    return first, token.to(tl.int64), sequence, place, pair, (token < tokens) & (pair < H // 2)


@jit
def _pairs(pair: tl.tensor, H: tl.constexpr, R: tl.constexpr) -> tuple[tl.tensor, ...]:
    """Return the column of each pair's left value, and how far behind it its right value is."""
    if R == H:
        column = pair
        apart = H // 2
    else:
        rotated = pair < R // 2
        column = tl.where(rotated, pair, pair + R // 2)
        apart = tl.where(rotated, R // 2, (H - R) // 2)
    return column, apart


@jit
def _table(
    cos_TR: tl.tensor,
    sin_TR: tl.tensor,
    start: tl.tensor,
    pair: tl.tensor,
    exists: tl.tensor,
    H: tl.constexpr,
    R: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Load cosines and sines from `start` on; those of pairs that are not rotated are 1 and 0."""
    if R < H:
        exists = exists & (pair < R // 2)
    cos = tl.load(cos_TR + start + pair, mask=exists, other=1.0)
    return cos, tl.load(sin_TR + start + pair, mask=exists, other=0.0)


@jit
def _load(pointers: tl.tensor, apart: tl.tensor, exists: tl.tensor) -> tuple[tl.tensor, ...]:
    """Load both values of a head's pairs in fp32; masked values are zero."""
    left = tl.load(pointers, mask=exists, other=0.0).to(tl.float32)
    return left, tl.load(pointers + apart, mask=exists, other=0.0).to(tl.float32)


@jit
def _store(
    pointers: tl.tensor, apart: tl.tensor, left: tl.tensor, right: tl.tensor, exists: tl.tensor
) -> None:
    tl.store(pointers, left, mask=exists)
    tl.store(pointers + apart, right, mask=exists)


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
    apart: tl.tensor,
    used: tl.tensor,
    exists: tl.tensor,
    eps: float,
    H: tl.constexpr,
    NORMS: tl.constexpr,
) -> None:
    """Normalise and rotate a query or a key."""
    left, right = _load(source, apart, exists)
    if NORMS:
        inverse = _inverse_rms(left, right, eps, H=H)
        weight_left, weight_right = _load(weight_H + column, apart, used)
        left = left * inverse * weight_left
        right = right * inverse * weight_right
    left, right = _rotated(left, right, cos, sin=sin)
    _store(target, apart, left, right=right, exists=exists)


@jit
def heads_forward(
    qkv_TF: tl.tensor,
    q_TNH: tl.tensor,
    k_TGH: tl.tensor,
    v_TGH: tl.tensor,
    cos_TR: tl.tensor,
    sin_TR: tl.tensor,
    query_H: tl.tensor,
    key_H: tl.tensor,
    eps: float,
    tokens: int,
    length: int,
    table_stride: int,
    G: tl.constexpr,
    P: tl.constexpr,
    H: tl.constexpr,
    R: tl.constexpr,
    NORMS: tl.constexpr,
    TAKEN: tl.constexpr,
    C: tl.constexpr,
    HALF: tl.constexpr,
) -> None:
    """Normalise and rotate the queries, keys and values of some tokens and groups of heads."""
    first, token, sequence, place, pair, exists = _place(
        tokens, length, G, H=H, TAKEN=TAKEN, C=C, HALF=HALF
    )
    column, apart = _pairs(pair, H, R)
    start = sequence * table_stride + place * R
    used = pair < H // 2
    cos, sin = _table(cos_TR, sin_TR, start, pair=pair, exists=exists, H=H, R=R)
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
                apart=apart,
                used=used,
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
            apart=apart,
            used=used,
            exists=exists,
            eps=eps,
            H=H,
            NORMS=NORMS,
        )
        left, right = _load(source + (P + 1) * H, apart, exists)
        _store(v_TGH + key, apart, left, right=right, exists=exists)


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
    apart: tl.tensor,
    used: tl.tensor,
    exists: tl.tensor,
    eps: float,
    H: tl.constexpr,
    NORMS: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Write the gradient of a query or key to that of `qkv`; return the weight gradient's partial
    sums: C × h.
    """
    left, right = _load(grad, apart, exists)
    left, right = _rotated(left, right, cos, sin=-sin)
    if NORMS:
        x_left, x_right = _load(source, apart, exists)
        inverse = _inverse_rms(x_left, x_right, eps, H=H)
        x_left = x_left * inverse
        x_right = x_right * inverse
        sum_left = sum_left + left * x_left
        sum_right = sum_right + right * x_right
        weight_left, weight_right = _load(weight_H + column, apart, used)
        left = left * weight_left
        right = right * weight_right
        along = tl.sum(left * x_left + right * x_right, 1)[:, None] / H
        left = (left - x_left * along) * inverse
        right = (right - x_right * along) * inverse
    _store(target, apart, left, right=right, exists=exists)
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
    cos_TR: tl.tensor,
    sin_TR: tl.tensor,
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
    R: tl.constexpr,
    NORMS: tl.constexpr,
    TAKEN: tl.constexpr,
    C: tl.constexpr,
    HALF: tl.constexpr,
) -> None:
    """Compute the gradient of `qkv`; output gradients may have any strides except in a head's
    values.
    """
    first, token, sequence, place, pair, exists = _place(
        tokens, length, G, H=H, TAKEN=TAKEN, C=C, HALF=HALF
    )
    column, apart = _pairs(pair, H, R)
    start = sequence * table_stride + place * R
    used = pair < H // 2
    cos, sin = _table(cos_TR, sin_TR, start, pair=pair, exists=exists, H=H, R=R)
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
                apart=apart,
                used=used,
                exists=exists,
                eps=eps,
                H=H,
                NORMS=NORMS,
            )
        k_left, k_right = _one_backward(
            dk + group * k_of_head,
            source + P * H,
            target + P * H,
            weight_H=key_H,
            sum_left=k_left,
            sum_right=k_right,
            cos=cos,
            sin=sin,
            column=column,
            apart=apart,
            used=used,
            exists=exists,
            eps=eps,
            H=H,
            NORMS=NORMS,
        )
        left, right = _load(dv + group * v_of_head, apart, exists)
        _store(target + (P + 1) * H, apart, left, right=right, exists=exists)
    if NORMS:
        sums = partial_J2H + tl.program_id(0).to(tl.int64) * 2 * H + column
        _store(
            sums,
            apart,
            tl.sum(q_left, 0)[None, :],
            right=tl.sum(q_right, 0)[None, :],
            exists=used,
        )
        _store(
            sums + H,
            apart,
            tl.sum(k_left, 0)[None, :],
            right=tl.sum(k_right, 0)[None, :],
            exists=used,
        )
