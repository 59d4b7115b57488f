"""Softmax attention as a trace: heads, rotary positions, context-parallel exchanges, the kernels.

Follows `app.model.attention` and `app.model.context_parallel`. What the kernels save and need
depends on which one computes: `attends_by_matrices` says, and `_softmax_attention`, its `_Kernel`
and `_matrix_attention` hold all that follows. All sizes are bytes.

Shapes: as in `app.plan.trace.parts`, and S tokens of a whole sequence, P context-parallel ranks.
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
from app.plan.trace.parts import Sizes, column_parallel, norm, row_parallel, tp_sends
from app.plan.trace.trace import Sends, Trace, TracedTensor, Work

RANDOM_STATE = 16  # bytes: seed and offset


def attends_by_matrices(run: Run) -> bool:
    """Whether no fused attention takes the run, so that all S × S probabilities are stored.

    For fewer key/value heads than query heads there is none in fp32, and none under a document mask
    with fixed order.
    """
    grouped = run.model.num_kv_heads < run.model.num_heads
    ordered_mask = run.data.document_mask and run.train.deterministic
    return grouped and (run.precision.params is Dtype.float32 or ordered_mask)


@dataclass(frozen=True, slots=True)
class _Reach:
    """Queries that attend at once, and how far."""

    queries: int  # tokens of all sequences
    keys: int  # tokens of its sequence that the last query looks at
    heads: int  # N here
    kv_heads: int  # G here

    def flops(self, s: Sizes) -> int:
        """Of scores and weighted values: two products, each of a query with the keys before it,
        as wide as keys and values are without padding.

        A sequence's queries are the last ones of its keys, so that the first of n looks at all but
        n - 1 of these. Documents packed into one sequence are counted as one.
        """
        own = self.queries // s.run.train.micro_batch
        twice_seen = self.queries * (2 * self.keys - own)  # of pairs of query and key
        return twice_seen * self.heads * (s.model.head_width + s.model.value_width)


def attention(
    trace: Trace, s: Sizes, h: TracedTensor, weights: AttentionWeights | LatentAttentionWeights
) -> TracedTensor:
    """All of a layer's attention, of the kind that has these weights, from its normed input `h`."""
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
    """From projected queries, keys and values to what the output projection reads; `keep`:
    backward runs it from `qkv` again.
    """
    if s.model.qk_norm_whole:
        qkv = _all_normed(trace, s, qkv)
    per_head = qkv.bytes // (s.heads + 2 * s.kv_heads)
    sizes = [heads * per_head for heads in (s.heads, s.kv_heads, s.kv_heads)]
    each_head = [] if s.model.qk_norm_whole else [weights.q_norm, weights.k_norm]
    norms = [each for each in each_head if each is not None]
    scratch = 0, sum(_head_norm_sums(s, each) for each in norms)
    # cosines and sines are saved too, but once for all layers
    saves = [qkv] if norms or keep else []
    q, k, v = trace.op([qkv], sizes, saves, scratch=scratch, work=Work.heads)
    return _attend_all(trace, s, q, k=k, v=v)


def _all_normed(trace: Trace, s: Sizes, qkv: TracedTensor) -> TracedTensor:
    """Queries and keys normed over all heads: two numbers per token are kept, and summed over
    tensor-parallel ranks in either direction.
    """
    factors = 2 * 4 * s.tokens
    queries = qkv.bytes * s.heads // (s.heads + 2 * s.kv_heads)
    wide = queries // s.size * 4  # two such are there at a time
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
    """Multi-head latent attention: latents of a rank's own tokens, heads of all tokens."""
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
    """The rotary key of all tokens, which all heads share; backward sums its gradients."""
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
    """Queries, keys and padded values, and what attention makes of them; `keep`: backward runs it
    from its arguments again.
    """
    per_value = s.tokens * s.heads * s.size
    plain, turning = trace.split(
        q, per_value * mla.qk_nope_head_dim, per_value * mla.qk_rope_head_dim
    )
    turned = _turned(trace, s, turning, saves=[q, kv, shared] if keep else [])
    (queries,) = trace.op([plain, turned], [q.bytes], passes=True)
    plain, narrow = trace.split(kv, per_value * mla.qk_nope_head_dim, per_value * mla.v_head_dim)
    turned = _turned(trace, s, shared, saves=[])
    (keys,) = trace.op([plain, turned], [q.bytes], passes=True)
    (values,) = trace.op([narrow], [q.bytes], passes=True)
    out = _attend_all(trace, s, queries, k=keys, v=values)
    if narrow.bytes == out.bytes:
        return out  # nothing to cut off
    return trace.op([out], [narrow.bytes], holds=[turned])[0]


def _turned(trace: Trace, s: Sizes, x: TracedTensor, saves: Sequence[TracedTensor]) -> TracedTensor:
    """Rotary positions in plain torch: two orders of `x`, each times a table in fp32, their sum."""
    wide = x.bytes // s.size * 4
    scratch = x.bytes + 3 * wide, 2 * wide
    return trace.op([x], [x.bytes], saves, scratch=scratch, kernels=8)[0]


def _attend_all(
    trace: Trace, s: Sizes, q: TracedTensor, k: TracedTensor, v: TracedTensor
) -> TracedTensor:
    """Over all context-parallel ranks."""
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
    """fp32 sums of a weight's gradient, one per program of backward (`heads_backward`)."""
    (width,) = s.shape(weights.weight)
    tiling = head_tiling(s.kv_heads, s.heads // s.kv_heads, width)
    return 4 * width * tiling.grid(s.tokens, s.kv_heads)


def _attend_gathered_keys(
    trace: Trace, s: Sizes, q: TracedTensor, k: TracedTensor, v: TracedTensor
) -> TracedTensor:
    """Both pieces of the queries, each against the keys up to its own end: on the first rank, one
    piece and all 2P.

    On rank r these are r + 1 and 2P - r pieces, so that masks, probabilities and time are alike on
    all ranks.
    """
    ranks = s.layout.cp
    seq_len = s.run.train.seq_len
    (both,) = trace.op([k, v], [k.bytes + v.bytes])
    # arrives in the order of ranks, and is copied into that of the sequence
    whole = ranks * both.bytes
    ring = (ranks - 1) * both.bytes  # backward scatters the sum of the gradients
    (gathered,) = trace.op(
        [both],
        [whole],
        scratch=(whole, 2 * whole - both.bytes),
        kernels=2,
        sends=Sends(CP, Way.ring, forward=ring, backward=ring),
    )
    keys, values = trace.split(gathered, whole // 2, whole // 2)
    pieces = trace.split(q, q.bytes // 2, q.bytes // 2)
    ends = seq_len // (2 * ranks), seq_len
    reaches = [_Reach(s.tokens // 2, end, s.heads, kv_heads=s.kv_heads) for end in ends]
    outs = [
        _attend(trace, s, piece, k=keys, v=values, reach=reach)
        for piece, reach in zip(pieces, reaches, strict=True)
    ]
    return trace.op(outs, [q.bytes], holds=[k, v], passes=True)[0]


def _attend_by_heads(
    trace: Trace, s: Sizes, q: TracedTensor, k: TracedTensor, v: TracedTensor
) -> TracedTensor:
    """Whole sequences of 1/P of the heads: as many bytes. Each trade puts its tokens into order
    before it or behind it.
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
        sends=_traded(packed, ranks),
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
        sends=_traded(out, ranks),
    )[0]


def _traded(x: TracedTensor, ranks: int) -> Sends:
    """All of it but this rank's own part, and of its gradient."""
    leaves = x.bytes * (ranks - 1) // ranks
    return Sends(CP, Way.all_to_all, forward=leaves, backward=leaves)


def _attend(
    trace: Trace, s: Sizes, q: TracedTensor, k: TracedTensor, v: TracedTensor, reach: _Reach
) -> TracedTensor:
    attend = _matrix_attention if attends_by_matrices(s.run) else _softmax_attention
    return attend(trace, s, q, k=k, v=v, reach=reach)


@dataclass(frozen=True, slots=True)
class _Kernel:
    """What a fused kernel does in its own way."""

    work: Work
    sums: int  # bytes that backward adds up in, besides a number per row
    keeps: int  # bytes kept for backward, besides a number per row
    copied: tuple[int, int] = (0, 0)  # bytes that forward and backward copy


def _softmax_attention(
    trace: Trace, s: Sizes, q: TracedTensor, k: TracedTensor, v: TracedTensor, reach: _Reach
) -> TracedTensor:
    """A fused kernel: saves arguments, result, a number per row."""
    row = 4 * reach.queries * reach.heads
    # keys and values of a head; their gradients are made per query head
    seen = 2 * s.run.train.micro_batch * reach.keys * s.model.head_width * s.size
    gradients = seen * reach.heads - k.bytes - v.bytes
    # gradients of the keys seen, before they are put among those of the other keys
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
    """The one that torch takes: sums the queries' gradient in fp32."""
    batch, in_order = s.run.train.micro_batch, s.run.train.deterministic
    # the mask as numbers to add to scores, which every layer makes anew
    mask = reach.queries * reach.keys * s.size if s.run.data.document_mask else 0
    # of the queries' gradient, where torch's kernel sums in a fixed order
    parts = -(-MULTIPROCESSORS // (batch * reach.heads)) if in_order else 1
    if in_order:
        work = Work.ordered_attention
    elif reach.queries < batch * reach.keys:
        work = Work.gathered_attention  # the fastest kernel takes no queries behind the first key
    else:
        work = Work.attention
    return _Kernel(work, parts * _fp32_gradient(s, reach), mask)


def _library_kernel(s: Sizes, q: TracedTensor, seen: int, reach: _Reach) -> _Kernel:
    """cuDNN's by Transformer Engine: with a fixed order backward has a matrix of all scores in
    place of a sum in fp32. Keeps a state of random numbers; `seen`: bytes of keys and values.
    """
    copied = _copied(s, q, seen)
    if s.run.train.deterministic:
        matrix = reach.queries * reach.heads * reach.keys * s.size
        return _Kernel(Work.cudnn_ordered_attention, matrix, RANDOM_STATE, copied)
    return _Kernel(Work.attention, _fp32_gradient(s, reach), RANDOM_STATE, copied)


def _fp32_gradient(s: Sizes, reach: _Reach) -> int:
    """Bytes of the queries' gradient in fp32."""
    return 4 * reach.queries * reach.heads * s.model.head_width


def _copied(s: Sizes, q: TracedTensor, seen: int) -> tuple[int, int]:
    """Bytes that forward and backward copy, as the library takes no strides: parts of what
    context-parallel ranks have gathered or traded; `seen`: of keys and values.
    """
    if s.layout.cp == 1:
        return 0, 0
    if s.run.parallel.cp_comm_type is CpComm.all_to_all:
        return q.bytes + seen, q.bytes + seen
    if s.run.train.micro_batch == 1:  # both pieces of the queries lie as one
        return seen, seen
    return q.bytes + seen, 2 * q.bytes + seen


def _matrix_attention(
    trace: Trace, s: Sizes, q: TracedTensor, k: TracedTensor, v: TracedTensor, reach: _Reach
) -> TracedTensor:
    """Products and a softmax in fp32: saves q, k, v per query head and all probabilities."""
    wide = q.bytes // s.size * 4
    scores = 4 * reach.queries * reach.heads * reach.keys
    keys = 4 * s.run.train.micro_batch * reach.keys * reach.heads * s.model.head_width
    saved = wide + 2 * keys
    # When the gradient of scores stands beside that of probabilities, what came in is gone, values
    # have left their place to their gradient, and queries and keys have none yet.
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
