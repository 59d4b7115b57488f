"""Multi-head latent attention trains like one process in every kind of layout, and the same bit for
bit whatever backward computes again and graphs hold.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from app.choices import CpComm, Recompute
from app.config import Run
from tests.cases import chosen
from tests.distributed import run_distributed
from tests.layouts import LAYOUTS, expect_one_process, layout_run
from tests.processes.captured import WHOLE, local, same, several
from tests.runs import LATENT

PLAIN_QUERIES = dataclasses.replace(
    LATENT, moe=None, yarn=None, mla=dataclasses.replace(LATENT.mla, q_lora_rank=None)
)
MODELS = {"latent": LATENT, "queries as they are": PLAIN_QUERIES}
CASES = LAYOUTS | {
    "tp 2 split backward": ({"tp": 2, "pp": 2}, "zero_bubble_h1"),
    "tp 2 cp 2 heads": ({"tp": 2, "cp": 2, "cp_comm_type": CpComm.all_to_all}, "auto"),
    "tp 4": ({"tp": 4}, "auto"),
    "two replicas": ({"dp": 2, "tp": 2}, "auto"),
}
QUICK = ("tp 2", "cp 2", "cp 2 heads", "tp 2 split backward")
PAIRS = [(name, case) for name in MODELS for case in CASES]


def run_of(name: str, phases: Any = (), **parallel: Any) -> Run:
    return layout_run(MODELS[name], parallel, phases=phases)


@pytest.mark.every(4)
@pytest.mark.parametrize(("name", "case"), chosen(PAIRS, [("latent", case) for case in QUICK]))
def test_layouts_equal_one_process(name: str, case: str):
    expect_one_process(layout_run(MODELS[name], *CASES[case]))


@pytest.mark.parametrize("parallel", chosen([{}, {"tp": 2}, {"cp": 2}], [{}]), ids=str)
def test_recomputed_and_captured_parts_change_nothing(parallel: dict[str, Any]):
    """All parts, and attention captured with what it recomputes."""
    plain = run_of("latent", **parallel)
    again = run_of("latent", phases=tuple(part for part in Recompute), **parallel)
    core = run_of("latent", phases=(Recompute.attn_core, Recompute.norm), **parallel)
    runs = {
        "eager": plain,
        "again": again,
        "captured": dataclasses.replace(plain, cuda_graph=local("attn")),
        "captured again": dataclasses.replace(core, cuda_graph=local("attn")),
    }
    if not parallel:
        runs["whole"] = dataclasses.replace(plain, cuda_graph=WHOLE)
    for results in run_distributed(several, plain.world_size, runs):
        eager = results.pop("eager")
        for name, result in results.items():
            assert same(result, eager), name
