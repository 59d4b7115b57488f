"""The planned activations against real chunks: what autograd keeps, and what is alive beside it,
within 5 %.

The plan is one for GPUs. So the model takes its kernels here, of which all but the launch happens:
memory is the same whatever they compute. Only the choice of experts must be one: every token takes
the first. Torch's own kernels save the same on a CPU, but attention that stores its probabilities
is chosen where a GPU would have to.
"""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest

from app.choices import Dtype, Recompute, ScheduleName
from app.config import (
    ModelConfig,
    ScheduleConfig,
)
from app.engine.rehearsal.clock import Alive
from app.model.layers.weight_grads import WeightGradQueue
from app.plan.parts.attention import attends_by_matrices
from tests.tensors import activation_memory
from tests.tensors.activation_memory import (
    DENSE,
    LENGTH,
    MODELS,
    SEQUENCES,
    SIGMOID,
    TORCH,
    attention_of,
    batch_of,
    chunk_of,
    forward_and_backward,
    measured,
    planned,
    run_of,
    with_kernels,
)

pytest.importorskip("triton")


kernels = pytest.fixture(autouse=True)(with_kernels)


# documents are a mask in fp32 alone
KINDS = {
    "fp32": (Dtype.float32, False),
    "fp32 documents": (Dtype.float32, True),
    "bf16": (Dtype.bfloat16, False),
}


@pytest.mark.cover(1)
@pytest.mark.parametrize(("dtype", "mask"), KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_autograd_keeps_what_is_planned(model: ModelConfig, dtype: Dtype, mask: bool):
    run = run_of(model, dtype, mask, ordered=True)
    assert sum(measured(run).values()) == pytest.approx(planned(run).total, rel=0.05)


def test_both_kinds_of_attention_are_covered():
    kinds = [
        attends_by_matrices(run_of(m, *kind, ordered=True))
        for m in MODELS.values()
        for kind in KINDS.values()
    ]
    assert 5 < sum(kinds) < len(kinds) - 5


WORKING = {
    name: MODELS[name]
    for name in (
        *(
            "dense",
            "grouped_tied",
            "residuals_scaled",
            "softmax",
            "sigmoid_shared_gate",
            "softmax_before",
        ),
        *("latent", "latent_queries_as_they_are", "linear", "linear_alone"),
    )
}


@pytest.mark.cover(1)
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "layers"])
@pytest.mark.parametrize("dtype", TORCH, ids=lambda dtype: dtype.value)
@pytest.mark.parametrize("model", WORKING.values(), ids=WORKING)
def test_what_is_alive_while_it_computes_is_within_five_percent(
    model: ModelConfig, dtype: Dtype, whole: bool
):
    run = run_of(model, dtype)
    memory = planned(run, whole, whole)
    # counted as kept, not made here
    came = 0 if whole else SEQUENCES * LENGTH * model.hidden_size * TORCH[dtype].itemsize
    forward, kept, backward = forward_and_backward(run, chunk_of(run, whole, whole), whole)
    assert memory.total - came == pytest.approx(kept - (0 if whole else came), rel=0.05)
    assert memory.total - came + memory.forward == pytest.approx(forward, rel=0.05)
    assert memory.total - came + memory.backward == pytest.approx(backward, rel=0.05)


@pytest.mark.cover(1)
@pytest.mark.parametrize(("dtype", "mask"), KINDS.values(), ids=KINDS)
@pytest.mark.parametrize(
    "model", [DENSE, dataclasses.replace(DENSE, moe=SIGMOID)], ids=["dense", "moe"]
)
def test_full_recomputation_keeps_inputs_of_layers(model: ModelConfig, dtype: Dtype, mask: bool):
    """Backward holds one layer at a time."""
    run = run_of(model, dtype, mask, full=True)
    memory = planned(run)
    forward, kept, backward = forward_and_backward(run, chunk_of(run), True)
    assert kept == pytest.approx(memory.total, rel=0.05)
    peak = memory.total + max(memory.forward, memory.backward)
    assert max(forward, backward) == pytest.approx(peak, rel=0.05)


@pytest.mark.parametrize("dtype", TORCH, ids=lambda dtype: dtype.value)
def test_recomputed_linear_attention_is_within_five_percent(dtype: Dtype):
    run = run_of(MODELS["linear_alone"], dtype, phases=(Recompute.attn_core,))
    memory = planned(run, False, False)
    forward, kept, backward = forward_and_backward(run, chunk_of(run, False, False), False)
    assert memory.total == pytest.approx(kept, rel=0.05)
    assert memory.total + memory.forward == pytest.approx(forward, rel=0.05)
    assert memory.total + memory.backward == pytest.approx(backward, rel=0.05)


PARTS = {
    # what norms make, by who saves it first
    Recompute.norm: {"attn": 3, "mlp": 2, "route": 1},
    Recompute.mlp_act: {"mlp": 2 * 352 / 128},  # silu(gate) · up
    Recompute.experts_act: {"experts": 4 * 64 / 128},
    # queries, keys and values are freed, but the projection's output that they come from stays
    Recompute.attn_core: {"attn": 3 * (3 - 3)},
}
# fp32 numbers per token
ROWS = {Recompute.attn_core: {"attn": 3 * 8}}


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.value)
def test_recomputed_parts_keep_nothing_that_they_make(part: Recompute):
    # dense, MoE, dense
    model = dataclasses.replace(DENSE, moe=dataclasses.replace(SIGMOID, every_n=2, first_k_dense=1))
    before, after = (
        planned(run_of(model, Dtype.bfloat16, phases=phases)) for phases in ((), (part,))
    )
    tokens = SEQUENCES * LENGTH
    gone = Counter({phase: round(times * tokens * 128 * 2) for phase, times in PARTS[part].items()})
    gone.update({phase: count * tokens * 4 for phase, count in ROWS.get(part, {}).items()})
    assert Counter(before.kept) - Counter(after.kept) == gone
    assert before.backward <= after.backward <= before.backward + gone.total()
    assert after.total + after.backward <= before.total + before.backward


def test_recomputed_moe_keeps_its_input_shared_expert_nothing():
    model = dataclasses.replace(
        DENSE, num_layers=1, moe=dataclasses.replace(SIGMOID, first_k_dense=0)
    )
    stream = SEQUENCES * LENGTH * 128 * 2
    moe = planned(run_of(model, Dtype.bfloat16, phases=(Recompute.moe,)))
    assert {
        phase: size for phase, size in moe.kept.items() if phase not in ("attn", "rotary", "head")
    } == {"norm": stream}
    shared = planned(run_of(model, Dtype.bfloat16, phases=(Recompute.shared,)))
    nothing = planned(run_of(model, Dtype.bfloat16))
    # the shared expert's gate and up, the activation, its result, the gate's number per token; its
    # input is saved by the router anyway
    widths = 2 * SEQUENCES * LENGTH * (3 * 96 + 128 + 1)
    assert sum(nothing.kept.values()) - sum(shared.kept.values()) == widths


@pytest.mark.cover(1)
@pytest.mark.parametrize("dtype", TORCH, ids=lambda dtype: dtype.value)
@pytest.mark.parametrize("model", WORKING.values(), ids=WORKING)
def test_a_split_backward_and_what_it_leaves(model: ModelConfig, dtype: Dtype):
    """The queue of weight gradients holds the GEMMs' inputs and output gradients."""
    run = dataclasses.replace(
        run_of(model, dtype), schedule=ScheduleConfig(ScheduleName.zero_bubble_h1)
    )
    memory = planned(run)
    chunk, batch, queue = chunk_of(run), batch_of(run), WeightGradQueue()
    with (
        Alive([*chunk.parameters(), batch.tokens, batch.labels, batch.positions]) as alive,
        attention_of(run),
    ):
        context = chunk.context(batch.positions, None, queue)
        out = chunk(batch.tokens, context)
        loss = chunk.loss(out.x, batch.labels, context)
        root = sum((report.loss for report in out.routing if report.loss.requires_grad), loss)
        del out
        alive.peak = alive.live
        root.backward()
        assert alive.live == pytest.approx(memory.waiting, rel=0.05)
        assert alive.peak == pytest.approx(memory.total + memory.backward, rel=0.05)


@pytest.mark.parametrize("tied", [False, True])
def test_a_tied_table_has_two_gradients_at_the_end(tied: bool, monkeypatch: pytest.MonkeyPatch):
    """With few tokens and many rows the gradients of tables are most of a backward; a tied one's
    waits for its other half.
    """
    monkeypatch.setattr(activation_memory, "LENGTH", 4)
    run = run_of(dataclasses.replace(DENSE, vocab_size=20000, tie_embeddings=tied), Dtype.bfloat16)
    _, _, backward = forward_and_backward(run, chunk_of(run), True)
    table, memory = 20000 * 128 * 2, planned(run)
    assert memory.total + memory.backward == pytest.approx((1 + tied) * table, rel=0.15)
    sums = tied * table  # autograd adds gradients in place, but not while a mode watches it
    assert backward - sums == pytest.approx(memory.total + memory.backward, rel=0.05)
