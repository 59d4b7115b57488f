"""Needs of dispatchers, by hand; they come from their records alone."""

from __future__ import annotations

import dataclasses
from itertools import product
from pathlib import Path

import pytest

from app.choices import DispatcherKind, GraphImpl, Recompute, StaticCapacity, StaticTransport
from app.config import (
    CudaGraphConfig,
    ModelConfig,
    MoEConfig,
    ParallelConfig,
    RecomputeConfig,
    Run,
    TrainConfig,
)
from app.config.experts import StaticConfig
from app.errors import ConfigError
from app.plan.groups import ETP_EP, Way
from app.plan.layout import select_layout
from app.plan.parts.dispatch_record import RowCounts, TokenExchange, Tokens
from app.plan.parts.dispatcher import DISPATCHERS, kinds_between_ranks, planned_dispatcher
from app.plan.parts.paged_buffer import planned_paged_buffer, with_paged_buffer
from app.plan.parts.stage import sizes_of
from app.plan.parts.trace import Trace
from app.planner.plan import Plan
from app.planner.summary import summary_lines
from app.rules import check
from tests.cases import each
from tests.config import load

ROOT = Path(__file__).parents[2]
EXPERTS = MoEConfig(num_experts=8, top_k=2, ffn_hidden_size=32, planned_imbalance=1.5)
PADDED = dataclasses.replace(EXPERTS, capacity_factor=1.25, pad_to_capacity=True)
DROPS = dataclasses.replace(EXPERTS, capacity_factor=0.5)
ALL = list(DispatcherKind)


def of(moe: MoEConfig, kind: DispatcherKind) -> MoEConfig:
    return dataclasses.replace(moe, dispatcher=kind)


def run_of(moe: MoEConfig, world: int, ep: int, graph: GraphImpl = GraphImpl.none) -> Run:
    return Run(
        model=ModelConfig(num_layers=2, hidden_size=64, moe=moe),
        train=TrainConfig(seq_len=64, micro_batch=1, global_batch=2 * world),
        parallel=ParallelConfig(dp=world, ep=ep, world_size=world),
        cuda_graph=CudaGraphConfig(impl=graph),
    )


def test_auto_and_a_single_rank():
    on_one = {planned_dispatcher(of(EXPERTS, kind), 1, 1).kind for kind in ALL}
    assert on_one == {DispatcherKind.local}
    on_four = [planned_dispatcher(of(EXPERTS, kind), 2, 2) for kind in ALL]
    assert [each.kind.value for each in on_four] == [
        *("all_to_all", "local", "all_to_all", "all_gather", "static"),
    ]
    assert [each.legal for each in on_four] == [True, False, True, True, True]
    assert kinds_between_ranks() == ("auto", "all_to_all", "all_gather", "static")


def test_every_kind_has_a_record():
    assert {*DISPATCHERS, DispatcherKind.auto} == set(DispatcherKind)


@pytest.mark.parametrize("kind", [DispatcherKind.all_to_all, DispatcherKind.all_gather])
def test_one_rank_plans_what_it_runs(kind: DispatcherKind):
    """The engine has experts on one rank by a permutation, whatever is asked for."""
    asked, chosen = (Plan(run_of(of(EXPERTS, each), 1, 1)) for each in (kind, DispatcherKind.auto))
    assert asked.memory == chosen.memory and asked.traffic == chosen.traffic


@each(product((EXPERTS, DROPS, PADDED), (1, 4), ALL))
def test_what_waits_for_the_host_cannot_be_captured(moe: MoEConfig, ep: int, kind: DispatcherKind):
    static = kind is DispatcherKind.static
    if static and moe.pad_to_capacity:
        with pytest.raises(ConfigError, match="has static sizes anyway"):
            of(moe, kind)
        return
    dispatcher = planned_dispatcher(of(moe, kind), ep, 1)
    waits = ep > 1 and not moe.pad_to_capacity and kind is not DispatcherKind.local and not static
    assert dispatcher.waits_for_host == waits
    run = run_of(of(moe, kind), 4, ep, graph=GraphImpl.full_iteration)
    if dispatcher.legal and not waits:
        check(run)
        return
    with pytest.raises(ConfigError, match=r"host waits" if waits else "tokens between ranks"):
        check(run)


def test_rows_by_hand():
    """64 tokens of 2 experts each; 4 shares of the experts in 2 parts; capacity 64·2/8·1.25 = 20
    or 8 rows per expert.
    """

    def rows(moe: MoEConfig, kind: DispatcherKind, ep: int = 4, etp: int = 2) -> RowCounts:
        return planned_dispatcher(of(moe, kind), ep, etp).rows(64)

    sends, gathers = DispatcherKind.all_to_all, DispatcherKind.all_gather
    assert rows(EXPERTS, sends) == RowCounts(256, sent=256, computed=384)
    assert rows(DROPS, sends) == RowCounts(256, sent=128, computed=128)
    assert rows(PADDED, sends) == RowCounts(256, sent=320, computed=320)
    assert rows(EXPERTS, gathers) == RowCounts(8 * 128, sent=384, computed=384)
    assert rows(PADDED, gathers) == RowCounts(8 * 128, sent=320, computed=320)
    static = DispatcherKind.static
    # 8 ranks' tokens, each for the two experts of a share at most, and as many as a capacity lets
    assert rows(EXPERTS, static) == RowCounts(8 * 128, sent=1024, computed=1024)
    assert rows(DROPS, static) == RowCounts(8 * 128, sent=128, computed=128)
    # twice the mean of 256, rounded up to 128; never more than all there can be
    for factor, found in ((2.0, 512), (2.1, 640), (9.0, 1024)):
        options = StaticConfig(capacity=StaticCapacity.factor, factor=factor)
        limited = dataclasses.replace(EXPERTS, static=options)
        assert rows(limited, static) == RowCounts(8 * 128, sent=found, computed=found)
    assert rows(EXPERTS, sends, 1, 1) == RowCounts(128, sent=128, computed=128)
    # nobody waits to learn how many are left
    assert rows(DROPS, sends, 1, 1) == RowCounts(128, sent=128, computed=128)
    assert rows(PADDED, sends, 1, 1) == RowCounts(128, sent=160, computed=160)


def test_static_rows_are_told_when_a_run_starts():
    """64 tokens of 2 experts on each of 4 ranks; rows are multiples of 128."""

    def told(**options: object) -> str | None:
        moe = dataclasses.replace(EXPERTS, static=StaticConfig(**options))
        run = run_of(of(moe, DispatcherKind.static), 4, 4)
        return dict(summary_lines(Plan(run))).get("dispatch")

    of_rows = "memory for 512 rows of experts per rank, all that tokens can ask for"
    assert told() == f"static, between GPUs through each other's memory; {of_rows}"
    assert told(transport=StaticTransport.collective) == f"static, by collectives; {of_rows}"
    limited = told(capacity=StaticCapacity.factor, factor=1.5)
    few = "256 rows of experts per rank, 2.00 times the mean; a step that needs more is rerun"
    assert limited == f"static, between GPUs through each other's memory; memory for {few}"
    assert "dispatch" not in dict(summary_lines(Plan(run_of(EXPERTS, 4, 4))))


def test_a_capacity_is_a_bound_and_padding_reaches_it():
    """64 tokens of 2 experts each, of 8: no expert has more than one row of a token."""

    def bounds(factor: float | None, padded: bool = False) -> tuple[int | None, int | None]:
        moe = dataclasses.replace(EXPERTS, capacity_factor=factor, pad_to_capacity=padded)
        planned = planned_dispatcher(moe, 1, 1)
        return planned.most_per_expert(64), planned.rows_per_expert(64)

    assert bounds(None) == (None, None)
    assert bounds(1.25) == (20, None) and bounds(1.25, padded=True) == (20, 20)
    assert bounds(9.0) == (64, None) and bounds(9.0, padded=True) == (64, 64)


def test_what_runs_between_ranks_is_said_by_the_record(monkeypatch: pytest.MonkeyPatch):
    def words(kind: DispatcherKind) -> list[str]:
        traffic = Plan(run_of(of(EXPERTS, kind), 4, 4)).traffic
        return [each.collectives for each in traffic if each.name == ETP_EP.name]

    for kind in (DispatcherKind.all_to_all, DispatcherKind.all_gather):
        exchange = DISPATCHERS[kind].exchange
        assert exchange is not None and words(kind) == [exchange.collectives]
        other = TokenExchange("writes to peers", Way.neighbours)
        monkeypatch.setattr(DISPATCHERS[kind], "exchange", other)
        assert words(kind) == [other.collectives]


def test_bytes_on_the_wire_by_hand():
    """64 tokens × 16 wide in bf16 are 2048 bytes; on 4 ranks."""

    def sent(kind: DispatcherKind, ep: int) -> tuple[int, int]:
        """Bytes to other ranks, forward and backward."""
        run = run_of(of(EXPERTS, kind), ep, ep)
        t, tokens = Trace(sizes_of(run, select_layout(run))), Tokens(64, 16, 2)
        dispatcher = planned_dispatcher(of(EXPERTS, kind), ep, 1)
        dispatcher.preprocess(t, tokens)
        dispatcher.dispatch(t, tokens)
        dispatcher.combine(t, tokens, saved=True)
        sends = [op.sends for op in t.ops if op.sends]
        return sum(each.forward for each in sends), sum(each.backward for each in sends)

    assert sent(DispatcherKind.auto, 1) == (0, 0)
    rows = 2 * 2048 * 3 // 2  # of two experts, at a load of 1.5
    assert sent(DispatcherKind.all_to_all, 4) == (2 * rows * 3 // 4, 2 * rows * 3 // 4)
    # the tokens, their sums in fp32, and an id and a probability per choice
    assert sent(DispatcherKind.all_gather, 4) == (
        3 * (2048 + 2 * 2048 + 128 * (8 + 4)),
        3 * (2048 + 2 * 2048 + 128 * 4),
    )
    # the tokens and their sums, and an id and a probability per choice; the probability again, and
    # its gradient
    assert sent(DispatcherKind.static, 4) == (
        3 * (2048 + 2048 + 128 * (2 + 4)),
        3 * (2048 + 2048 + 128 * (4 + 4)),
    )


def test_nothing_else_asks_which_dispatcher_it_is():
    """A dispatcher is added in five files; `app.plan.parts.dispatch_record` lists them."""
    asks = {
        str(path.relative_to(ROOT / "app"))
        for path in (ROOT / "app").rglob("*.py")
        if "DispatcherKind" in path.read_text() or "moe.dispatcher" in path.read_text()
    }
    records = {f"plan/parts/{name}.py" for name in ("dispatch_record", "dispatcher")}
    records |= {f"plan/parts/{kind.value}.py" for kind in DISPATCHERS}
    others = {"choices.py", "config/experts.py"}
    keys = {  # in messages, and in overrides to type
        "advice/combinations.py",
        "advice/layouts.py",
        "engine/start/in_effect.py",
        "engine/start/resume.py",
        "engine/decoding/captured.py",
        "rules/layout.py",
        "rules/graphs.py",
    }
    assert asks - records - keys == others


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (("model.moe.static.transport=peer", "parallel.gpus_per_node=2"), "transport"),
        (("model.moe.static.transport=peer", "train.device=cpu"), "transport"),
        (("model.moe.static.factor=2",), "factor"),
        (("model.moe.dispatcher=auto", "model.moe.static.capacity=factor"), "capacity"),
    ],
    ids=str,
)
def test_options_of_static_dispatch_have_an_effect(overrides: tuple[str, ...], key: str):
    static = ("model=moe_tiny", "parallel.dp=4", "parallel.ep=4", "train.global_batch=32")
    static = (*static, "model.moe.dispatcher=static")
    load(*static)
    with pytest.raises(ConfigError, match=rf"model\.moe\.static\.{key}"):
        load(*static, *overrides)


def test_rerun_memory_grows_with_exceeded_capacity():
    """It needs more rows than there is memory for, whatever imbalance is planned."""

    def again(factor: float) -> int:
        options = StaticConfig(capacity=StaticCapacity.factor, factor=factor)
        wide = dataclasses.replace(EXPERTS, ffn_hidden_size=2048, static=options)
        run = run_of(of(wide, DispatcherKind.static), 4, 4, graph=GraphImpl.full_iteration)
        longer = dataclasses.replace(run.train, seq_len=1024)
        plan = Plan(dataclasses.replace(run, train=longer))
        return sum(part.bytes for part in plan.busiest.parts if part.name == "rerun steps")

    assert 0 < again(1.5) < again(2.0) < again(3.0)
    assert again(8.0) == 0, "more than all tokens can ask for"


@pytest.mark.parametrize(
    ("recompute", "row"),
    [
        (RecomputeConfig(), 2 * 64 + 3 * 32),
        (RecomputeConfig(phases=(Recompute.experts_act,)), 2 * 64 + 2 * 32),
        (RecomputeConfig(phases=(Recompute.moe,)), 0),
        (RecomputeConfig(full=True), 0),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else None,
)
def test_pages_are_for_what_is_kept_at_once(recompute: RecomputeConfig, row: int):
    """1F1B has as many microbatches in flight as stages are left, with two layers each."""
    moe = dataclasses.replace(
        of(EXPERTS, DispatcherKind.static), static=StaticConfig(paged_buffer=1.1)
    )
    parallel = ParallelConfig(pp=4, dp=2, ep=2)
    run = Run(
        model=ModelConfig(num_layers=8, hidden_size=64, moe=moe),
        train=TrainConfig(seq_len=8192, micro_batch=1, global_batch=16),
        parallel=parallel,
        recompute=recompute,
    )
    plan = Plan(run)
    again = Plan(with_paged_buffer(run, None))
    mean = 2 * 8192
    page = mean * 32 * 4 // 32  # of the smallest tensor, a 32nd
    for rank, in_flight in enumerate((4, 3, 2, 1)):
        paged_buffer = planned_paged_buffer(run, plan.stages.stages[rank], plan.actions[rank])
        wanted = 1.1 * mean * 4 * row * 2 * in_flight / paged_buffer.page
        assert (
            paged_buffer.page == page
            and max(1, wanted) <= paged_buffer.pages < wanted + 9 * in_flight
        )
        parts = {part.name: part.bytes for part in plan.memory[rank].parts}
        without = {part.name: part.bytes for part in again.memory[rank].parts}
        assert (
            parts["paged_buffer"] == (paged_buffer.pages + 1) * (paged_buffer.page + 4)
            and "paged_buffer" not in without
        )
        gone = without["activations"] - parts["activations"]
        # two ranks could be asked for twice the mean
        assert gone == pytest.approx(2 * mean * 4 * row * 2 * in_flight, rel=1e-3)
