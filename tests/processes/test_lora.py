"""Adapters: beside plain torch, in every layout, with graphs and recomputation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from app.choices import GraphImpl, GraphScope, Recompute
from app.config import CudaGraphConfig, LoraConfig, RecomputeConfig, Run
from app.engine.files.checkpoints import read_manifest
from tests.cases import chosen
from tests.distributed import run_distributed
from tests.parity import OneProcess, Trained, few_steps, results
from tests.processes.layouts import Case, run_of
from tests.processes.test_frozen import expect_planned_memory, resumed, saved
from tests.processes.test_layouts import alone
from tests.runs import engine_of

STEPS = 3  # the third takes moments and weights of two updates
ALL = LoraConfig(rank=4, alpha=8.0, targets=("self_attn", "mlp", "mlp.gate"))
# one pair of matrices for gate and up of experts
JOINT = dataclasses.replace(ALL, targets=("gate_up_proj", "down_proj"))
DROPS = dataclasses.replace(ALL, dropout=0.25)
KINDS = {  # model and adapters
    "dense": ("dense", ALL),
    "moe": ("moe", ALL),
    "joint": ("moe", JOINT),
    "drops": ("dense", DROPS),
    "moe drops": ("moe", dataclasses.replace(DROPS, targets=("self_attn", "shared_experts"))),
}
ORDER = ("none", "all_gather", "auto")
SPLIT = ("zero_bubble_h1", *ORDER[1:])
LAYOUTS: dict[str, tuple[str, Case]] = {  # model, tp, cp, ep, etp, pp, vpp, dp
    "dp2": ("dense", ("dense", 1, 1, 1, 1, 1, 1, 2, *ORDER)),
    "tp2 cp2": ("dense", ("dense", 2, 2, 1, 1, 1, 1, 1, *ORDER)),
    "tp4 ulysses": ("dense", ("dense", 2, 2, 1, 1, 1, 1, 1, "none", "all_to_all", "auto")),
    "pp2 split": ("dense", ("dense", 2, 1, 1, 1, 2, 1, 1, *SPLIT)),
    "moe dp4 ep2": ("moe", ("moe", 1, 1, 2, 1, 1, 1, 4, *ORDER)),
    "moe tp2 dp2 etp2": ("moe", ("moe", 2, 1, 1, 2, 1, 1, 2, *ORDER)),
    "moe tp2 dp2 ep2 etp2": ("moe", ("moe", 2, 1, 2, 2, 1, 1, 2, *ORDER)),
    "moe pp2 tp2 split": ("moe", ("moe", 2, 1, 1, 1, 2, 1, 1, *SPLIT)),
    "moe interleaved": ("moe", ("moe", 1, 1, 1, 1, 2, 2, 1, "interleaved", *ORDER[1:])),
    "moe static": ("moe", ("moe", 1, 1, 2, 1, 1, 1, 2, "none", "all_gather", "static")),
    "joint tp2 dp2 ep2 etp2": ("joint", ("moe", 2, 1, 2, 2, 1, 1, 2, *ORDER)),
    "drops tp2 cp2": ("drops", ("dense", 2, 2, 1, 1, 1, 1, 1, *ORDER)),
    "drops pp2 dp2 split": ("drops", ("dense", 1, 1, 1, 1, 2, 1, 2, *SPLIT)),
    "drops interleaved": ("drops", ("dense", 1, 1, 1, 1, 2, 2, 1, "interleaved", *ORDER[1:])),
    "moe drops tp2 dp2 ep2": ("moe drops", ("moe", 2, 1, 2, 1, 1, 1, 2, *ORDER)),
}
QUICK = ["moe tp2 dp2 ep2 etp2", "moe pp2 tp2 split", "drops tp2 cp2"]


def with_adapters(kind: str, case: Case | None = None, **more: object) -> Run:
    """The run of a case with adapters, those of ALL on all linear layers and routers."""
    model, lora = KINDS[kind]
    return dataclasses.replace(run_of(case or alone(model)), lora=lora, **more)


@pytest.fixture(scope="module")
def one_process() -> Callable[[str], OneProcess]:
    return cache(lambda kind: OneProcess.of(with_adapters(kind), STEPS))


def steps_on_rank_zero(rank: int, run: Run) -> Trained | None:
    """Train, and see that the model keeps its bits, and memory is as planned."""
    engine = engine_of(run, rank)
    before = [each.main.clone() for each in engine.frozen]
    found = results(engine, STEPS)
    for each, value in zip(engine.frozen, before, strict=True):
        assert torch.equal(each.main, value), each.spec.name
    expect_planned_memory(engine)
    return None if rank else found


@pytest.mark.parametrize("name", chosen(LAYOUTS, QUICK))
def test_layouts_train_adapters_like_one_process(
    one_process: Callable[[str], OneProcess], name: str
):
    kind, case = LAYOUTS[name]
    run = with_adapters(kind, case)
    found = run_distributed(steps_on_rank_zero, run.world_size, run)[0]
    assert found is not None
    one_process(kind).expect(found)


SAME_BITS: dict[str, tuple[str, dict[str, object]]] = {
    "whole layers again": ("moe", {"recompute": RecomputeConfig(full=True)}),
    "graphs of parts": (
        "dense",
        {"cuda_graph": CudaGraphConfig(GraphImpl.local, (GraphScope.attn, GraphScope.mlp))},
    ),
    "graph of a step": ("moe", {"cuda_graph": CudaGraphConfig(GraphImpl.full_iteration)}),
    "drops again": ("drops", {"recompute": RecomputeConfig(full=True)}),
    "drops in graphs of parts": (
        "drops",
        {"cuda_graph": CudaGraphConfig(GraphImpl.local, (GraphScope.attn, GraphScope.mlp))},
    ),
    "drops in a graph": (
        "drops",
        {
            "cuda_graph": CudaGraphConfig(GraphImpl.full_iteration),
            "recompute": RecomputeConfig(phases=(Recompute.norm, Recompute.mlp_act)),
        },
    ),
}


@pytest.mark.parametrize("name", chosen(SAME_BITS, ["graphs of parts"]))
def test_graphs_and_recomputation_keep_adapters(
    one_process: Callable[[str], OneProcess], name: str
):
    kind, sections = SAME_BITS[name]
    other = run_distributed(few_steps, 1, with_adapters(kind, **sections), STEPS)[0]
    for what, values in one_process(kind).plain.items():
        for key, value in values.items():
            assert torch.equal(torch.as_tensor(other[what][key]), torch.as_tensor(value)), key


def test_adapters_resume_at_another_layout(tmp_path: Path):
    """From a checkpoint that holds them alone."""
    kept = dataclasses.replace(run_of(alone("moe")).checkpoint, frozen=False)
    run, other = (
        with_adapters(*LAYOUTS[name], checkpoint=kept)
        for name in ("moe static", "moe pp2 tp2 split")
    )
    ((path, wanted), *_) = run_distributed(saved, run.world_size, run, tmp_path)
    assert read_manifest(path)["parts"].keys() == wanted.keys()
    for found, _ in run_distributed(resumed, other.world_size, other, path):
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-5)


def test_dropout_resumes_bit_for_bit(tmp_path: Path):
    run = with_adapters("drops")
    ((path, wanted),) = run_distributed(saved, 1, run, tmp_path)
    ((found, _),) = run_distributed(resumed, 1, run, path)
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
