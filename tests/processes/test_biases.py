"""Biases of attention and feed-forwards train like one process in every kind of layout, and in FP8
or with recomputed and captured parts the same bit for bit.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from app.choices import Fp8Part, Fp8Recipe, Recompute
from app.config import Fp8Config, PrecisionConfig
from tests.cases import chosen
from tests.distributed import run_distributed
from tests.layouts import LAYOUTS, expect_one_process, layout_run
from tests.parity import few_steps
from tests.processes.captured import WHOLE, local, same, several
from tests.runs import TINY, TINY_MOE

BIASES = {"qkv_bias": True, "attn_out_bias": True, "mlp_bias": True}
DENSE = dataclasses.replace(TINY, moe=None, **BIASES)
SHARED = dataclasses.replace(TINY, moe=TINY_MOE, **BIASES)
MODELS = {"dense": DENSE, "shared expert": SHARED}
CASES = [(name, case) for name in MODELS for case in LAYOUTS]
PHASES = (Recompute.attn_core, Recompute.norm, Recompute.mlp_act, Recompute.shared)
FP8 = PrecisionConfig(fp8=Fp8Config(Fp8Recipe.current, include=(Fp8Part.linear, Fp8Part.head)))


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("name", "case"), chosen(CASES, [("dense", "tp 2 cp 2"), ("shared expert", "tp 2")])
)
def test_biases_train_alike_in_every_layout(name: str, case: str):
    expect_one_process(layout_run(MODELS[name], *LAYOUTS[case]))


@pytest.mark.full
@pytest.mark.parametrize("parallel", chosen([{}, {"tp": 2}], [{}]), ids=str)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("fp8", chosen([False, True], [True]))
def test_recompute_and_graphs_change_no_bit(name: str, fp8: bool, parallel: dict[str, Any]):
    wide = dataclasses.replace(MODELS[name], hidden_size=64, ffn_hidden_size=64)
    if wide.moe is not None:
        moe = dataclasses.replace(wide.moe, shared_ffn_hidden_size=32)
        wide = dataclasses.replace(wide, moe=moe)
    precision = FP8 if fp8 else PrecisionConfig()
    plain = layout_run(wide, parallel, precision=precision)
    phases = PHASES if wide.moe is not None else PHASES[:-1]
    again = layout_run(wide, parallel, phases=phases, precision=precision)
    runs = {
        "eager": plain,
        "again": again,
        "captured": dataclasses.replace(again, cuda_graph=local("partial")),
    }
    if not parallel and wide.moe is None:
        runs["whole"] = dataclasses.replace(plain, cuda_graph=WHOLE)
    for results in run_distributed(several, plain.world_size, runs):
        eager = results.pop("eager")
        for what, result in results.items():
            assert same(result, eager), what


def test_fp8_losses_stay_near_those_of_fp32():
    wide = dataclasses.replace(DENSE, hidden_size=64, ffn_hidden_size=64)
    runs = [layout_run(wide, {}), layout_run(wide, {}, precision=FP8)]
    (plain,), (coarse,) = (run_distributed(few_steps, 1, run, 3) for run in runs)
    for step, loss in plain["losses"].items():
        assert coarse["losses"][step] == pytest.approx(loss, rel=0.02)
        assert coarse["losses"][step] != loss
