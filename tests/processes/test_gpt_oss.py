"""GPT-OSS trains like one process in every kind of layout, and the same bit for bit whatever
backward computes again and graphs hold.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from app.choices import CpComm, DispatcherKind, Dtype, Fp8Part, Fp8Recipe, Recompute
from app.config import Fp8Config, MoEConfig, PrecisionConfig
from tests.cases import chosen
from tests.distributed import run_distributed
from tests.layouts import expect_one_process, layout_run
from tests.processes.captured import WHOLE, local, same, several
from tests.runs import TINY

MOE = MoEConfig(
    num_experts=8,
    top_k=3,
    ffn_hidden_size=16,
    expert_bias=True,
    logit_bias=True,
    swiglu_limit=0.5,
)
MODEL = dataclasses.replace(
    TINY, qkv_bias=True, attn_out_bias=True, sinks=True, sliding_window=5, moe=MOE, init_std=0.1
)
PARTS = Fp8Part.linear, Fp8Part.experts
FP8 = PrecisionConfig(Dtype.bfloat16, fp8=Fp8Config(Fp8Recipe.current, include=PARTS))
STATIC = dataclasses.replace(MODEL, moe=dataclasses.replace(MOE, dispatcher=DispatcherKind.static))
GATHERED = dataclasses.replace(
    MODEL, moe=dataclasses.replace(MOE, dispatcher=DispatcherKind.all_gather)
)
LAYOUTS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "tp 2": (MODEL, {"tp": 2, "etp": 1}, "auto"),
    "ep 2": (MODEL, {"ep": 2, "dp": 2}, "auto"),
    "etp 2": (MODEL, {"etp": 2, "dp": 2}, "auto"),
    "tp 2 ep 2 etp 2": (MODEL, {"tp": 2, "ep": 2, "etp": 2, "dp": 2}, "auto"),
    "pp 2 split backward": (MODEL, {"pp": 2}, "zero_bubble_h1"),
    "cp 2": (MODEL, {"cp": 2}, "auto"),
    "cp 2 heads": (MODEL, {"cp": 2, "cp_comm_type": CpComm.all_to_all}, "auto"),
    "static ep 2": (STATIC, {"ep": 2, "dp": 2}, "auto"),
    "static etp 2": (STATIC, {"etp": 2, "dp": 2}, "auto"),
    "gathered ep 2": (GATHERED, {"ep": 2, "dp": 2}, "auto"),
}


@pytest.mark.parametrize("case", chosen(list(LAYOUTS), ["tp 2 ep 2 etp 2"]))
def test_gpt_oss_trains_alike_in_every_layout(case: str):
    model, parallel, schedule = LAYOUTS[case]
    expect_one_process(layout_run(model, parallel, schedule))


@pytest.mark.full
@pytest.mark.parametrize("name", chosen(["own", "static", "FP8"], ["static"]))
def test_graphs_and_recompute_change_no_bit_of_gpt_oss(name: str):
    model = MODEL if name == "own" else STATIC
    precision = {"precision": FP8} if name == "FP8" else {}
    plain = layout_run(model, {}, **precision)
    runs = {
        "eager": plain,
        "activation again": layout_run(model, {}, phases=(Recompute.experts_act,), **precision),
        "all again": layout_run(
            model, {}, phases=(Recompute.moe, Recompute.attn_core), **precision
        ),
        "captured": dataclasses.replace(plain, cuda_graph=local("router")),
    }
    if model is STATIC:
        runs["whole"] = dataclasses.replace(plain, cuda_graph=WHOLE)
    for results in run_distributed(several, 1, runs):
        eager = results.pop("eager")
        for name, result in results.items():
            assert same(result, eager), name
