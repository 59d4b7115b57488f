"""The transformer with sizes in place of tensors: what `app.model` does on a GPU, as tapes.

Each function follows the code of the same name there. What an operation saves is what its CUDA
kernel saves: torch's own, or those of `app.kernels`. All sizes are bytes.
"""

from __future__ import annotations

from app.choices import Recompute
from app.plan.trace.attention import attention_core
from app.plan.trace.experts import moe_body
from app.plan.trace.parts import Sizes, narrow, norm, scattered, swiglu, widen
from app.plan.trace.trace import Added, Tape, Value, Written

# bytes that the loss keeps per token: row of its label, log-sum-exp, whether it counts
PER_LABEL = 8 + 4 + 1
LOSS_KERNELS = 9  # behind the logits
# bytes per token, while the three fp32 numbers of all chunks are put together
STATISTICS = 2 * 3 * 4


def layer_tape(s: Sizes, moe: bool, full: bool) -> Written:
    """A dense or an MoE layer; `full`: backward computes all of it again from its input."""
    tape = Tape()
    given = tape.value(s.stream)
    with tape.again(full):
        x = _attention(tape, s, given)
        x = moe_body(tape, s, s.model.moe, x=x) if moe and s.model.moe else _dense_body(tape, s, x)
    return Written(tape, given, x)


def embedding_tape(s: Sizes) -> Written:
    """The lookup; tokens are the step's input, and with tp > 1 ranks have rows of their own."""
    tape = Tape(phase="embedding")
    whole = s.stream * s.layout.tp
    given = tape.value(0)
    if s.layout.tp == 1:
        return Written(tape, given, tape.op([], [whole], weight=s.table)[0])
    (rows,) = tape.op([], [whole], weight=s.table, keeps=8 * s.tokens, kernels=4)
    (own,) = tape.op([rows], [whole], keeps=s.tokens)  # zero for the tokens of other ranks
    return Written(tape, given, scattered(tape, s, own))


def head_tape(s: Sizes, tied: bool) -> Written:
    """The last norm, and the loss straight from what it makes (`app.model.loss`); `tied` to an
    embedding on this rank.
    """
    tape = Tape(phase="head")
    given = tape.value(s.stream)
    h = norm(tape, s, given)
    by = _loss_of_kept_logits if s.run.loss.chunk_tokens is None else _loss_by_chunks
    by(tape, s, h, Added.after if tied and s.direct else s.added)
    return Written(tape, given, None)


def _loss_of_kept_logits(tape: Tape, s: Sizes, h: Value, added: Added) -> None:
    """Logits that backward turns into their gradient where they are; what it gathers waits for
    the weight's gradient.
    """
    parts = s.layout.tp
    logits = s.tokens * s.columns * s.size
    weight = _there(s, added)
    gathered = parts * h.bytes if parts > 1 else 0
    ordered = s.copies * gathered
    scratch = max(gathered, ordered - logits), 2 * gathered + max(0, ordered - gathered - weight)
    carries = gathered - h.bytes if parts > 1 else 0
    later = s.later(s.table)
    (made,) = tape.op(
        [h],
        [logits],
        [h, 0],
        weight=s.table,
        added=added,
        later=later,
        carries=carries,
        scratch=scratch,
    )
    scratch = gathered + STATISTICS * s.tokens, ordered
    tape.op(
        [made], [4], keeps=PER_LABEL * s.tokens, scratch=scratch, passes=True, kernels=LOSS_KERNELS
    )


def _there(s: Sizes, added: Added) -> int:
    """The weight's gradient, where it is stored beside that of the hidden states."""
    return s.table if added is Added.after else 0


def _loss_by_chunks(tape: Tape, s: Sizes, h: Value, added: Added) -> None:
    """Logits of some tokens at a time, remade in backward; the weight's gradient sums in fp32."""
    chunk = min(s.run.loss.chunk_tokens or s.tokens, s.tokens)
    parts = s.layout.tp
    logits = chunk * s.columns * s.size
    gathered = parts * h.bytes if parts > 1 else 0
    following = logits if chunk < s.tokens else 0  # the next chunk's, before this one's are gone
    ordered = s.copies * gathered
    gradient = parts * h.bytes
    table_sum = s.table // s.size * 4
    loop = logits + max(following, s.table)
    weight = _there(s, added)
    end = (h.bytes if parts > 1 else 0) + max(ordered - gathered, 0 if s.size == 4 else weight)
    most = gathered + gradient + table_sum + max(loop, end)
    scratch = max(ordered, gathered + logits + following), max(ordered, most) - h.bytes - weight
    keeps = PER_LABEL * s.tokens
    kernels = LOSS_KERNELS + 2 * -(-s.tokens // chunk)
    tape.op(
        [h],
        [4],
        [h],
        keeps=keeps,
        weight=s.table,
        added=added,
        carries=table_sum,
        scratch=scratch,
        kernels=kernels,
    )


def _attention(tape: Tape, s: Sizes, x: Value) -> Value:
    tape.phase = "attn"
    width = s.model.head_width
    heads = s.heads + 2 * s.kv_heads
    with tape.again(s.recomputes(Recompute.norm), discards=True):
        h = norm(tape, s, x)
    qkv = widen(tape, s, h, size=s.tokens * heads * width * s.size, weight=s.weight(heads * width))
    with tape.again(s.recomputes(Recompute.attn_core)) as again:
        out = attention_core(tape, s, qkv, keep=again)
    return tape.add(x, narrow(tape, s, out, weight=s.weight(s.heads * width), holds=[h, qkv]))


def _dense_body(tape: Tape, s: Sizes, x: Value) -> Value:
    tape.phase = "mlp"
    with tape.again(s.recomputes(Recompute.norm), discards=True):
        h = norm(tape, s, x)
    y = swiglu(
        tape,
        s,
        h,
        width=s.model.ffn_hidden_size // s.layout.tp,
        again=s.recomputes(Recompute.mlp_act),
    )
    return tape.add(x, y)
