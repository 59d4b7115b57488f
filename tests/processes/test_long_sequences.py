"""Runs whose sequences are longer than the original length of their rotary positions train like one
process in every layout, recomputed and captured bit for bit, and say what they train with.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from app.choices import Recompute
from app.config import DynamicRopeConfig, LongRopeConfig, ModelConfig
from app.engine.report.opening import positions_line
from tests.cases import chosen
from tests.distributed import run_distributed
from tests.layouts import LAYOUTS, expect_one_process, layout_run
from tests.processes.captured import WHOLE, local, same, several
from tests.runs import TINY

FACTORS = LongRopeConfig(8, (1.0, 1.1, 1.2, 1.3), (1.0, 2.0, 4.0, 8.0), factor=4.0)
MODELS = {
    "longrope": dataclasses.replace(TINY, moe=None, longrope=FACTORS),
    "dynamic": dataclasses.replace(TINY, moe=None, dynamic_rope=DynamicRopeConfig(4.0, 8)),
}
CASES = [(name, case) for name in MODELS for case in LAYOUTS]


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("name", "case"),
    chosen(CASES, [("longrope", "cp 2"), ("dynamic", "pp 2 split backward"), ("longrope", "tp 2")]),
)
def test_long_sequences_train_alike_in_every_layout(name: str, case: str):
    expect_one_process(layout_run(MODELS[name], *LAYOUTS[case]))


@pytest.mark.every(2)
@pytest.mark.parametrize("name", MODELS)
def test_recompute_and_graphs_change_no_bit(name: str):
    plain = layout_run(MODELS[name], {})
    unscaled = layout_run(dataclasses.replace(TINY, moe=None), {})
    again = layout_run(MODELS[name], {}, phases=(Recompute.attn_core,))
    runs = {
        "eager": plain,
        "unscaled": unscaled,
        "captured": dataclasses.replace(again, cuda_graph=local("attn")),
        "whole": dataclasses.replace(plain, cuda_graph=WHOLE),
    }
    (results,) = run_distributed(several, 1, runs)
    eager = results.pop("eager")
    assert {what: same(result, eager) for what, result in results.items()} == {
        "unscaled": False,
        "captured": True,
        "whole": True,
    }


def line(model: ModelConfig, **train: Any) -> str | None:
    run = layout_run(model, {})
    return positions_line(dataclasses.replace(run, train=dataclasses.replace(run.train, **train)))


def test_the_start_says_which_positions_are_trained():
    assert line(TINY) is None
    assert line(MODELS["longrope"]) == (
        "those of model.longrope.long_factors, as train.seq_len=16 is above the original length of "
        "8 tokens"
    )
    assert line(MODELS["longrope"], seq_len=8) == (
        "those of model.longrope.short_factors, as train.seq_len=8 is at most the original length "
        "of 8 tokens"
    )
    growth = (4 * 16 / 8 - 3) ** (8 / 6)
    assert line(MODELS["dynamic"]) == (
        f"their base is {10000 * growth:,.0f}, as train.seq_len=16 is above the original length of "
        "8 tokens"
    )
