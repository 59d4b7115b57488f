"""The transformer once more, with sizes in place of tensors: what `app.model` does on a GPU, as tapes.

Each function follows the code of the same name there. What an operation saves is what torch's own CUDA kernels save;
`attends_by_matrices` and `_softmax_attention` hold all that depends on which of them attention takes. All sizes are bytes.
"""

from __future__ import annotations

from app.choices import Dtype, Recompute
from app.config import Run
from app.plan.moe_tapes import moe_body
from app.plan.tape import Tape, Value, Written
from app.plan.tape_parts import Sizes, cast, narrow, norm, scattered, swiglu, widen

MULTIPROCESSORS = 132  # of an H100 or H200; ordered attention has partial sums for as many


def attends_by_matrices(run: Run) -> bool:
    """Whether no fused attention kernel takes the run, so that attention stores all its S × S probabilities.

    For fewer key/value heads than query heads there is none in fp32, and none under a document mask with fixed order.
    """
    grouped = run.model.num_kv_heads < run.model.num_heads
    ordered_mask = run.data.document_mask and run.train.deterministic
    return grouped and (run.precision.params is Dtype.float32 or ordered_mask)


def layer_tape(s: Sizes, moe: bool, full: bool) -> Written:
    """A dense or an MoE layer; `full`: backward computes all of it again from its input."""
    tape = Tape()
    given = tape.value(s.stream)
    with tape.again(full):
        x = _attention(tape, s, given)
        x = moe_body(tape, s, s.model.moe, x) if moe and s.model.moe else _dense_body(tape, s, x)
    return Written(tape, given, x)


def embedding_tape(s: Sizes) -> Written:
    """The lookup; its tokens are the step's input."""
    tape = Tape(phase="embedding")
    given = tape.value(0)
    (x,) = tape.op([], [s.stream * s.layout.tp], weight=s.table)
    return Written(tape, given, scattered(tape, s, x))


def head_tape(s: Sizes) -> Written:
    """The last norm, the logits and their loss in fp32 (`Chunk._logits`, `summed_loss`)."""
    tape = Tape(phase="head")
    given = tape.value(s.stream)
    h = norm(tape, given, s.local)
    count = s.tokens * s.model.vocab_size // s.layout.tp
    logits = widen(tape, s, h, count * s.size, s.table)
    wide = cast(tape, logits, count * 4)
    (log_probs,) = tape.op([wide], [count * 4], [0], holds=[logits])
    tape.op([log_probs], [4], [log_probs], holds=[logits], keeps=4)
    return Written(tape, given, None)


def _attention(tape: Tape, s: Sizes, x: Value) -> Value:
    tape.phase = "attn"
    width, heads = s.model.head_width, s.heads + 2 * s.kv_heads
    with tape.again(s.recomputes(Recompute.norm), discards=True):
        h = norm(tape, x, s.local)
    qkv = widen(tape, s, h, s.tokens * heads * width * s.size, s.weight(heads * width))
    with tape.again(s.recomputes(Recompute.attn_core)):
        out = _attention_core(tape, s, qkv)
    return tape.add(x, narrow(tape, s, out, s.weight(s.heads * width)))


def _attention_core(tape: Tape, s: Sizes, qkv: Value) -> Value:
    per_head = s.tokens * s.model.head_width * s.size
    q, k, v = tape.split(qkv, s.heads * per_head, s.kv_heads * per_head, s.kv_heads * per_head)
    if 1 < s.kv_heads < s.heads:
        (q,) = tape.op([q], [q.bytes], passes=True)  # query heads of several groups do not lie side by side
    if s.model.qk_norm:
        q, k = norm(tape, q, s.tokens * s.heads), norm(tape, k, s.tokens * s.kv_heads)
    q, k = _rotate(tape, s, q), _rotate(tape, s, k)
    return _matrix_attention(tape, s, q, k, v) if attends_by_matrices(s.run) else _softmax_attention(tape, s, q, k, v)


def _rotate(tape: Tape, s: Sizes, x: Value) -> Value:
    """Saves cosines and sines only; a few products in fp32 come and go."""
    wide = x.bytes // s.size * 4
    return tape.op([x], [x.bytes], scratch=(3 * wide, 2 * wide + x.bytes), kernels=7)[0]


def _softmax_attention(tape: Tape, s: Sizes, q: Value, k: Value, v: Value) -> Value:
    """A fused kernel: saves its arguments, its result and a number per row; sums the gradient of queries in fp32."""
    row = 4 * s.tokens * s.heads
    mask = s.mask * s.size  # as numbers to add, made anew in every layer
    parts = -(-MULTIPROCESSORS // (s.run.train.micro_batch * s.heads)) if s.run.train.deterministic else 1
    sums = row + parts * row * s.model.head_width
    repeated = 2 * (q.bytes - k.bytes)  # gradients of keys and values per query head, before their sum
    passing = 2 * (k.bytes + v.bytes) if s.layout.cp > 1 else 0  # of other context-parallel ranks: one in use, one on its way
    scratch = passing, passing + sums + (repeated if k.bytes < q.bytes else 0)
    return tape.op([q, k, v], [q.bytes], [q, k, v, 0], keeps=row + mask, scratch=scratch)[0]


def _matrix_attention(tape: Tape, s: Sizes, q: Value, k: Value, v: Value) -> Value:
    """Products and a softmax in fp32: saves scaled queries, keys and values per query head, and all probabilities."""
    wide, scores = q.bytes // s.size * 4, 4 * s.tokens * s.heads * s.run.train.seq_len
    (out,) = tape.op([q, k, v], [wide], keeps=3 * wide + scores, scratch=(scores + 3 * wide, 2 * scores), kernels=12)
    return tape.op([out], [q.bytes])[0]


def _dense_body(tape: Tape, s: Sizes, x: Value) -> Value:
    tape.phase = "mlp"
    with tape.again(s.recomputes(Recompute.norm), discards=True):
        h = norm(tape, x, s.local)
    y = swiglu(tape, s, h, s.model.ffn_hidden_size // s.layout.tp, s.recomputes(Recompute.mlp_act))
    return tape.add(x, y)
