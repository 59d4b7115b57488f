"""Rules on layouts: what cannot run is refused with the pair that clashes and what would work,
which is then accepted.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from typing import Any

import pytest

from app.choices import CpComm, DispatcherKind, Dtype, GraphImpl
from app.config import (
    CudaGraphConfig,
    ModelConfig,
    MoEConfig,
    ParallelConfig,
    PrecisionConfig,
    Run,
    TrainConfig,
)
from app.errors import ConfigError
from app.plan.cost.traffic import parts_side_by_side
from app.plan.layout import ParallelLayout, select_layout
from app.plan.memory.activations import chunk_activations
from app.plan.select import select_stages
from app.planner.plan import Plan
from app.rules import check

DENSE = ModelConfig(
    num_layers=2, hidden_size=64, ffn_hidden_size=96, num_heads=8, num_kv_heads=4, vocab_size=96
)
EXPERTS = MoEConfig(num_experts=8, top_k=2, ffn_hidden_size=48, shared_ffn_hidden_size=32)
MOE = dataclasses.replace(DENSE, moe=EXPERTS)


def run_of(
    model: ModelConfig, seq_len: int = 48, graph: GraphImpl = GraphImpl.none, **parallel: Any
) -> Run:
    degrees = ParallelConfig(**parallel)
    train = TrainConfig(seq_len=seq_len, micro_batch=1, global_batch=24)
    return Run(
        model,
        degrees,
        train=train,
        precision=PrecisionConfig(Dtype.bfloat16),
        cuda_graph=CudaGraphConfig(graph),
    )


def local(model: ModelConfig) -> ModelConfig:
    return dataclasses.replace(
        model, moe=dataclasses.replace(EXPERTS, dispatcher=DispatcherKind.local)
    )


TRADES = {"cp_comm_type": CpComm.all_to_all}
REFUSED = [
    (DENSE, {"tp": 8}, r"parallel.tp=8: must divide model.num_kv_heads=4; .*4"),
    (
        DENSE,
        {"cp": 8, **TRADES, "seq_len": 64},
        r"all_to_all: .*parallel.cp=8 .*num_kv_heads=4; .*all_gather or parallel.cp=4",
    ),
    (
        DENSE,
        {"tp": 2, "cp": 4, **TRADES, "seq_len": 64},
        r"num_kv_heads=4 over parallel.tp=2; .*parallel.cp=2",
    ),
    (DENSE, {"cp": 3, **TRADES}, r"parallel.cp=3 .*parallel.cp=2 or parallel.cp=4"),
    (
        DENSE,
        {"cp": 4, "tp": 4},
        r"train.seq_len=48: must be a multiple of 2·cp × tp = 32; .*32 or 64",
    ),
    (
        MOE,
        {"tp": 2, "ep": 4, "dp": 2},
        r"parallel.ep=4: must divide the world size 4 over etp=2; .*2 or parallel.etp=1 or",
    ),
    (MOE, {"ep": 2, "etp": 3, "dp": 4}, r"parallel.etp=3: must divide the 4 ranks"),
    (local(MOE), {"tp": 2}, r"model.moe.dispatcher=local: parallel.etp=2 sends tokens"),
    (
        local(MOE),
        {"ep": 2, "dp": 2},
        r"model.moe.dispatcher=local: parallel.ep=2 sends tokens",
    ),
    (
        MOE,
        {"etp": 4, "dp": 4, "ep": 1},
        r"model.moe.ffn_hidden_size=48: experts in bfloat16 need a multiple of 32",
    ),
    (
        MOE,
        {"ep": 2, "etp": 2, "dp": 4, "order": "ep-tp-dp"},
        r"parallel.order=ep-tp-dp: .*parallel.etp=2.*parallel.ep=2",
    ),
    (
        MOE,
        {"etp": 2, "dp": 2, "graph": GraphImpl.full_iteration},
        r"the host waits with ep=1 and etp=2",
    ),
]


@pytest.mark.parametrize(
    ("model", "chosen", "told"), REFUSED, ids=[told[:60] for *_, told in REFUSED]
)
def test_the_pair_that_clashes_is_named(model: ModelConfig, chosen: dict[str, Any], told: str):
    with pytest.raises(ConfigError) as refused:
        check(run_of(model, **chosen))
    assert re.search(told, str(refused.value)), refused.value


@pytest.mark.parametrize(
    "order",
    ["tp-cp-ep-dp-pp", "ep-tp-cp-dp-pp", "dp-ep-tp-cp-pp", "tp-ep-dp-pp-cp", "ep-dp-pp-tp-cp"],
    ids=str,
)
@pytest.mark.parametrize(("ep", "etp"), [(2, 2), (4, 1), (1, 2)])
def test_parts_of_an_expert_are_side_by_side(order: str, ep: int, etp: int):
    """In the group of all experts, rank ep_rank · etp + etp_rank has that part of that share."""
    layout = ParallelLayout(8, tp=2, ep=ep, etp=etp, order=order)
    groups = layout.groups("etp", "ep", expert=True)
    coords = [[layout.coords(rank, expert=True) for rank in sorted(group)] for group in groups]
    found = all(
        c["ep"] * etp + c["etp"] == place for group in coords for place, c in enumerate(group)
    )
    assert parts_side_by_side(layout, order.split("-")) == found


@pytest.mark.full
def test_all_that_the_rules_let_through_divides():
    """Every tensor of a rank has a whole number of rows, heads, tokens and experts, and the plan
    of it adds up.
    """
    degrees = itertools.product(
        (1, 2, 3, 4), (1, 2, 3, 4), (1, 2, 4), (None, 1, 2, 3), CpComm, (DENSE, MOE)
    )
    taken = 0
    for tp, cp, ep, etp, comm, model in degrees:
        try:
            run = check(run_of(model, tp=tp, cp=cp, ep=ep, etp=etp, cp_comm_type=comm, dp=2))
        except ConfigError:
            continue
        taken += 1
        layout, stage = select_layout(run), select_stages(run).stages[0][0]
        heads = cp if comm is CpComm.all_to_all else 1
        for size, parts in (
            (model.num_heads, tp * heads), (model.num_kv_heads, tp * heads), (model.vocab_size, tp),
            (run.train.seq_len, cp * tp), (run.train.seq_len, 2 * cp if cp > 1 else 1),
        ):  # fmt: skip
            assert size % parts == 0
        assert (
            chunk_activations(run, stage, layout).usual.total > 0 and Plan(run).traffic is not None
        )
        if model.moe:
            assert run.world_size % (layout.ep * layout.expert_tp) == 0
            assert 2 * EXPERTS.ffn_hidden_size // layout.expert_tp % 16 == 0  # bytes of a row
    assert taken > 40
