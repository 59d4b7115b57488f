"""The memory plan: hand-computed parts, peaks of lists written by hand, graphs, what must fall
when something is divided.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

from app.choices import GraphImpl, GraphKey, GraphScope, Recompute, ScheduleName
from app.cli.options.compose import load_overrides
from app.config import (
    CudaGraphConfig,
    DataConfig,
    ModelConfig,
    ParallelConfig,
    RecomputeConfig,
    Run,
    ScheduleConfig,
    TrainConfig,
)
from app.plan.actions import MicrobatchChunk
from app.plan.formatting import GIB
from app.plan.groups import EMBEDDING, ETP_EP
from app.plan.layout import ParallelLayout
from app.plan.memory import activations
from app.plan.memory.activations import (
    ChunkActivations,
    MicrobatchMemory,
    find_peak,
)
from app.plan.memory.overheads import CUDA_CONTEXT, FRAGMENTATION, GRAPH, GRAPH_KERNEL, WORKSPACES
from app.plan.memory.rank_memory import OUTSIDE, communicators, plan_memory
from app.plan.schedule import build_schedule
from app.plan.stages import Stage
from app.planner.plan import Plan
from app.rules import check
from tests.actions import parse_action
from tests.config import load
from tests.plan.memory import DENSE, MOE, kept, parts_of, run_of, sizes


def test_a_rank_of_an_empty_stage_holds_only_what_passes_through():
    graph = CudaGraphConfig(GraphImpl.local, ())
    parallel = ParallelConfig(pp=4, layout="Et*4||t*4|L")
    for chosen in (CudaGraphConfig(), graph, CudaGraphConfig(GraphImpl.full_iteration)):
        for full in (False, True):
            again = RecomputeConfig(full=full and chosen is not graph)
            run = run_of(MOE, parallel=parallel, cuda_graph=chosen, recompute=again)
            plan = Plan(run)
            held = sizes(plan.memory[1])
            state = "parameters", "gradients", "optimizer"
            border = 2 * 2 * 512 * 256  # bf16, two sequences
            if chosen.impl is GraphImpl.full_iteration:
                assert held["graph pool"] <= 6 * border
            else:
                none = *state, "activations", "graph pool"
                assert not any(held.get(name, 0) for name in none)
                assert border <= held["pipeline buffers"] <= 6 * border
            assert plan.stage_seconds[1].total == 0.0 and plan.timeline.makespan > 0
            assert plan.parameters[1] == ((),) and plan.buffers[1][0].dense is None


def allocated(run: Run) -> int:
    """Bytes of tensors on the busiest rank."""
    return max(rank.allocated for rank in Plan(run).memory)


# --- worked by hand ---


def test_the_memory_of_small_by_the_formulas():
    """`+experiment=small`: 24 dense layers, D 1024, 16 heads of 64, F 2816, V 50,304 in bf16, one
    GPU, microbatches of 2 sequences of 4096.
    """
    (memory,) = Plan(load("+experiment=small")).memory
    have, count, tokens = sizes(memory), 411_354_112, 8192
    kept = (
        24 * (2 * tokens * (2 * 1024 + 3 * 1024 + 1024) + 4 * tokens * 16),  # attention
        24 * 2 * tokens * (2 * 1024 + 3 * 2816),  # feed-forward
        8 * tokens * 64,  # rotary positions
        2 * tokens * 2 * 1024 + 2 * tokens * 50304 + 13 * tokens,  # head
    )
    expected = {
        "parameters": 2 * count,
        "gradients": 4 * count,
        "optimizer": 12 * count,
        "activations": sum(kept),
        # gradients of the head's input and of the residual stream
        "working memory": 2 * 2 * tokens * 1024 - 13 * tokens,
        "inputs": 4 * 3 * 8 * tokens,
        "library workspaces": 2 * 32 * 2**20,
    }
    assert {name: have[name] for name in expected} == expected
    assert memory.allocated == sum(expected.values())
    assert memory.allocated == sum(size for name, size in have.items() if name not in OUTSIDE)


def test_a_layer_of_experts_by_the_formulas():
    """`model=smallmoe` (E 64, K 6, F_e 512, F_s 1024, G 4) at ep = 2."""
    run = load("+experiment=small", "model=smallmoe", "parallel.ep=2", "parallel.dp=2")
    layer = kept(run, Stage((5,), False, False))
    tokens, rows = 8192, 3 * 6 * 8192 // 2
    expected = {
        "attn": 2 * tokens * (2 * 1024 + 24 * 64 + 16 * 64) + 4 * tokens * 16,
        "norm": 2 * tokens * 1024,
        "shared": 2 * tokens * 3 * 1024,
        "route": 2 * tokens * 1024 + 4 * tokens * (64 * 2 + 3 * 6),
        "dispatch": 8 * tokens * 6 + 8 * rows,
        "experts": 2 * rows * (1024 + 3 * 512),
        "combine": (2 * 1024 + 4) * tokens * 6 + 8 * rows,
    }
    assert expected == {phase: size for phase, size in layer.items() if phase != "rotary"}


MEASURED = (  # `+experiment=small …` on an H200: max_memory_allocated, GiB
    ("train.micro_batch=2", 13.888),
    ("cuda_graph=layer", 13.888),
    ("cuda_graph=full_iteration", 13.889),
    ("precision.grads=bfloat16", 13.217),
    ("model=smallmoe", 38.899),
    ("model=smallmoe recompute=full", 31.432),
    ("model=smallmoe cuda_graph=partial", 39.149),
    ("model=smallmoe cuda_graph=full_iteration", 38.9),
)


@pytest.mark.every(3)
@pytest.mark.parametrize(("overrides", "measured"), MEASURED)
def test_measured_peaks_are_within_three_percent(overrides: str, measured: float):
    run = load_overrides(["+experiment=small", *overrides.split()], 1)
    assert Plan(run).memory[0].allocated / GIB == pytest.approx(measured, rel=0.03)


# --- parts ---


def test_parts_add_up_and_are_named_once():
    for run in (run_of(), run_of(MOE, parallel=ParallelConfig(dp=4, ep=4, pp=2))):
        for rank, memory in enumerate(Plan(run).memory):
            names = [part.name for part in memory.parts]
            assert len(set(names)) == len(names) and memory.pp_rank == rank
            assert memory.total == sum(part.bytes for part in memory.parts)
            outside = sum(part.bytes for part in memory.parts if part.name in OUTSIDE)
            assert memory.allocated == memory.total - outside and OUTSIDE & set(names)
            assert sizes(memory)["fragmentation"] == int(FRAGMENTATION * memory.allocated)
            assert (
                sizes(memory)["CUDA context"] == CUDA_CONTEXT
                and sizes(memory)["library workspaces"] == WORKSPACES
            )
            assert all(part.note and part.bytes >= 0 for part in memory.parts)


def test_every_group_of_several_ranks_has_a_communicator():
    run = run_of(
        dataclasses.replace(MOE, tie_embeddings=True),
        parallel=ParallelConfig(dp=4, tp=2, pp=4, ep=2, etp=1),
    )
    layout = Plan(run).layout
    first, middle = communicators(run.model, layout, 0), communicators(run.model, layout, 1)
    assert first == [*middle, EMBEDDING] == communicators(run.model, layout, 3)
    small = {"world", "dp_control", "tp_cp_control", "tp_cp_dp_control", "pp_control"}
    assert {group.name for group in middle} == small | {"tp", "pp", "dp_cp", "etp_ep", "edp"}
    parts = run_of(MOE, parallel=ParallelConfig(dp=2, etp=2))
    assert ETP_EP in communicators(parts.model, Plan(parts).layout, 0)  # those that share each
    assert communicators(DENSE, ParallelLayout(1), 0) == [] and "NCCL" not in parts_of(run_of())


def test_inputs_of_all_microbatches():
    for data, most in ((DataConfig(), 0), (DataConfig(document_mask=True), 16)):
        parts = parts_of(run_of(parallel=ParallelConfig(dp=2, cp=2), data=data))
        assert parts["inputs"] == 64 // (2 * 2) * 2 * (3 * 8 * 512 // 2 + 4 * most)


# --- peaks ---


def memory_of(kept: int, forward: int, backward: int, waiting: int = 0) -> MicrobatchMemory:
    return MicrobatchMemory({"attn": kept}, forward, backward, waiting=waiting)


def chunk_of(usual: MicrobatchMemory, spared: MicrobatchMemory | None = None) -> ChunkActivations:
    return ChunkActivations(usual, spared or usual, border=10, deferred=7, kernels=0, captured=0)


def peak_of(
    text: str, *chunks: ChunkActivations, spared: frozenset[MicrobatchChunk] = frozenset()
) -> tuple[str, int, int, int]:
    """The action at the peak, and what is kept, waits and is alive while it runs."""
    peak = find_peak([parse_action(word) for word in text.split()], chunks, spared)
    found = sum(peak.kept.values()), peak.waiting, peak.working
    assert peak.total == sum(found)
    return peak.action, *found


def test_one_rank_holds_one_microbatch():
    chunk = chunk_of(memory_of(100, 30, 50))
    assert peak_of("G0 F0.0 B0.0 F1.0 B1.0 R0", chunk) == ("B0.0", 100, 0, 50)
    assert peak_of("F0.0 B0.0 F1.0 B1.0", chunk_of(memory_of(100, 60, 50)))[0] == "F0.0"
    assert peak_of("F0.0 F1.0 B0.0 B1.0", chunk) == ("B0.0", 200, 0, 50)


def test_a_split_backward_keeps_what_weights_need():
    chunk = chunk_of(memory_of(100, 30, 20, waiting=60))
    assert peak_of("F0.0 I0.0 F1.0 I1.0 W0.0 W1.0", chunk) == ("F1.0", 100, 60, 30)
    small = chunk_of(memory_of(5, 0, 0, waiting=60))
    assert peak_of("F0.0 I0.0 F1.0 I1.0 W0.0 W1.0", small) == ("W0.0", 0, 120, 7)


def test_chunks_of_a_rank_add_up():
    first, last = chunk_of(memory_of(1, 0, 5)), chunk_of(memory_of(2, 90, 0))
    assert peak_of("F0.0 F0.1 B0.1 B0.0", first, last) == ("F0.1", 3, 0, 90)


def test_spared_microbatches_keep_more():
    chunk = chunk_of(memory_of(10, 0, 90), spared=memory_of(100, 0, 5))
    first = frozenset({(0, 0)})
    assert peak_of("F0.0 F1.0 B0.0 B1.0", chunk, spared=first)[1] == 110
    assert peak_of("F0.0 F1.0 B0.0 B1.0", chunk)[1] == 20


@pytest.mark.parametrize(
    ("name", "vpp"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero_bubble_h1", 1)]
)
def test_microbatches_in_flight_are_those_of_the_schedule(name: str, vpp: int):
    run = run_of(
        parallel=ParallelConfig(pp=4, vpp=vpp), schedule=ScheduleConfig(ScheduleName(name))
    )
    memory, one = Plan(run).memory, kept(run, Stage((2,), False, False), pp=4)
    for rank, found in enumerate(memory[1:3], 1):
        flying = {
            "gpipe": 32,
            "1f1b": 4 - rank,
            "zero_bubble_h1": 4 - rank,
            "interleaved": (4 - rank - 1) * 2 + 4 + 1,
        }[name]
        layers = 2 // vpp
        expected = flying * (layers * (one["attn"] + one["mlp"]) + one["rotary"])
        # microbatches in flight and those that wait for their weights add up to pp
        if name == "zero_bubble_h1":
            assert expected <= sizes(found)["activations"] <= 4 / flying * expected
        else:
            assert sizes(found)["activations"] == expected


def test_partial_checkpointing_lies_between_none_and_full():
    parallel = ParallelConfig(pp=4)
    kept_all, *some, full = (
        parts_of(run_of(parallel=parallel, recompute=choice))["activations"]
        for choice in (
            RecomputeConfig(),
            *(RecomputeConfig(True, (), spared) for spared in (3, 2, 1, 0)),
        )
    )
    assert kept_all > some[0] > some[1] > some[2] > full
    assert some[0] - some[1] == some[1] - some[2]
    assert (
        parts_of(run_of(parallel=parallel, recompute=RecomputeConfig(True, (), 4)))["activations"]
        == kept_all
    )


# --- CUDA graphs ---


def graphs(
    *scope: GraphScope, key: GraphKey = GraphKey.microbatch, impl: GraphImpl = GraphImpl.local
) -> CudaGraphConfig:
    return CudaGraphConfig(impl, scope, key=key)


S = GraphScope


@pytest.mark.parametrize("key", list(GraphKey), ids=lambda key: key.value)
@pytest.mark.parametrize(
    "scope", [(S.attn, S.moe_router, S.moe_preprocess), ()], ids=["partial", "layers"]
)
def test_graph_memory_is_independent_of_microbatches(key: GraphKey, scope: tuple[GraphScope, ...]):
    found = []
    for batch in (16, 32, 64):
        run = run_of(MOE, parallel=ParallelConfig(pp=4), cuda_graph=graphs(*scope, key=key),
                     train=TrainConfig(seq_len=512, micro_batch=2, global_batch=batch))  # fmt: skip
        found.append([sizes(rank) for rank in Plan(run).memory])
    for name in ("static inputs", "activations", "working memory"):
        assert len({tuple(rank[name] for rank in ranks) for ranks in found}) == 1
    objects = [[rank["graph objects"] for rank in ranks] for ranks in found]
    if key is GraphKey.slot:
        assert objects[0] == objects[1] == objects[2]
    else:  # the last rank never has more than one microbatch, and so one set
        assert [rank * 2 for rank in objects[0][:3]] == objects[1][:3] and objects[0][3] == objects[
            2
        ][3]


def test_transformer_engine_copies_every_layers_input():
    """Also that of a layer that begins where the one before has ended; nothing else is larger."""
    for key in GraphKey:
        ours, theirs = (
            parts_of(run_of(parallel=ParallelConfig(pp=4), cuda_graph=graphs(key=key, impl=impl)))
            for impl in (GraphImpl.local, GraphImpl.transformer_engine)
        )
        layers, stream, flying = 2, 2 * 1024 * 256, 4
        copied = (layers - 1) * flying * stream
        assert theirs.pop("static inputs") == ours.pop("static inputs") + copied
        assert theirs.pop("fragmentation") > ours.pop("fragmentation")  # a share of the rest
        assert theirs == ours


def test_graphs_of_whole_layers_hold_what_layers_keep():
    run = run_of(parallel=ParallelConfig(pp=4))
    plain, captured = parts_of(run), parts_of(dataclasses.replace(run, cuda_graph=graphs()))
    stream, flying = 2 * 1024 * 256, 4
    # the second layer reads what the first has put out
    assert captured["static inputs"] == flying * stream
    for name in ("activations", "working memory"):
        assert captured[name] == plain[name]


def test_full_iteration_graph_has_all_in_its_pool():
    run = run_of()
    plain, whole = (
        parts_of(run),
        parts_of(dataclasses.replace(run, cuda_graph=graphs(impl=GraphImpl.full_iteration))),
    )
    assert whole["graph pool"] == plain["activations"] + plain["working memory"]
    assert whole["static inputs"] == plain["inputs"] and "inputs" not in whole
    attention = 6  # norm, q k v, heads, core, result, sum
    feed_forward = 5  # norm, gate and up, activation, down, sum
    # lookup, layers; norm, logits, loss
    kernels = 32 * (1 + 8 * (attention + feed_forward) + 2 + 9)
    assert whole["graph objects"] == GRAPH + 4 * kernels * GRAPH_KERNEL
    assert Plan(run).memory[0].allocated == sum(whole.values()) - sum(
        size for name, size in whole.items() if name in OUTSIDE
    )


# --- what falls when something is divided ---


def with_parallel(run: Run, **degrees: Any) -> Run:
    return check(dataclasses.replace(run, parallel=dataclasses.replace(run.parallel, **degrees)))


@pytest.mark.every(3)
@pytest.mark.parametrize(
    "model",
    [DENSE, MOE, dataclasses.replace(DENSE, tie_embeddings=True, num_kv_heads=8, qk_norm=True)],
)
@pytest.mark.parametrize(
    "recompute",
    [RecomputeConfig(), RecomputeConfig(True), RecomputeConfig(phases=(Recompute.norm,))],
)
def test_memory_falls_with_every_degree(model: ModelConfig, recompute: RecomputeConfig):
    run = run_of(model, recompute=recompute)
    for axis, degrees in {"tp": (1, 2, 4, 8), "cp": (1, 2, 4), "dp": (1, 2, 4, 8)}.items():
        found = [allocated(with_parallel(run, **{axis: degree})) for degree in degrees]
        assert all(after < before for before, after in pairwise(found)), axis
    batches = [
        dataclasses.replace(run, train=dataclasses.replace(run.train, micro_batch=size))
        for size in (8, 4, 2, 1)
    ]
    assert all(after < before for before, after in pairwise(map(allocated, batches)))


def test_pipelines_and_expert_parallelism_divide_the_state():
    state = ("parameters", "gradients", "optimizer")
    for axis, degrees in {"pp": (1, 2, 4, 8), "ep": (1, 2, 4, 8)}.items():
        runs = [with_parallel(run_of(MOE), **{axis: degree, "world_size": 8}) for degree in degrees]
        found = [
            max(sum(sizes(rank)[name] for name in state[:2]) for rank in Plan(run).memory)
            for run in runs
        ]
        assert all(after < before for before, after in pairwise(found)), axis
    rows = [
        kept(with_parallel(run_of(MOE), ep=ep, dp=8), Stage((0,), False, False))["experts"]
        for ep in (2, 4, 8)
    ]
    assert rows[0] == rows[1] == rows[2]  # the same rows


def test_recomputing_more_never_keeps_more():
    parts = list(Recompute)
    for model in (DENSE, MOE):
        stage, before = Stage((0,), False, False), None
        for count in range(len(parts) + 1):
            run = run_of(model, recompute=RecomputeConfig(phases=tuple(parts[:count])))
            total = sum(kept(run, stage).values())
            assert before is None or total <= before
            before = total
        full = sum(kept(run_of(model, recompute=RecomputeConfig(True)), stage).values())
        # the layer's input, and the turning angles
        assert full == 2 * 1024 * 256 + 2 * 4 * 1024 * 32 <= before


@pytest.mark.full
def test_equal_layers_and_moments_are_planned_once(monkeypatch: pytest.MonkeyPatch):
    run = run_of(dataclasses.replace(DENSE, num_layers=64), parallel=ParallelConfig(pp=16, vpp=4),
                 train=TrainConfig(seq_len=512, micro_batch=1, global_batch=256))  # fmt: skip
    plan = Plan(run)
    assert sum(map(len, plan.actions)) > 16 * 4000
    calls = Counter[str]()

    def counted(module: Any, name: str) -> None:
        function = getattr(module, name)

        def call(*values: Any) -> Any:
            calls[name] += 1
            return function(*values)

        monkeypatch.setattr(module, name, call)

    counted(activations, "trace_memory")
    counted(activations, "_working")
    ranks = plan_memory(
        run,
        plan.layout,
        plan.stages,
        buffers=plan.buffers,
        actions=plan.actions,
        graphs=plan.graphs,
    )
    assert len(tuple(ranks)) == 16
    # one layer for all; about 300 moments of a rank for its 2,048 passes
    assert calls["trace_memory"] <= 8 and calls["_working"] < 16 * 1000


def test_the_compute_list_alone_holds_as_much():
    run = run_of(parallel=ParallelConfig(pp=4))
    plan, computes = Plan(run), build_schedule("1f1b", 4, 32)
    alone = plan_memory(
        run,
        plan.layout,
        plan.stages,
        buffers=plan.buffers,
        actions=computes,
        graphs=plan.graphs,
    )
    assert tuple(alone) == plan.memory
