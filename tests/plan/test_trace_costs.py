"""Cost of the operations of parts, against counts by hand."""

from __future__ import annotations

import dataclasses

import pytest

from app.choices import CpComm, DispatcherKind, Recompute
from app.config import (
    MLAConfig,
    ModelConfig,
    MoEConfig,
    ParallelConfig,
    RecomputeConfig,
    Run,
    TrainConfig,
)
from app.plan.cost.flops import stage_flops
from app.plan.groups import CP, GROUPS, TP, Group, Way
from app.plan.layout import select_layout
from app.plan.model.layer import LayerWeights
from app.plan.model.vocabulary import table
from app.plan.parts.stage import (
    LayerPart,
    StageEnd,
    StagePart,
    embedding,
    head,
    layer,
    part_operations,
    sizes_of,
    stage_parts,
)
from app.plan.parts.trace import Operation
from app.plan.recompute import NOTHING
from app.plan.sharding.parameters import chunk_parameters
from app.plan.stages import Stage
from app.rules import check

MODEL = ModelConfig(
    num_layers=2,
    hidden_size=64,
    ffn_hidden_size=96,
    num_heads=8,
    num_kv_heads=4,
    vocab_size=128,
    tie_embeddings=True,
    moe=MoEConfig(
        num_experts=8,
        top_k=2,
        ffn_hidden_size=32,
        first_k_dense=1,
        shared_ffn_hidden_size=48,
        shared_gate=True,
    ),
)
WHOLE = Stage((0, 1), embedding=True, head=True)
DENSE, MOE = map(LayerPart, MODEL.layer_specs)


def planned(model: ModelConfig = MODEL, batch: int = 2, **parallel: object) -> Run:
    world = parallel.pop("world", 8)
    train = TrainConfig(seq_len=32, micro_batch=batch, global_batch=batch * 8)
    return check(Run(model, ParallelConfig(world_size=world, **parallel), train=train))


def operations(run: Run, part: StagePart) -> list[Operation]:
    s = sizes_of(run, select_layout(run))
    return part_operations(s, part, s.recompute.usual)


def flops_by_phase(run: Run) -> dict[str, int]:
    """Return FLOPs by phase, every part counted once."""
    found: dict[str, int] = {}
    for part in stage_parts(run, WHOLE):
        for op in operations(run, part):
            found[op.phase] = found.get(op.phase, 0) + op.flops
    return found


def test_a_stage_is_a_row_of_parts():
    assert not DENSE.spec.routed and MOE.spec.routed
    assert stage_parts(Run(MODEL), WHOLE) == [StageEnd.embedding, DENSE, MOE, StageEnd.head]
    assert stage_parts(Run(MODEL), Stage((1,), False, True)) == [MOE, StageEnd.head]
    assert stage_parts(Run(MODEL), Stage((), False, False)) == []


@pytest.mark.parametrize(
    "parallel",
    [
        {"world": 1},
        {"tp": 2},
        {"tp": 2, "cp": 2, "ep": 2},
        {"tp": 2, "cp": 2, "cp_comm_type": CpComm.all_to_all, "ep": 4, "etp": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("dispatcher", [DispatcherKind.auto, DispatcherKind.all_gather], ids=str)
def test_every_phase_costs_its_gemms(parallel: dict, dispatcher: DispatcherKind):
    """A rank's tokens, or its part of the widths, through each matrix: 2 per element and token."""
    moe = dataclasses.replace(MODEL.moe, dispatcher=dispatcher, planned_imbalance=1.0)
    run = planned(dataclasses.replace(MODEL, moe=moe), **parallel)
    tokens = 2 * 32 // (run.parallel.tp * run.parallel.cp)
    projections = 64 * (8 + 2 * 4) * 8 + 64 * 64
    scores = 2 * 32 * 8 * 8  # q·k and probabilities·v, half of either masked
    expected = {
        "attn": 2 * (2 * projections + scores),  # of both layers
        "mlp": 2 * 3 * 64 * 96,
        "shared": 2 * (3 * 64 * 48 + 64),
        "route": 2 * 64 * 8,
        "experts": 2 * 2 * 3 * 64 * 32,
        "head": 2 * 128 * 64,
    }
    found = {phase: flops for phase, flops in flops_by_phase(run).items() if flops}
    assert found == {phase: tokens * flops for phase, flops in expected.items()}


@pytest.mark.parametrize("cp", [2, 4])
def test_both_cp_chunks_cost_their_query_key_pairs(cp: int):
    """The first rank has the first and the last of 2·cp pieces; a query pairs with itself half."""
    run = planned(world=cp, cp=cp)
    piece = 32 // (2 * cp)
    pairs = [
        sum(position + 0.5 for position in queries)
        for queries in (range(piece), range(32 - piece, 32))
    ]
    ops = operations(run, DENSE)
    attends = [op.flops for op in ops if op.phase == "attn" and op.flops and not op.weight]
    # two sequences, two GEMMs, 8 heads of width 8
    assert attends == [2 * 2 * 2 * 8 * 8 * count for count in pairs]


@pytest.mark.parametrize("cp", [1, 2])
def test_windows_cost_their_query_key_pairs(cp: int):
    """A query pairs with as many keys as its window has tokens, with itself half."""
    piece = 32 // (2 * cp)
    calls = (range(piece), range(32 - piece, 32)) if cp > 1 else (range(32),)
    for window in (1, 5, 8, 16, 24, 31, 32, 100):
        run = planned(dataclasses.replace(MODEL, sliding_window=window), world=cp, cp=cp)
        pairs = [
            sum(min(position + 0.5, window - 0.5) for position in queries) for queries in calls
        ]
        ops = operations(run, LayerPart(run.model.layer_specs[0]))
        attends = [op.flops for op in ops if op.phase == "attn" and op.flops and not op.weight]
        assert attends == [2 * 2 * 2 * 8 * 8 * count for count in pairs], window


def test_only_what_has_a_weight_has_a_gradient_of_it():
    ops = [
        op
        for part in stage_parts(Run(MODEL), WHOLE)
        for op in operations(planned(tp=2), part)
        if op.flops and not op.weight
    ]
    assert len(ops) == 2 and {op.phase for op in ops} == {"attn"}  # scores of both layers


@pytest.mark.parametrize(
    "parallel", [{"world": 1}, {"tp": 2, "ep": 2}, {"tp": 4, "ep": 4, "etp": 2}], ids=str
)
def test_weights_of_the_traces_are_those_of_the_descriptions(parallel: dict):
    """Every matrix of a stage is read by one operation; norms' gradients are next to nothing."""
    run = planned(**parallel)
    matrices = [
        parameter.numel
        for parameter in chunk_parameters(MODEL, WHOLE, select_layout(run))
        if len(parameter.shape) > 1
    ]
    traced = [
        op.weight // 4  # fp32
        for part in stage_parts(Run(MODEL), WHOLE)
        for op in operations(run, part)
        if op.weight
    ]
    # the tied table is the embedding's and the head's
    table = 128 * 64 // run.parallel.tp
    assert sorted(traced) == sorted([*matrices, table])


WIDER = dataclasses.replace(
    MODEL,
    ffn_hidden_size=160,
    head_dim=16,
    vocab_size=256,
    moe=dataclasses.replace(
        MODEL.moe, num_experts=16, ffn_hidden_size=48, shared_ffn_hidden_size=80
    ),
)
LATENT = dataclasses.replace(
    MODEL,
    num_kv_heads=8,
    mla=MLAConfig(16, 32, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8),
)
LONGER = dataclasses.replace(LATENT, mla=dataclasses.replace(LATENT.mla, q_lora_rank=24))


@pytest.mark.parametrize(
    "parallel", [{"world": 1}, {"tp": 2, "ep": 2}, {"tp": 4, "ep": 4, "etp": 2}], ids=str
)
@pytest.mark.parametrize("routed", [False, True], ids=["dense", "routed"])
@pytest.mark.parametrize(
    ("model", "wider"), [(MODEL, WIDER), (LATENT, LONGER)], ids=["grouped", "latent"]
)
def test_gemms_have_the_shapes_of_the_weights_given(
    model: ModelConfig, wider: ModelConfig, routed: bool, parallel: dict
):
    """Parts compute no shape from the run's model: with weights of a wider one, all GEMMs are
    that one's.
    """

    def gemms(of: ModelConfig, weights: ModelConfig) -> list[tuple[int, ...]]:
        run = planned(of, **parallel)
        s = sizes_of(run, select_layout(run))
        spec = weights.layer_specs[routed]
        parts = (
            layer(s, of.layer_specs[routed], LayerWeights.of(weights, spec), NOTHING),
            embedding(s, table(weights)),
            head(s, table(weights)),
        )
        ops = [op for part in parts for op in part if op.weight]
        return [(op.weight, op.flops, op.makes) for op in ops]

    assert gemms(model, wider) == gemms(wider, wider) != gemms(model, model)


def test_experts_take_whole_rows():
    """64 tokens with 2 experts each are 128 rows on the mean; 1.37 times as many are 175.36."""
    moe = dataclasses.replace(MODEL.moe, planned_imbalance=1.37)
    run = planned(dataclasses.replace(MODEL, moe=moe), world=4, ep=4)
    (flops,) = stage_flops(run, [Stage((1,), False, False)], select_layout(run), load=1.37)
    (mean,) = stage_flops(run, [Stage((1,), False, False)], select_layout(run))
    assert flops.forward - mean.forward == (175 - 128) * 2 * 3 * 64 * 32


def test_rows_that_a_capacity_drops_are_not_computed():
    """A factor of 0.5 leaves half of the rows, also where nobody waits to learn how many."""
    moe = dataclasses.replace(MODEL.moe, capacity_factor=0.5)
    run = planned(dataclasses.replace(MODEL, moe=moe), world=1)
    assert flops_by_phase(run)["experts"] == flops_by_phase(planned(world=1))["experts"] // 2


def sent_by_phase(run: Run, group: Group) -> dict[str, tuple[int, int]]:
    """Bytes forward and backward, of every part once."""
    found: dict[str, tuple[int, int]] = {}
    for part in stage_parts(run, WHOLE):
        for op in operations(run, part):
            if op.sends and op.sends.group is group and op.sends.forward:
                forward, backward = found.get(op.phase, (0, 0))
                found[op.phase] = forward + op.sends.forward, backward + op.sends.backward
    return found


@pytest.mark.parametrize("tp", [2, 4])
def test_tensor_parallel_ranks_pass_hidden_states_round(tp: int):
    """A block gathers its input and scatters its output; backward does the reverse of both and
    gathers the input once more.
    """
    run = planned(tp=tp, world=tp)
    own = 2 * 32 // tp * 64 * 4  # tokens of one rank, fp32
    block = 2 * (tp - 1) * own, 3 * (tp - 1) * own
    assert sent_by_phase(run, TP) == {
        "embedding": ((tp - 1) * own, (tp - 1) * own),
        "attn": (2 * block[0], 2 * block[1]),  # of both layers
        "mlp": block,
        "shared": block,
        "head": ((tp - 1) * own, 2 * (tp - 1) * own),
    }


@pytest.mark.parametrize(
    ("way", "comm", "sent"),
    [
        # keys and values of 4 heads to the three others, of 32 tokens of one rank and width 8
        (Way.ring, CpComm.all_gather, 3 * 2 * 4),
        # three quarters of queries, keys, values and results
        (Way.all_to_all, CpComm.all_to_all, 3 * (8 + 2 * 4 + 8) // 4),
    ],
)
def test_context_parallel_ranks_exchange_heads(way: Way, comm: CpComm, sent: int):
    run = planned(cp=4, world=4, cp_comm_type=comm, batch=4)
    both_layers = 2 * sent * 32 * 8 * 4
    assert sent_by_phase(run, CP) == {"attn": (both_layers, both_layers)}
    ops = operations(run, DENSE)
    assert {op.sends.way for op in ops if op.sends} == {way}
    # what backward runs again is sent again
    again = dataclasses.replace(run, recompute=RecomputeConfig(phases=(Recompute.attn_core,)))
    ops = operations(again, DENSE)
    assert {op.rerun for op in ops if op.sends} == {True}


def test_a_rank_alone_sends_nothing():
    run = planned(world=1)
    assert all(sent_by_phase(run, group) == {} for group in GROUPS.values())
