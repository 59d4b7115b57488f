"""`optim.pair_expert_grads`: expert gradients of two microbatches by one GEMM.

Without the kernel each is added by itself, in the same order as without pairs, so that results are
bit-identical to training without.
"""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from app.choices import (
    DispatcherKind,
    Dtype,
    GraphImpl,
    GraphScope,
    Recompute,
    ScheduleName,
)
from app.config import (
    CudaGraphConfig,
    OptimConfig,
    ParallelConfig,
    PrecisionConfig,
    RecomputeConfig,
    Run,
    ScheduleConfig,
    TrainConfig,
)
from app.config.model import EchoConfig, StaticConfig
from app.engine.step.step import TrainingStep
from app.errors import ConfigError
from app.model.layers.weight_grads import GroupedLinearGrad, PairedGrad
from app.optim.grad_buckets import GradBuckets
from app.planner.plan import Plan
from app.rules import check
from tests.cases import chosen
from tests.distributed import run_distributed
from tests.processes.captured import FOUR
from tests.runs import batches_of, engine_of, make_run

STEPS = 4
BF16 = PrecisionConfig(Dtype.bfloat16)
STATIC = dataclasses.replace(
    FOUR, moe=dataclasses.replace(FOUR.moe, dispatcher=DispatcherKind.static)
)
WHOLE = CudaGraphConfig(GraphImpl.full_iteration, warmup_steps=2)
PP2, EP2 = ParallelConfig(pp=2), ParallelConfig(ep=2, dp=2)
CASES: dict[str, dict[str, Any]] = {
    "one rank": {},
    "one rank, full iteration": {"cuda_graph": WHOLE},
    "one rank, reduced behind": {"optim": OptimConfig(lr=1e-2, overlap_grads=False)},
    "ep2": {"parallel": EP2},
    "ep2, static, full iteration": {"model": STATIC, "parallel": EP2, "cuda_graph": WHOLE},
    "ep2, partial": {
        "parallel": EP2,
        "cuda_graph": CudaGraphConfig(
            GraphImpl.local, (GraphScope.attn, GraphScope.moe_router), warmup_steps=2
        ),
    },
    # graphs that also hold the ends of experts' rows, which gradients that wait need
    "one rank, partial with ends": {
        "cuda_graph": CudaGraphConfig(
            GraphImpl.local,
            (GraphScope.attn, GraphScope.moe_router, GraphScope.moe_preprocess),
            warmup_steps=2,
        ),
    },
    "pp2": {"parallel": PP2},
    "pp2 vpp2": {"parallel": dataclasses.replace(PP2, vpp=2)},
    "zero bubble": {"parallel": PP2, "schedule": ScheduleConfig(ScheduleName.zero_bubble_h1)},
    "zero bubble, full iteration": {
        "parallel": PP2,
        "schedule": ScheduleConfig(ScheduleName.zero_bubble_h1),
        "cuda_graph": WHOLE,
    },
    "recomputed": {"recompute": RecomputeConfig(phases=(Recompute.experts_act,))},
}


def run_of(case: str, count: int, pairs: bool) -> Run:
    given = dict(CASES[case])
    optim = dataclasses.replace(given.pop("optim", OptimConfig(lr=1e-2)), pair_expert_grads=pairs)
    replicas = given.get("parallel", ParallelConfig()).dp or 1
    train = TrainConfig(steps=20, seq_len=16, micro_batch=2, global_batch=2 * count * replicas)
    model = given.pop("model", FOUR)
    return make_run(model, optim=optim, train=train, precision=BF16, **given)


def trained(rank: int, run: Run) -> dict[str, Any]:
    """Return metrics of steps; for each, the pairs added and the unpaired expert gradients.

    Unpaired ones are counted by whether they were held back.
    """
    engine = engine_of(run, rank)
    step, seen = TrainingStep(engine), []
    added: list[list[int]] = []
    pair, alone, hold = PairedGrad.add_to, GroupedLinearGrad.add_to, GradBuckets.add
    pair_first = PairedGrad.write_to

    def of_two(gradient: PairedGrad, total: Tensor) -> None:
        added[-1][0] += 1
        pair(gradient, total)

    def first_of_two(gradient: PairedGrad, total: Tensor) -> None:
        added[-1][0] += 1
        pair_first(gradient, total)

    def of_one(
        gradient: GroupedLinearGrad,
        total: Tensor,
        later: GroupedLinearGrad | None = None,
        writes: bool = False,
    ) -> None:
        added[-1][1] += 1
        alone(gradient, total, later, writes)

    def told(buckets: GradBuckets, *given: Any) -> None:
        hold(buckets, *given)
        added[-1][2] = max(added[-1][2], len(buckets._held))

    with (
        mock.patch.object(PairedGrad, "add_to", of_two),
        mock.patch.object(PairedGrad, "write_to", first_of_two),
        mock.patch.object(GroupedLinearGrad, "add_to", of_one),
        mock.patch.object(GradBuckets, "add", told),
    ):
        for n in range(STEPS):
            added.append([0, 0, 0])
            facts, _ = step(batches_of(run, n, engine.groups.dp_rank), 1e-2, 0.1)
            seen.append((facts.loss, facts.norm_sq))
            assert not any(each._held for of in engine.optimizer.grad_buckets for each in of)
    state = [
        value.numpy().tobytes()
        for owned in engine.optimizer.param_shards()
        for value in owned.state.values()
    ]
    every = [buckets for of in engine.optimizer.grad_buckets for buckets in of]
    weights = sum(spec.expert for buckets in every for spec in buckets.buffer.specs)
    engine.release()
    return {"seen": seen, "state": state, "added": added, "weights": weights}


def both(rank: int, runs: list[Run]) -> list[dict[str, Any]]:
    return [trained(rank, run) for run in runs]


QUICK = [
    ("one rank", 3),
    ("one rank, partial with ends", 4),
    ("ep2, static, full iteration", 4),
    ("zero bubble, full iteration", 4),
]


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("case", "count"),
    chosen(
        # interleaved stages take whole groups of two microbatches
        [(case, count) for case in CASES for count in (3, 4) if count == 4 or "vpp2" not in case],
        QUICK,
    ),
)
def test_pairs_change_no_bit_where_each_is_added_by_itself(case: str, count: int):
    runs = [run_of(case, count, pairs) for pairs in (False, True)]
    for plain, paired in run_distributed(both, runs[0].world_size, runs):
        assert paired["seen"] == plain["seen"] and paired["state"] == plain["state"]
        weights = paired["weights"]
        assert weights > 0
        assert plain["added"] == [[0, count * weights, 0]] * STEPS
        pairs, rest = divmod(count, 2)
        assert [each[:2] for each in paired["added"]] == [
            [pairs * weights, (2 * pairs + rest) * weights]
        ] * STEPS
        # of every chunk, as those of one microbatch
        assert all(0 < held <= weights for *_, held in paired["added"])


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "dense": ({"model": dataclasses.replace(FOUR, moe=None)}, "applies to experts"),
    "one microbatch": (
        {"train": TrainConfig(seq_len=16, micro_batch=2, global_batch=2)},
        "needs two microbatches per step, and there is one",
    ),
    "sums of as few bits": ({"precision": PrecisionConfig()}, "more bits than .* float32"),
    "graphs of experts": (
        {"cuda_graph": CudaGraphConfig(GraphImpl.local)},
        "partial graphs overwrite.* cuda_graph=full_iteration",
    ),
    "paged_buffer": (
        {
            "model": dataclasses.replace(
                STATIC, moe=dataclasses.replace(STATIC.moe, static=StaticConfig(paged_buffer=1.1))
            )
        },
        r"paged_buffer has pages for.* model\.moe\.static\.paged_buffer=null",
    ),
    "clones": (
        {
            "model": dataclasses.replace(
                STATIC, moe=dataclasses.replace(STATIC.moe, echo=EchoConfig(spares=1))
            ),
            "parallel": EP2,
        },
        r"delay the gradients of clones.* model\.moe\.echo\.spares=0",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str):
    given, message = REFUSED[case]
    sections = {"precision": BF16} | given
    run = make_run(sections.pop("model", FOUR), **sections)
    optim = dataclasses.replace(run.optim, pair_expert_grads=True)
    with pytest.raises(ConfigError, match=rf"optim\.pair_expert_grads=true: .*{message}"):
        check(dataclasses.replace(run, optim=optim))


def test_the_plan_counts_what_waits():
    """Return bytes per MoE layer: inputs and output gradients of K rows per token, twice."""
    run = run_of("one rank", 4, pairs=True)
    tokens = run.train.micro_batch * run.train.seq_len
    moe = run.model.moe
    rows = tokens * moe.top_k
    layer = rows * 2 * (2 * run.model.hidden_size + 3 * moe.ffn_hidden_size)
    layers = sum(map(run.model.is_moe_layer, range(run.model.num_layers)))
    plain, paired = (
        {part.name: part.bytes for part in Plan(run_of("one rank", 4, pairs)).memory[0].parts}
        for pairs in (False, True)
    )
    assert paired.pop("held gradients") == layers * layer
    assert paired.keys() == plain.keys()
    assert all(paired[name] == plain[name] for name in plain if name != "fragmentation")


def test_paired_gradients_equal_both_sums():
    rows_TI, grad_TO = torch.randn(5, 4), torch.randn(5, 8)
    ends_E = torch.tensor([2, 5], dtype=torch.int32)
    one = GroupedLinearGrad(rows_TI, grad_TO, ends_E)
    other = GroupedLinearGrad(2 * rows_TI, grad_TO, ends_E)
    torch.testing.assert_close(PairedGrad(one, other)(), 3 * one())
