"""Suggestions for runs that do not fit: each, typed on the command line and planned again, fits."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest

from app.advice.moves import recompute_more, with_values
from app.advice.suggest import suggest
from app.choices import CpComm, Offload, Recompute, ScheduleName
from app.config import (
    HardwareConfig,
    ModelConfig,
    MoEConfig,
    ParallelConfig,
    PrecisionConfig,
    Run,
    TrainConfig,
)
from app.errors import ConfigError
from app.plan.formatting import GIB
from app.planner.attention import planned_attention
from app.planner.plan import Plan
from app.rules import check
from tests.cases import chosen
from tests.config import load

SIZES = (
    dict(
        num_layers=8,
        hidden_size=2048,
        ffn_hidden_size=8192,
        num_heads=16,
        num_kv_heads=8,
        vocab_size=32768,
    ),
    dict(
        num_layers=16,
        hidden_size=4096,
        ffn_hidden_size=14336,
        num_heads=32,
        num_kv_heads=8,
        vocab_size=65536,
    ),
)
EXPERTS = (
    None,
    MoEConfig(num_experts=16, top_k=2, ffn_hidden_size=2048),
    MoEConfig(num_experts=64, top_k=6, ffn_hidden_size=1024, shared_ffn_hidden_size=1024),
)


SMALLEST_GIB = 6  # context and communicators alone take up to 4


def random_run(seed: int) -> Run | None:
    """A legal run that does not fit into a GPU of a third to nine tenths of what it needs; None
    for other draws.
    """
    draw = random.Random(seed)
    moe = draw.choice(EXPERTS)
    pp = draw.choice((1, 1, 2, 4))
    vpp = draw.choice((1, 2)) if pp > 1 else 1
    tp, cp = draw.choice((1, 1, 2, 4)), draw.choice((1, 1, 2))
    dp = draw.choice((1, 2, 4, 8))
    ep, etp = (draw.choice((1, 2, 4)), 1) if moe else (1, None)
    parallel = ParallelConfig(dp=dp, tp=tp, cp=cp, pp=pp, vpp=vpp, ep=ep, etp=etp)
    train = TrainConfig(
        seq_len=draw.choice((2048, 4096)), micro_batch=draw.choice((1, 2, 4)), global_batch=64
    )
    run = Run(
        ModelConfig(**draw.choice(SIZES), moe=moe),
        parallel,
        train=train,
        precision=PrecisionConfig(),
    )
    try:
        check(run)
    except ConfigError:
        return None
    gpu = Plan(run).busiest.total / GIB * draw.uniform(0.35, 0.95)
    return (
        dataclasses.replace(run, hardware=HardwareConfig(gpu_memory_gib=gpu))
        if gpu > SMALLEST_GIB
        else None
    )


def parsed(run: Run, overrides: tuple[str, ...]) -> Run:
    """The run with overrides as typed, read back by their text alone."""
    values: dict[str, Any] = {}
    for override in overrides:
        key, text = override.split("=")
        values[key] = read(key, text)
    return check(with_values(run, values))


def read(key: str, text: str) -> Any:
    if key == "recompute.phases":
        return tuple(Recompute(name) for name in text.strip("[]").split(",") if name)
    if key == "schedule.name":
        return ScheduleName(text)
    if key == "parallel.cp_comm_type":
        return CpComm(text)
    if key == "precision.params":
        return type(PrecisionConfig().params)(text)
    return (
        {"true": True, "false": False, "null": None}.get(text)
        if text in ("true", "false", "null")
        else int(text)
    )


def runs(count: int) -> list[Run]:
    found = (random_run(seed) for seed in range(20 * count))
    return [run for run in found if run is not None][:count]


@pytest.mark.full
@pytest.mark.parametrize("count", chosen([2, 200], [2]))
def test_suggestions_for_random_runs_fit_when_planned(count: int):
    without = 0
    for run in runs(count):
        plan = Plan(run)
        assert not plan.fits
        suggestions = suggest(plan)
        without += not suggestions
        for suggestion in suggestions:
            again = Plan(parsed(run, suggestion.overrides))
            assert again.fits and again.busiest.total == suggestion.memory
            assert suggestion.slowdown > 0 and suggestion.cost
        assert [s.slowdown for s in suggestions] == sorted(s.slowdown for s in suggestions)
    assert without == 0


TYPED = (
    "model=llama3_8b parallel.world_size=8 train.global_batch=64 hardware.gpu_memory_gib=70",
    "model=mixtral_8x7b precision=bf16 parallel.world_size=64 parallel.ep=8 "
    "train.seq_len=4096 train.micro_batch=2 "
    "train.global_batch=256 hardware=h100",
    "model=qwen3_30b_a3b precision=bf16 parallel.dp=4 parallel.ep=4 train.seq_len=8192 "
    "train.global_batch=32 hardware=h100",
)


@pytest.mark.every(3)
@pytest.mark.parametrize("line", TYPED)
def test_suggestions_work_when_typed(line: str):
    overrides = line.split()
    run = load(*overrides)
    suggestions = suggest(Plan(run))
    assert suggestions
    for suggestion in suggestions:
        again = Plan(planned_attention(load(*overrides, *suggestion.overrides)))
        assert (
            again.fits
            and again.busiest.total == suggestion.memory
            and again.run.world_size >= run.world_size
        )


TIGHT = (
    "model=llama3_8b",
    "precision=bf16",
    "hardware.gpu_memory_gib=40",
    "train.seq_len=4096",
    "train.micro_batch=1",
)


@pytest.mark.full
def test_more_gpus_only_where_nothing_else_helps():
    tight = load(*TIGHT)
    suggestions = suggest(Plan(tight))
    first = suggestions[0]
    assert any(
        text.startswith(("parallel.dp=", "parallel.world_size=")) for text in first.overrides
    )
    for suggestion in suggestions:
        ranks = load(*TIGHT, *suggestion.overrides).world_size
        asked = {1: None, 2: "twice the GPUs"}.get(ranks, f"{ranks} times the GPUs")
        assert ("GPUs" in suggestion.cost) == (ranks > 1)
        assert asked is None or asked in suggestion.cost.split("; ")
    roomy = load("+experiment=small", "hardware=h200")
    assert suggest(Plan(roomy)) == ()


def test_whole_layers_are_recomputed_whatever_is_offloaded():
    for parts in ("[]", "[attn]", "[attn,mlp]", "[layers]"):
        run = load("+experiment=small", f"recompute.offload={parts}")
        *_, change = recompute_more(run)
        whole = with_values(run, change.values)
        check(whole)
        assert whole.recompute.full
        assert whole.recompute.offload == (() if parts == "[]" else (Offload.layers,))


def test_a_large_vocabulary_is_cut_into_chunks():
    """All that it takes where logits are most of the memory, and quicker than anything else."""
    run = load(
        "model=dense_tiny",
        "precision=bf16",
        "model.vocab_size=1048576",
        "train.seq_len=8192",
        "train.micro_batch=1",
    )
    plan = Plan(
        dataclasses.replace(
            run, hardware=HardwareConfig(gpu_memory_gib=Plan(run).busiest.total / GIB - 8)
        )
    )
    assert any(s.overrides == ("loss.chunk_tokens=1024",) for s in suggest(plan))


def test_an_ordered_backward_needs_no_matrix_of_scores_by_torch():
    """8 heads, 16,384 tokens: 4 GiB of scores in 16 bits."""
    run = load(
        "model=dense_tiny",
        "model.num_heads=8",
        "precision=bf16",
        "train.seq_len=16384",
        "train.micro_batch=1",
        "train.attention_backend=transformer_engine",
    )
    tight = Plan(run).busiest.total / GIB - 2
    plan = Plan(dataclasses.replace(run, hardware=HardwareConfig(gpu_memory_gib=tight)))
    assert any(s.overrides == ("train.attention_backend=torch",) for s in suggest(plan))
    in_any_order = with_values(run, {"train.deterministic": False})
    assert Plan(in_any_order).busiest.total / GIB < tight


@pytest.mark.full
def test_nothing_helps_a_gpu_without_room():
    assert suggest(Plan(load("hardware.gpu_memory_gib=0.01"))) == ()


@pytest.mark.full
def test_paged_buffer_is_suggested_if_experts_do_not_fit():
    """Eight ranks could ask the experts of each for eight times the mean."""
    line = (
        "+experiment=smallmoe model=qwen3_30b_a3b model.num_layers=12 parallel.dp=8 parallel.ep=8 "
        "train.micro_batch=1 train.global_batch=16 cuda_graph=full_iteration "
        "model.moe.dispatcher=static hardware.gpu_memory_gib=62"
    )
    plan = Plan(load(*line.split()))
    assert not plan.fits
    found = suggest(plan)
    keys = {override.partition("=")[0] for each in found for override in each.overrides}
    assert keys & {"model.moe.static.paged_buffer", "model.moe.static.capacity"}
    for each in found:
        assert Plan(load(*line.split(), *each.overrides)).fits
