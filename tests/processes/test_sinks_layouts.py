"""Attention with sinks and a bias on its output trains like one process in every kind of layout,
and the same bit for bit whatever backward computes again and graphs hold.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from app.choices import LayerType, Recompute
from tests.cases import chosen
from tests.distributed import run_distributed
from tests.layouts import LAYOUTS, expect_one_process, layout_run
from tests.processes.captured import WHOLE, local, same, several
from tests.runs import TINY

MODEL = dataclasses.replace(
    TINY,
    moe=None,
    qkv_bias=True,
    attn_out_bias=True,
    sinks=True,
    init_std=0.2,  # so that sinks differ
    sliding_window=5,
    layer_types=(LayerType.sliding_attention, LayerType.full_attention),
)


@pytest.mark.every(2)
@pytest.mark.parametrize("case", chosen(list(LAYOUTS), ["tp 2 cp 2", "cp 2 heads"]))
def test_sinks_train_alike_in_every_layout(case: str):
    expect_one_process(layout_run(MODEL, *LAYOUTS[case]))


@pytest.mark.parametrize("parallel", chosen([{}, {"tp": 2}, {"cp": 2}], [{}]), ids=str)
def test_recompute_and_graphs_change_no_bit_with_sinks(parallel: dict[str, Any]):
    plain = layout_run(MODEL, parallel)
    again = layout_run(MODEL, parallel, phases=(Recompute.attn_core, Recompute.norm))
    runs = {
        "eager": plain,
        "again": again,
        "captured": dataclasses.replace(again, cuda_graph=local("attn")),
    }
    if not parallel:
        runs["whole"] = dataclasses.replace(plain, cuda_graph=WHOLE)
    for results in run_distributed(several, plain.world_size, runs):
        eager = results.pop("eager")
        for name, result in results.items():
            assert same(result, eager), name
