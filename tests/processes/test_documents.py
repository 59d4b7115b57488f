"""Packed documents train like one process in every kind of layout, and the same bit for bit
whatever backward computes again and graphs hold.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from app.choices import GraphKey, LayerType, Recompute
from app.config import DataConfig, LinearAttentionConfig, Run
from tests.cases import chosen
from tests.distributed import run_distributed
from tests.layouts import LAYOUTS, expect_one_process, layout_run
from tests.processes.captured import UPDATING, WHOLE, local, same, several
from tests.runs import LATENT, TINY

MODELS = {
    "grouped": dataclasses.replace(TINY, moe=None, qk_norm=True),
    "experts": TINY,
    "latent": LATENT,
    "linear": dataclasses.replace(
        TINY,
        moe=None,
        norm_eps=1e-4,  # outputs of heads are small before their norm
        layer_types=(LayerType.linear_attention, LayerType.full_attention),
        linear_attention=LinearAttentionConfig(2, 4, key_head_dim=8, value_head_dim=12),
    ),
}
PACKED = DataConfig(document_mask=True)
CASES = LAYOUTS | {"cp 4": ({"cp": 4}, "auto"), "dp 2": ({"dp": 2}, "auto")}
QUICK = [("grouped", "cp 2"), ("latent", "cp 2 heads"), ("experts", "two stages per rank")]
PAIRS = [
    (name, case)
    for name, model in MODELS.items()
    for case in CASES
    if "cp" not in case or model.linear_attention is None
]


def run_of(name: str, phases: Any = (), **parallel: Any) -> Run:
    return layout_run(MODELS[name], parallel, phases=phases, data=PACKED)


@pytest.mark.every(3)
@pytest.mark.parametrize(("name", "case"), chosen(PAIRS, QUICK))
def test_layouts_equal_one_process(name: str, case: str):
    expect_one_process(layout_run(MODELS[name], *CASES[case], data=PACKED))


@pytest.mark.full
@pytest.mark.parametrize(
    "parallel", chosen([{}, {"tp": 2}, {"cp": 2}, {"pp": 2}], [{"cp": 2}]), ids=str
)
@pytest.mark.parametrize("model", ["grouped", "linear"])
def test_recomputed_and_captured_parts_change_nothing(model: str, parallel: dict[str, Any]):
    if model == "linear" and "cp" in parallel:
        pytest.skip("states go from token to token")
    plain = run_of(model, **parallel)
    again = run_of(model, phases=(Recompute.attn_core, Recompute.norm), **parallel)
    runs = {
        "eager": plain,
        "again": again,
        "captured": dataclasses.replace(plain, cuda_graph=local("attn")),
        "captured by slot": dataclasses.replace(plain, cuda_graph=local("layer", GraphKey.slot)),
        "captured again": dataclasses.replace(again, cuda_graph=local("attn")),
        "full iteration": dataclasses.replace(plain, cuda_graph=WHOLE),
        "update too": dataclasses.replace(plain, cuda_graph=UPDATING),
    }
    for results in run_distributed(several, plain.world_size, runs):
        eager = results.pop("eager")
        for name, result in results.items():
            assert same(result, eager), name
