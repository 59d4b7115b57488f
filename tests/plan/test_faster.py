"""Suggestions for runs that fit: each, typed and planned again, is as much faster as it says."""

from __future__ import annotations

import dataclasses
from itertools import product

import pytest

from app.advice.even_stages import even_layout
from app.advice.faster import GAIN, faster, larger_microbatch
from app.advice.moves import with_values
from app.advice.shapes import Shape, micro_batches
from app.advice.trials import Trials
from app.cli.plan import main
from app.plan.stages import plan_stages
from app.planner.plan import Plan
from tests.config import load

H200 = ("+experiment=small", "hardware=h200", "train.micro_batch=1")
LLAMA = (*H200, "model=llama3_8b", "model.num_layers=8", "cuda_graph=full_iteration")
QWEN = (
    *H200,
    "model=qwen3_30b_a3b",
    "model.num_layers=6",
    "parallel.dp=2",
    "parallel.ep=2",
)


SIZES = {
    "dense": (LLAMA, (1, 2)),
    "short sequences": ((*LLAMA, "train.seq_len=1024"), (1, 2, 4, 8)),
    "experts over two": ((*QWEN, "train.global_batch=16"), (1, 2, 4)),
    "experts over eight": (
        (*QWEN, "parallel.dp=8", "parallel.ep=8", "train.global_batch=64"),
        (1, 2),
    ),
    "experts": ((*H200, "model=smallmoe"), (1, 2, 4, 8)),
}


@pytest.mark.parametrize("case", SIZES)
def test_microbatches_grow_until_experts_have_enough_rows(case: str):
    """The search and the suggestions try the same sizes."""
    typed, sizes = SIZES[case]
    run = load(*typed)
    assert tuple(micro_batches(run, Shape.of(run))) == sizes
    larger = [with_values(run, {"train.micro_batch": size}) for size in sizes]
    assert [bool([*larger_microbatch(each)]) for each in larger] == [
        size < sizes[-1] for size in sizes
    ]


def test_larger_microbatches_of_experts_are_suggested():
    """Beyond 8,192 tokens, from which on a dense model gains little."""
    experts = (*QWEN, "cuda_graph=full_iteration", "model.moe.dispatcher=static")
    for typed, suggested in ((experts, True), (LLAMA, False)):
        run = load(*typed, "train.micro_batch=2", "train.global_batch=16")
        words = [word for each in faster(Plan(run)) for word in each.overrides]
        assert ("train.micro_batch=4" in words) == suggested


@pytest.mark.every(9)
@pytest.mark.parametrize(
    "typed",
    [
        (*LLAMA, "parallel.pp=2", "parallel.vpp=2"),
        (*LLAMA, "parallel.pp=2", "schedule=1f1b", "train.global_batch=64"),
        (*LLAMA, "parallel.tp=4", "recompute=full"),
        (*LLAMA, "recompute.offload=[layers]"),
        (*H200, "cuda_graph=none"),
        (*H200, "cuda_graph=none", "precision.fp8.recipe=current"),
        QWEN,
        (*QWEN, "parallel.pp=2", "recompute=selective"),
    ],
    ids=["interleaved", "1f1b", "tensor", "offload", "eager", "FP8", "experts", "everything"],
)
def test_suggestions_hold_when_typed(typed: tuple[str, ...]):
    plan = Plan(load(*typed))
    found = faster(plan)
    assert found or "cuda_graph=none" in typed
    for suggestion in found:
        again = Plan(load(*typed, *suggestion.overrides))
        assert again.fits and again.busiest.total == suggestion.memory
        assert again.run.world_size == plan.run.world_size
        assert again.step_seconds / plan.step_seconds == pytest.approx(
            suggestion.slowdown, rel=0.01
        )
        assert suggestion.slowdown < GAIN
    slowdowns = [suggestion.slowdown for suggestion in found]
    assert slowdowns == sorted(slowdowns)


def test_nothing_waits_in_host_memory_where_copies_take_longer():
    found = faster(Plan(load(*LLAMA, "recompute.offload=[layers]")))
    assert ("recompute.offload=[]",) in [suggestion.overrides for suggestion in found]


@pytest.mark.full
def test_none_without_a_profile_or_for_what_does_not_fit():
    typed = (*LLAMA, "parallel.pp=2", "parallel.vpp=2")
    assert faster(Plan(load(*typed)))
    assert faster(Plan(load(*typed, "hardware=auto"))) == ()
    assert faster(Plan(load(*typed, "hardware.gpu_memory_gib=4"))) == ()


@pytest.mark.full
def test_a_faster_kernel_with_a_fixed_order():
    ordered = (*LLAMA, "train.deterministic=true", "train.attention_backend=torch")
    by_library = "train.attention_backend=transformer_engine"
    (best, *_) = faster(Plan(load(*ordered)))
    assert by_library in best.overrides and "Transformer Engine" in best.cost
    refused = (*ordered, "data.document_mask=true"), (*ordered, "train.device=cpu")
    for without in (LLAMA, (*ordered, by_library), *refused):
        found = faster(Plan(load(*without)))
        assert not any(by_library in each.overrides for each in found)


@pytest.mark.full
def test_other_recipes_and_none_where_fp8_are_slower():
    eager = (*H200, "cuda_graph=none", "train.seq_len=1024")
    in_fp8 = (
        "precision.fp8.recipe=delayed",
        "precision.fp8.margin=1",
        "precision.fp8.first_layers=2",
    )
    found = {each.overrides: each for each in faster(Plan(load(*eager, *in_fp8)))}
    without = found[
        "precision.fp8.first_layers=0", "precision.fp8.margin=0", "precision.fp8.recipe=null"
    ]
    seconds = [Plan(load(*eager, *given)).step_seconds for given in ((), in_fp8)]
    assert without.slowdown == pytest.approx(seconds[0] / seconds[1], rel=0.01)
    (best, *_) = faster(Plan(load(*LLAMA, "precision.fp8.recipe=block")))
    assert "precision.fp8.recipe=delayed" in best.overrides
    for typed in (eager, (*LLAMA, "precision.fp8.recipe=delayed"), LLAMA):
        assert not any("fp8" in str(each.overrides) for each in faster(Plan(load(*typed))))


@pytest.mark.cover(1)
@pytest.mark.parametrize("pp", [1, 2, 4])
@pytest.mark.parametrize("count", [8, 33, 64])
def test_few_microbatches_stand_for_many(count: int, pp: int):
    run = load(*LLAMA, f"parallel.pp={pp}", f"train.global_batch={count}")
    assert Trials(0).seconds(run) == pytest.approx(Plan(run).step_seconds, rel=0.01)


@pytest.mark.full
@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("vpp", [1, 2])
def test_no_other_split_of_eight_layers_is_quicker(pp: int, vpp: int):
    """All splits of the layers over stages, against the one that is suggested, by times at full
    clocks: those that power allows depend on a split.
    """
    steady = f"hardware.profile.sustained_tflops={load(*LLAMA).hardware.profile.gemm_tflops}"
    plan = Plan(load(*LLAMA, f"parallel.pp={pp}", f"parallel.vpp={vpp}", steady))
    found = even_layout(plan)
    assert found is not None
    times = _times(plan)
    best = _slowest(plan, found, times)
    stages = pp * vpp
    sizes = [split for split in product(range(9), repeat=stages - 1) if sum(split) <= 8]
    if stages > 4:
        sizes = [split for split in sizes if max(split) < 4]
    for split in sizes:
        counts = [*split, 8 - sum(split)]
        letters = ["t" * count for count in counts]
        layout = "|".join(["E" + letters[0], *letters[1:]]) + "L"
        assert _slowest(plan, layout, times) >= best * (1 - 1e-9), layout


def _slowest(plan: Plan, layout: str, times: dict[str, float]) -> float:
    """Seconds of a microbatch on the slowest rank."""
    stages = plan_stages(8, plan.stages.pp, layout=layout).stages
    return max(
        sum(
            len(held.layers) * times["layer"]
            + held.embedding * times["embedding"]
            + held.head * times["head"]
            for held in of_rank
        )
        for of_rank in stages
    )


def _times(plan: Plan) -> dict[str, float]:
    """Seconds of a layer, the embedding and the head, from stages of different sizes."""
    totals = []
    for layout in ("Ett|t*6L", "Ettt|t*5L", "E|t*8L"):
        values = {"parallel.pp": 2, "parallel.layout": layout, "parallel.vpp": 1}
        stages = Plan(with_values(plan.run, values)).stage_seconds
        totals.append([stage.total for stage in stages])
    layer = totals[1][0] - totals[0][0]
    return {"layer": layer, "embedding": totals[2][0], "head": totals[2][1] - 8 * layer}


def test_even_stages_stay():
    """A head as light as a layer's hundredth moves nothing."""
    run = load(*LLAMA, "parallel.pp=2", "model.vocab_size=256")
    assert even_layout(Plan(run)) is None
    bare = dataclasses.replace(run, hardware=dataclasses.replace(run.hardware, profile=None))
    assert even_layout(Plan(bare)) is None


@pytest.mark.full
def test_the_command_shows_them(capsys):
    assert main(["what=memory", *LLAMA, "parallel.pp=2", "parallel.vpp=2"]) == 0
    shown = capsys.readouterr().out
    assert "What makes it faster" in shown and "parallel.layout='E" in shown
