"""Layers with a sliding window among layers without train like one process in every kind of layout,
and the same bit for bit whatever backward computes again and graphs hold.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from app.choices import LayerType, Recompute
from app.config import Run
from tests.cases import chosen
from tests.distributed import run_distributed
from tests.layouts import LAYOUTS, expect_one_process, layout_run
from tests.parity import few_steps
from tests.processes.captured import WHOLE, local, same, several
from tests.runs import LATENT, TINY, make_run

WINDOWS: dict[str, Any] = {
    "sliding_window": 5,  # of 16 tokens, so that it ends in other ranks' tokens
    "layer_types": (LayerType.sliding_attention, LayerType.full_attention),
}
MODELS = {
    "some without positions": dataclasses.replace(TINY, moe=None, no_rope_layers=(0, 1), **WINDOWS),
    "grouped": dataclasses.replace(TINY, moe=None, qk_norm=True, **WINDOWS),
    "latent": dataclasses.replace(LATENT, **WINDOWS),
}
CASES = LAYOUTS | {"cp 4": ({"cp": 4}, "auto")}
QUICK = [("grouped", "tp 2"), ("grouped", "cp 2"), ("grouped", "cp 2 heads"), ("latent", "cp 2"),
         ("some without positions", "pp 2 split backward"),
         ("grouped", "two stages per rank")]  # fmt: skip
PAIRS = [(name, case) for name in MODELS for case in CASES]


def run_of(name: str, phases: Any = (), **parallel: Any) -> Run:
    return layout_run(MODELS[name], parallel, phases=phases)


@pytest.mark.every(6)
@pytest.mark.parametrize(("name", "case"), chosen(PAIRS, QUICK))
def test_layouts_equal_one_process(name: str, case: str):
    expect_one_process(layout_run(MODELS[name], *CASES[case]))


@pytest.mark.parametrize("parallel", chosen([{}, {"tp": 2}, {"cp": 2}], [{}]), ids=str)
def test_recomputed_and_captured_parts_change_nothing(parallel: dict[str, Any]):
    plain = run_of("grouped", **parallel)
    again = run_of("grouped", phases=(Recompute.attn_core, Recompute.norm), **parallel)
    runs = {
        "eager": plain,
        "again": again,
        "captured": dataclasses.replace(plain, cuda_graph=local("attn")),
        "captured again": dataclasses.replace(again, cuda_graph=local("attn")),
    }
    if not parallel:
        runs["whole"] = dataclasses.replace(plain, cuda_graph=WHOLE)
    for results in run_distributed(several, plain.world_size, runs):
        eager = results.pop("eager")
        for name, result in results.items():
            assert same(result, eager), name


def trained(rank: int, models: dict[str, Any]) -> dict[str, Any]:
    return {name: few_steps(rank, make_run(model), 1) for name, model in models.items()}


def test_only_a_window_shorter_than_sequences_changes_losses():
    full = dataclasses.replace(TINY, moe=None, num_layers=2)
    windows = {size: dataclasses.replace(full, sliding_window=size) for size in (15, 16, 1000)}
    ((found),) = run_distributed(trained, 1, {"full": full, **windows})
    losses = {name: result["losses"] for name, result in found.items()}
    assert losses[16] == losses[1000] == losses["full"] != losses[15]
