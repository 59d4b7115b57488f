"""Trace of attention: heads, rotary positions, context-parallel communication, kernels.

Follows `app.model.attention` and `app.model.layers.context_parallel`. The memory of a kernel
depends on which one runs: `attends_by_matrices` decides, and `_softmax_attention`, its `_Kernel`
and `_matrix_attention` hold everything that follows from it. All sizes are bytes.

Shapes: as in `app.plan.parts.parts`, and S tokens of a whole sequence, P context-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from app.choices import AttentionBackendKind, CpComm, Dtype, Recompute
from app.config import MLAConfig, Run
from app.kernels.tiling import MULTIPROCESSORS, head_tiling
from app.plan.groups import CP, Way
from app.plan.model.attention import AttentionWeights, LatentAttentionWeights
from app.plan.model.norm import NormWeights
from app.plan.parts.parts import Sizes, column_parallel, norm, row_parallel, tp_sends
from app.plan.parts.trace import Sends, Trace, TracedTensor, Work

RANDOM_STATE = 16  # bytes: seed and offset


def attends_by_matrices(run: Run) -> bool:
    """Return whether no fused attention supports the run: all S × S probabilities are stored.

    With fewer key/value heads than query heads there is none in fp32, and no deterministic one
    under a document mask.
    """
    grouped = run.model.num_kv_heads < run.model.num_heads
    ordered_mask = run.data.document_mask and run.train.deterministic
    return grouped and (run.precision.params is Dtype.float32 or ordered_mask)


@dataclass(frozen=True, slots=True)
class _Reach:
    """Queries that attend together, and the keys that they see."""

    queries: int  # tokens of all sequences
    keys: int  # keys of its sequence up to the last query
    heads: int  # N on this rank
    kv_heads: int  # G on this rank

    def flops(self, s: Sizes) -> int:
        """Return FLOPs of the two GEMMs, each query with its preceding keys, without padding.

        A sequence's queries are the last ones of its keys, so the first of n sees all but n − 1 of
        them. Documents packed into one sequence count as one.
        """
        own = self.queries // s.run.train.micro_batch
        twice_seen = self.queries * (2 * self.keys - own)  # twice the pairs of query and key
        return twice_seen * self.heads * (s.model.head_width + s.model.value_width)


def attention(
    trace: Trace, s: Sizes, h: TracedTensor, weights: AttentionWeights | LatentAttentionWeights
) -> TracedTensor:
    """Trace a layer's attention from its normed input `h`, of the kind that has these weights."""
    if isinstance(weights, LatentAttentionWeights):
        return _latent_attention(trace, s, h, weights=weights)
    return _grouped_attention(trace, s, h, weights=weights)


def _grouped_attention(
    trace: Trace, s: Sizes, h: TracedTensor, weights: AttentionWeights
) -> TracedTensor:
    qkv = column_parallel(trace, s, h, weight=weights.wqkv)
    if weights.bqkv is not None:
        (width,) = s.shape(weights.bqkv)
        # in place; backward sums the gradient over tokens
        (qkv,) = trace.op([qkv], [qkv], passes=True, scratch=(0, width * s.size))
    with trace.recomputed(Recompute.attn_core) as recomputed:
        out = _core(trace, s, qkv, weights=weights, keep=recomputed)
    return row_parallel(trace, s, out, weight=weights.wo, holds=[h, qkv])


def _core(
    trace: Trace, s: Sizes, qkv: TracedTensor, weights: AttentionWeights, keep: bool
) -> TracedTensor:
    """Trace attention from projected queries, keys and values up to the output projection.

    keep: backward reruns it from `qkv`.
    """
    if s.model.qk_norm_whole:
        qkv = _all_normed(trace, s, qkv)
    per_head = qkv.bytes // (s.heads + 2 * s.kv_heads)
    sizes = [heads * per_head for heads in (s.heads, s.kv_heads, s.kv_heads)]
    each_head = [] if s.model.qk_norm_whole else [weights.q_norm, weights.k_norm]
    norms = [each for each in each_head if each is not None]
    scratch = 0, sum(_head_norm_sums(s, each) for each in norms)
    # cosines and sines are saved once for all layers, and not counted here
    saves = [qkv] if norms or keep else []
    q, k, v = trace.op([qkv], sizes, saves, scratch=scratch, work=Work.heads)
    return _attend_all(trace, s, q, k=k, v=v)


def _all_normed(trace: Trace, s: Sizes, qkv: TracedTensor) -> TracedTensor:
    """Trace RMSNorm of queries and keys over all heads.

    Two numbers per token are saved, and all-reduced over tensor-parallel ranks in forward and
    backward.
    """
    factors = 2 * 4 * s.tokens
    queries = qkv.bytes * s.heads // (s.heads + 2 * s.kv_heads)
    wide = queries // s.size * 4  # two fp32 copies are alive at a time
    sends = tp_sends(s, factors // s.layout.tp, forward=2, backward=2)
    return trace.op(
        [qkv],
        [qkv.bytes],
        [qkv],
        keeps=factors,
        scratch=(wide, 2 * wide),
        kernels=14,
        sends=sends if s.layout.tp > 1 else None,
    )[0]


def _latent_attention(
    trace: Trace, s: Sizes, h: TracedTensor, weights: LatentAttentionWeights
) -> TracedTensor:
    """Trace multi-head latent attention: latents of a rank's own tokens, heads of all tokens."""
    mla = s.model.mla
    assert mla is not None
    latent = h
    if weights.q_a is not None and weights.q_a_norm is not None:
        latent = column_parallel(trace, s, h, weight=weights.q_a)
        latent = norm(trace, s, latent, weights=weights.q_a_norm)
    q = column_parallel(trace, s, latent, weight=weights.q_b)
    made = column_parallel(trace, s, h, weight=weights.kv_a)
    per_value = s.local * s.size
    narrow, key = trace.split(made, per_value * mla.kv_lora_rank, per_value * mla.qk_rope_head_dim)
    (own_latent,) = trace.op([narrow], [narrow.bytes])  # the norm's kernel takes no strides
    kv_latent = norm(trace, s, own_latent, weights=weights.kv_a_norm)
    kv = column_parallel(trace, s, kv_latent, weight=weights.kv_b)
    shared = _gathered_key(trace, s, key)
    with trace.recomputed(Recompute.attn_core) as recomputed:
        out = _latent_core(trace, s, mla, q=q, kv=kv, shared=shared, keep=recomputed)
    return row_parallel(trace, s, out, weight=weights.wo, holds=[h, latent, q, made, kv, shared])


def _gathered_key(trace: Trace, s: Sizes, key: TracedTensor) -> TracedTensor:
    """Trace the all-gather of the rotary key, which all heads share; backward reduce-scatters."""
    if s.layout.tp == 1:
        return key
    whole = s.layout.tp * key.bytes
    scratch = key.bytes + (s.copies - 1) * whole, key.bytes + s.copies * whole
    sends = tp_sends(s, key.bytes, forward=1, backward=1)
    return trace.op([key], [whole], scratch=scratch, kernels=1 + s.copies, sends=sends)[0]


def _latent_core(
    trace: Trace,
    s: Sizes,
    mla: MLAConfig,
    q: TracedTensor,
    kv: TracedTensor,
    shared: TracedTensor,
    keep: bool,
) -> TracedTensor:
    """Trace queries, keys and padded values, and attention over them.

    keep: backward reruns it from its arguments.
    """
    per_value = s.tokens * s.heads * s.size
    plain, rotary = trace.split(
        q, per_value * mla.qk_nope_head_dim, per_value * mla.qk_rope_head_dim
    )
    rotated = _rotated(trace, s, rotary, saves=[q, kv, shared] if keep else [])
    (queries,) = trace.op([plain, rotated], [q.bytes], passes=True)
    plain, narrow = trace.split(kv, per_value * mla.qk_nope_head_dim, per_value * mla.v_head_dim)
    rotated = _rotated(trace, s, shared, saves=[])
    (keys,) = trace.op([plain, rotated], [q.bytes], passes=True)
    (values,) = trace.op([narrow], [q.bytes], passes=True)
    out = _attend_all(trace, s, queries, k=keys, v=values)
    if narrow.bytes == out.bytes:
        return out  # no padding to cut off
    return trace.op([out], [narrow.bytes], holds=[rotated])[0]


def _rotated(
    trace: Trace, s: Sizes, x: TracedTensor, saves: Sequence[TracedTensor]
) -> TracedTensor:
    """Trace rotary embedding in plain torch: two permutations of `x` times fp32 tables, added."""
    wide = x.bytes // s.size * 4
    scratch = x.bytes + 3 * wide, 2 * wide
    return trace.op([x], [x.bytes], saves, scratch=scratch, kernels=8)[0]


def _attend_all(
    trace: Trace, s: Sizes, q: TracedTensor, k: TracedTensor, v: TracedTensor
) -> TracedTensor:
    """Trace attention over all context-parallel ranks."""
    if s.layout.cp == 1:
        return _attend(
            trace,
            s,
            q,
            k=k,
            v=v,
            reach=_Reach(s.tokens, s.run.train.seq_len, s.heads, kv_heads=s.kv_heads),
        )
    gathers = s.run.parallel.cp_comm_type is CpComm.all_gather
    by = _attend_gathered_keys if gathers else _attend_by_heads
    return by(trace, s, q, k=k, v=v)


def _head_norm_sums(s: Sizes, weights: NormWeights) -> int:
    """Return bytes of a head norm's fp32 partial gradients, one per program of `heads_backward`."""
    (width,) = s.shape(weights.weight)
    tiling = head_tiling(s.kv_heads, s.heads // s.kv_heads, width)
    return 4 * width * tiling.grid(s.tokens, s.kv_heads)


def _attend_gathered_keys(
    trace: Trace, s: Sizes, q: TracedTensor, k: TracedTensor, v: TracedTensor
) -> TracedTensor:
    """Trace attention with all-gathered keys and values, one call per chunk of queries.

    Rank r has chunks r and 2P − 1 − r of the 2P that a sequence is divided into; each attends to
    the keys up to its own end, that is to r + 1 and 2P − r chunks. So masks, probabilities and time
    are equal on all ranks. The trace is the first rank's.
    """
    ranks = s.layout.cp
    seq_len = s.run.train.seq_len
    (both,) = trace.op([k, v], [k.bytes + v.bytes])
    # arrives in the order of ranks, and is copied into that of the sequence
    whole = ranks * both.bytes
    ring = (ranks - 1) * both.bytes  # backward reduce-scatters the gradients
    (gathered,) = trace.op(
        [both],
        [whole],
        scratch=(whole, 2 * whole - both.bytes),
        kernels=2,
        sends=Sends(CP, Way.ring, forward=ring, backward=ring),
    )
    keys, values = trace.split(gathered, whole // 2, whole // 2)
    chunks = trace.split(q, q.bytes // 2, q.bytes // 2)
    ends = seq_len // (2 * ranks), seq_len
    reaches = [_Reach(s.tokens // 2, end, s.heads, kv_heads=s.kv_heads) for end in ends]
    outs = [
        _attend(trace, s, chunk, k=keys, v=values, reach=reach)
        for chunk, reach in zip(chunks, reaches, strict=True)
    ]
    return trace.op(outs, [q.bytes], holds=[k, v], passes=True)[0]


def _attend_by_heads(
    trace: Trace, s: Sizes, q: TracedTensor, k: TracedTensor, v: TracedTensor
) -> TracedTensor:
    """Trace attention over whole sequences of 1/P of the heads, between two all-to-alls.

    The bytes stay the same. Each all-to-all also reorders the tokens.
    """
    ranks = s.layout.cp
    seq_len = s.run.train.seq_len
    own = q, k, v
    (packed,) = trace.op([q, k, v], [q.bytes + k.bytes + v.bytes])
    (whole,) = trace.op(
        [packed],
        [packed.bytes],
        scratch=(packed.bytes, 0),
        kernels=3,
        sends=_all_to_all(packed, ranks),
    )
    q, k, v = trace.split(whole, q.bytes, k.bytes, v.bytes)
    reach = _Reach(ranks * s.tokens, seq_len, s.heads // ranks, kv_heads=s.kv_heads // ranks)
    out = _attend(trace, s, q, k=k, v=v, reach=reach)
    return trace.op(
        [out],
        [out.bytes],
        holds=own,
        scratch=(out.bytes, out.bytes),
        kernels=2 + ranks,
        sends=_all_to_all(out, ranks),
    )[0]


def _all_to_all(x: TracedTensor, ranks: int) -> Sends:
    """Return sends of an all-to-all: all but this rank's own part, in both directions."""
    leaves = x.bytes * (ranks - 1) // ranks
    return Sends(CP, Way.all_to_all, forward=leaves, backward=leaves)


def _attend(
    trace: Trace, s: Sizes, q: TracedTensor, k: TracedTensor, v: TracedTensor, reach: _Reach
) -> TracedTensor:
    attend = _matrix_attention if attends_by_matrices(s.run) else _softmax_attention
    return attend(trace, s, q, k=k, v=v, reach=reach)


@dataclass(frozen=True, slots=True)
class _Kernel:
    """Memory of a fused kernel beyond arguments, result and a number per row."""

    work: Work
    sums: int  # bytes of backward's accumulators
    keeps: int  # bytes saved for backward
    copied: tuple[int, int] = (0, 0)  # bytes that forward and backward copy


def _softmax_attention(
    trace: Trace, s: Sizes, q: TracedTensor, k: TracedTensor, v: TracedTensor, reach: _Reach
) -> TracedTensor:
    """Trace a fused kernel: it saves arguments, result and a number per row."""
    row = 4 * reach.queries * reach.heads
    # bytes of keys and values per head; their gradients are computed per query head
    seen = 2 * s.run.train.micro_batch * reach.keys * s.model.head_width * s.size
    gradients = seen * reach.heads - k.bytes - v.bytes
    # gradients of the visible keys, before they are added to those of all keys
    cut = seen * reach.kv_heads // 2 if reach.queries < s.tokens else 0
    if s.run.train.attention_backend is AttentionBackendKind.transformer_engine:
        kernel = _library_kernel(s, q, seen * reach.kv_heads, reach=reach)
    else:
        kernel = _torch_kernel(s, reach)
    forward, backward = kernel.copied
    return trace.op(
        [q, k, v],
        [q.bytes],
        [q, k, v, 0],
        keeps=row + kernel.keeps,
        scratch=(forward, max(backward + row + kernel.sums + gradients, cut)),
        flops=reach.flops(s),
        work=kernel.work,
    )[0]


def _torch_kernel(s: Sizes, reach: _Reach) -> _Kernel:
    """Return torch's kernel, which accumulates the queries' gradient in fp32."""
    batch, in_order = s.run.train.micro_batch, s.run.train.deterministic
    # torch adds the mask as numbers to the scores; every layer converts it anew
    mask = reach.queries * reach.keys * s.size if s.run.data.document_mask else 0
    # partial gradients of the queries, in torch's deterministic kernel
    parts = -(-MULTIPROCESSORS // (batch * reach.heads)) if in_order else 1
    if in_order:
        work = Work.ordered_attention
    elif reach.queries < batch * reach.keys:
        work = Work.gathered_attention  # the fastest kernel needs as many queries as keys
    else:
        work = Work.attention
    return _Kernel(work, parts * _fp32_gradient(s, reach), mask)


def _library_kernel(s: Sizes, q: TracedTensor, seen: int, reach: _Reach) -> _Kernel:
    """Return cuDNN's kernel, by Transformer Engine.

    Its deterministic backward stores a matrix of all scores instead of an fp32 accumulator. It
    saves a random-number state. `seen`: bytes of keys and values.
    """
    copied = _copied(s, q, seen)
    if s.run.train.deterministic:
        matrix = reach.queries * reach.heads * reach.keys * s.size
        return _Kernel(Work.cudnn_ordered_attention, matrix, RANDOM_STATE, copied)
    return _Kernel(Work.attention, _fp32_gradient(s, reach), RANDOM_STATE, copied)


def _fp32_gradient(s: Sizes, reach: _Reach) -> int:
    """Return bytes of the queries' gradient in fp32."""
    return 4 * reach.queries * reach.heads * s.model.head_width


def _copied(s: Sizes, q: TracedTensor, seen: int) -> tuple[int, int]:
    """Return bytes that forward and backward copy, as the library takes no strides.

    These are parts of what context-parallel ranks have gathered or exchanged. `seen`: bytes of keys
    and values.
    """
    if s.layout.cp == 1:
        return 0, 0
    if s.run.parallel.cp_comm_type is CpComm.all_to_all:
        return q.bytes + seen, q.bytes + seen
    if s.run.train.micro_batch == 1:  # both chunks of the queries are contiguous
        return seen, seen
    return q.bytes + seen, 2 * q.bytes + seen


def _matrix_attention(
    trace: Trace, s: Sizes, q: TracedTensor, k: TracedTensor, v: TracedTensor, reach: _Reach
) -> TracedTensor:
    """Trace attention by GEMMs and an fp32 softmax, which saves all probabilities.

    It also saves q, k and v per query head.
    """
    wide = q.bytes // s.size * 4
    scores = 4 * reach.queries * reach.heads * reach.keys
    keys = 4 * s.run.train.micro_batch * reach.keys * reach.heads * s.model.head_width
    saved = wide + 2 * keys
    # At the peak of backward the gradients of scores and of probabilities coexist: the incoming
    # gradient is freed, values have given way to their gradient, queries and keys have none yet.
    working = max(0, 2 * scores - wide - q.bytes - k.bytes - v.bytes)
    (out,) = trace.op(
        [q, k, v],
        [wide],
        keeps=saved + scores,
        scratch=(scores + saved, working),
        kernels=12,
        flops=reach.flops(s),
        work=Work.ordered_attention,
    )
    return trace.op([out], [q.bytes])[0]
