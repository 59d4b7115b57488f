"""Attention: projections, heads, rotary positions, context-parallel communication, kernels.

The operations of `app.model.attention` and `app.model.layers.layer_groups`. All sizes are
bytes.

Shapes: T tokens of a microbatch on a context-parallel rank, D hidden, N query and G key/value
heads of width H on this rank, S tokens of a whole sequence, P context-parallel ranks.
"""

from __future__ import annotations

from app.choices import AttentionBackendKind, CpComm, Dtype, Recompute
from app.config import AttentionSpec, Run
from app.plan.groups import CP, Way
from app.plan.model.attention import (
    AnyAttentionWeights,
    AttentionWeights,
    LatentAttentionWeights,
    LinearAttentionWeights,
)
from app.plan.parts.linear import bias, column_parallel, norm, row_parallel
from app.plan.parts.linear_attention import linear_attention
from app.plan.parts.trace import Sends, Sizes, Trace, Work

BLOCK_SCORES = 2**27  # scores of a block of queries, of all heads, where scores are capped
MOST_QUERIES = 512  # of a block: of longer ones half of the scores would be masked
# passes of torch's kernels (bench/LOG.md): norms over all heads and rotary positions in fp32, and
# copies that join parts of heads
WHOLE_NORM_MOVES, ROTARY_MOVES, JOINED_MOVES = (16.0, 16.0), (8.0, 8.0), (6.0, 6.0)


def attends_by_matrices(run: Run) -> bool:
    """Return whether no fused attention supports the run: all S × S probabilities are stored.

    With fewer key/value heads than query heads there is none in fp32.
    """
    grouped = run.model.num_kv_heads < run.model.num_heads
    return grouped and run.precision.params is Dtype.float32


def _stores_scores(s: Sizes, spec: AttentionSpec) -> bool:
    """Return whether a layer saves all probabilities for backward; with sinks none does."""
    return attends_by_matrices(s.run) and not spec.sinks


def attention(
    t: Trace,
    h: int,
    spec: AttentionSpec,
    weights: AnyAttentionWeights,
    *,
    saved: bool,
) -> int:
    """Attention of a layer from its input, of the kind that has these weights.

    saved: the input stays for weight gradients; a norm does not recompute it.
    """
    if isinstance(weights, LinearAttentionWeights):
        return linear_attention(t, h, spec, weights, saved=saved)
    if isinstance(weights, LatentAttentionWeights):
        return latent_attention(t, h, spec, weights, saved=saved)
    return grouped_attention(t, h, spec, weights, saved=saved)


def grouped_attention(
    t: Trace, h: int, spec: AttentionSpec, weights: AttentionWeights, *, saved: bool
) -> int:
    """Queries, keys and values in one projection, optional norms, rotary positions, attention."""
    s = t.sizes
    made = column_parallel(t, h, weights.wqkv, saved=saved)
    gate = made * s.heads // (2 * s.heads + 2 * s.kv_heads) if spec.gate else 0
    qkv = made - gate
    q = qkv * s.heads // (s.heads + 2 * s.kv_heads)
    k = (qkv - q) // 2
    with t.rerun(t.reruns(Recompute.attn_core), keeps=made):
        if gate:
            t.op(Work.other, made, made, kernels=2)  # each side by side
        if spec.qk_norm_whole:
            # in plain torch: two fp32 copies, sums of squares all-reduced over tp
            wide = q // s.size * 4
            sends = s.tp_sends(2 * 4 * s.local, forward=2, backward=2)
            t.op(Work.other, qkv, qkv, qkv, scratch=(wide, 2 * wide), kernels=14, sends=sends,
                 moves=WHOLE_NORM_MOVES)  # fmt: skip
        normed = weights.q_norm is not None and not spec.qk_norm_whole
        t.op(Work.heads, qkv, qkv, qkv if normed else 0)
        # a gate's backward reads the heads' outputs, which no projection does then
        out = attend_all(t, spec, q, k, k, saved=bool(gate) or not weights.wo.keeps_input)
        if gate:
            # the kernel keeps its output too, unless it stores scores or tokens come from others
            kept = s.layout.cp == 1 and not _stores_scores(s, spec)
            t.op(Work.other, out + gate, out, gate + (0 if kept else out), kernels=2)
    return bias(t, row_parallel(t, out, weights.wo), weights.bo)


def latent_attention(
    t: Trace, h: int, spec: AttentionSpec, weights: LatentAttentionWeights, *, saved: bool
) -> int:
    """Multi-head latent attention: latents of a rank's own tokens, heads of all tokens."""
    s, mla = t.sizes, spec.mla
    assert mla is not None
    if weights.q_a is None:
        q = column_parallel(t, h, weights.q_b, saved=saved)
    else:
        latent = norm(t, column_parallel(t, h, weights.q_a, saved=saved))
        q = column_parallel(t, latent, weights.q_b)
    made = column_parallel(t, h, weights.kv_a, saved=saved and not weights.first.keeps_input)
    narrow = made * mla.kv_lora_rank // (mla.kv_lora_rank + mla.qk_rope_head_dim)
    t.op(Work.other, narrow, narrow)  # the norm's kernel takes no strides
    kv = column_parallel(t, norm(t, narrow), weights.kv_b)
    key = made - narrow  # rotary, which all heads share
    if s.layout.tp > 1:
        sends = s.tp_sends(key, forward=1, backward=1)
        key = t.op(Work.other, key, s.layout.tp * key, sends=sends)
    with t.rerun(t.reruns(Recompute.attn_core), keeps=q + kv + key):
        # rotary positions in plain torch; then queries, keys and padded values of one width
        for rotated in (q * mla.qk_rope_head_dim // mla.key_width, key):
            wide = rotated // s.size * 4
            t.op(Work.other, rotated, rotated, scratch=(rotated + 3 * wide, 2 * wide), kernels=8,
                 moves=ROTARY_MOVES)  # fmt: skip
        t.op(Work.other, q + kv + key, 3 * q, kernels=3, moves=JOINED_MOVES)
        out = attend_all(t, spec, q, q, q, saved=not weights.wo.keeps_input)
        values = q * mla.v_head_dim // mla.key_width
        if values < out:  # cuts off the padding
            t.op(Work.other, out, values, out)
    return row_parallel(t, values, weights.wo)


def attend_all(
    t: Trace, spec: AttentionSpec, q: int, k: int, v: int, *, saved: bool = False
) -> int:
    """Attention over all context-parallel ranks.

    saved: its result stays for its own backward, as no other operation saves it.

    With all-gathered keys and values, rank r attends from chunks r and 2P − 1 − r of the 2P that a
    sequence is divided into, each to the keys up to its own end; listed are the first rank's. With
    an all-to-all, it attends over whole sequences of 1/P of the heads.
    """
    s, ranks, length = t.sizes, t.sizes.layout.cp, t.sizes.run.train.seq_len
    stored = 0 if spec.softcap is None and _stores_scores(s, spec) else 1
    if ranks == 1:
        # its result is the output projection's input, of which FP8 saves a copy instead
        saves = stored * (q + k + v + (q if saved or s.in_fp8 else 0))
        return attend(t, spec, q, k + v, saves=saves, keys=length)
    if s.run.parallel.cp_comm_type is CpComm.all_gather:
        whole, ring = ranks * (k + v), (ranks - 1) * (k + v)
        t.op(Work.other, k + v, k + v)
        sends = Sends(CP, Way.ring, ring, ring)
        scratch = whole, 2 * whole - k - v  # arrives in the order of ranks, and is copied
        t.op(Work.other, k + v, whole, stored * whole, scratch=scratch, kernels=2, sends=sends)
        for keys in (length // (2 * ranks), length):
            seen = whole * keys // length
            attend(t, spec, q // 2, seen, saves=stored * q, keys=keys, ranks=2)
        return t.op(Work.other, q, q, passes=True)
    qkv = q + k + v
    t.op(Work.other, qkv, qkv)
    for size, kernels in ((qkv, 3), (q, 2 + ranks)):
        leaves = size * (ranks - 1) // ranks
        sends = Sends(CP, Way.all_to_all, leaves, leaves)
        if size == q:
            attend(t, spec, q, k + v, saves=stored * (qkv + q), keys=length)
        t.op(Work.other, size, size, scratch=(size, size), kernels=kernels, sends=sends)
    return q


def attend(
    t: Trace, spec: AttentionSpec, q: int, kv: int, *, saves: int, keys: int, ranks: int = 1
) -> int:
    """Attention of `q` bytes of queries to `kv` of keys and values, `keys` of each sequence.

    The queries are the last of the keys. ranks: parts that the queries of a sequence are divided
    into.
    """
    s, train = t.sizes, t.sizes.run.train
    elements = q // s.size
    rows = elements // spec.width  # of all heads
    own = s.tokens // ranks // train.micro_batch if s.layout.cp == 1 or ranks > 1 else keys
    pairs = rows // own * twice_the_pairs(own, keys, spec.window)
    flops = pairs * (spec.width + spec.value_width)
    if spec.softcap is not None:
        # by blocks of queries, with five fp32 matrices of scores in backward, three in forward
        a_query = rows // own
        scores = 4 * a_query * min(block_queries(a_query, keys), own) * keys
        # documents are told apart by one mask of all queries
        mask = train.micro_batch * own * keys if s.run.data.document_mask else 0
        scratch = (mask + 3 * scores, mask + 5 * scores + 2 * kv * 4 // s.size)
        return t.op(
            Work.capped_attention, q + kv, q, saves, scratch=scratch, kernels=12, flops=flops
        )
    if _stores_scores(s, spec):
        # GEMMs and an fp32 softmax, which saves all probabilities, and q, k and v per query head
        scores, wide = 4 * rows * keys, 4 * elements
        copies = wide + 2 * wide * keys // own
        work = Work.ordered_attention
        scratch = scores + copies, 2 * scores
        return t.op(work, q + kv, q, scores + copies, scratch=scratch, kernels=12, flops=flops)
    limited = s.run.data.document_mask or (spec.window or keys) < keys
    work, sums = _kernel(s, rows, keys, flash=limited or own < keys or spec.sinks)
    if spec.sinks and s.run.precision.params is Dtype.float32:
        # GEMMs, which store scores while they run, in backward too
        scores, wide = 4 * rows * keys, 4 * elements
        return t.op(
            Work.ordered_attention,
            q + kv,
            q,
            saves + 4 * rows,
            scratch=(2 * scores, 3 * scores + wide),
            kernels=12,
            flops=flops,
            flops_recomputed=flops // 2,
        )
    # in fp32 documents and windows are a mask, which torch adds to the scores; every layer makes it
    # anew
    masked = limited and s.run.precision.params is Dtype.float32
    each = train.micro_batch if s.run.data.document_mask else 1
    keeps = each * own * keys * s.size if masked else 0
    per_head = kv * s.heads // s.kv_heads - kv  # gradients of keys and values are per query head
    scratch = (0, 4 * elements + sums + per_head)
    saves += keeps + 4 * rows
    return t.op(work, q + kv, q, saves, scratch=scratch, flops=flops, window=spec.window)


def block_queries(rows: int, keys: int) -> int:
    """Return the queries of a block of attention with capped scores, of `rows` rows a query."""
    return max(1, min(MOST_QUERIES, BLOCK_SCORES // max(1, rows * keys)))


def twice_the_pairs(queries: int, keys: int, window: int | None) -> int:
    """Return twice the pairs of a query and a key that it sees, of one head and sequence.

    The queries are the last of the keys; a query and its own key are half a pair, as kernels that
    skip what is masked compute about half of the blocks on the diagonal.
    """
    before = keys - queries  # keys before the first query
    if window is None or window >= keys:
        return queries * (before + keys)
    growing = max(0, window - before)  # queries that see all keys before them
    full = queries - growing
    return growing * (2 * before + growing) + full * (2 * window - 1)


def _kernel(s: Sizes, rows: int, keys: int, flash: bool) -> tuple[Work, int]:
    """Return the work of the fused kernel, and memory of its backward.

    `flash`: torch's fastest kernel, which needs as many queries as keys and has neither documents
    nor windows, does not apply.
    """
    ordered = s.run.train.deterministic
    if s.run.train.attention_backend is AttentionBackendKind.transformer_engine:
        # cuDNN's deterministic backward stores a matrix of all scores
        matrix = rows * keys * s.size if ordered else 0
        return (Work.cudnn_ordered_attention if ordered else Work.attention), matrix
    if ordered:
        return Work.ordered_attention, 0
    return (Work.gathered_attention if flash else Work.attention), 0
