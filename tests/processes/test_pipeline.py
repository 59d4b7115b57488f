"""Every pipeline trains like one process: losses, gradient norms, all gradients and all
parameters after three steps, fp32.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest

from app.engine.step.engine import Engine
from app.engine.step.step import Validation
from tests.distributed import run_distributed
from tests.parity import OneProcess, alone, few_steps, here
from tests.processes.pipeline import MODELS, run_of
from tests.rounding import expect_alike
from tests.runs import batches_of

STEPS = 3


CASES = [
    ("moe", dict(mbs=4, pp=2)),
    ("moe", dict(mbs=1, pp=2)),
    ("dense", dict(mbs=2, pp=2, schedule="gpipe")),
    ("tied", dict(mbs=4, pp=4)),
    ("moe", dict(mbs=8, pp=4)),
    ("moe", dict(mbs=2, pp=2, vpp=2)),
    ("tied", dict(mbs=5, pp=2, vpp=3, group=3)),
    ("dense", dict(mbs=8, pp=4, vpp=3)),
    ("moe", dict(mbs=4, pp=2, dp=2, ep=2)),
    ("tied", dict(mbs=4, pp=2, vpp=2, dp=2)),
    ("tied", dict(mbs=3, pp=4, first=1, last=3)),
    ("moe", dict(mbs=4, pp=2, layout="Et|t*6|t*5|L")),
    ("moe", dict(mbs=4, pp=2, schedule="zero_bubble_h1")),
    ("tied", dict(mbs=6, pp=4, schedule="zero_bubble_h1")),
    ("moe", dict(mbs=4, pp=2, dp=2, ep=2, schedule="zero_bubble_h1", partial=1)),
    ("tied", dict(mbs=4, pp=2, vpp=2, schedule="zero_bubble_v")),
    ("moe", dict(mbs=6, pp=4, schedule="zero_bubble_v", layout="Ett|t|tt|t|t|tt|t|ttL")),
    ("moe", dict(mbs=4, pp=2, vpp=2, partial=0)),
    ("dense", dict(mbs=3, pp=1, partial=0)),
]


@functools.cache
def one_process(name: str, mbs: int) -> OneProcess:
    return OneProcess.of(run_of(MODELS[name], mbs), STEPS)


@pytest.mark.every(12)
@pytest.mark.parametrize(("name", "choice"), CASES)
def test_pipeline_equals_one_process(name: str, choice: dict[str, Any]):
    run = run_of(MODELS[name], **choice)
    expected = one_process(name, choice["mbs"] * choice.get("dp", 1))
    for found in run_distributed(few_steps, run.world_size, run, STEPS):
        expected.expect(found)


Validated = tuple[dict[int, float], dict[int, int]]  # by microbatches: losses, tokens


def validated(engine: Engine, counts: list[int]) -> Validated:
    """Validations of so many microbatches."""
    batches = batches_of(engine.plan.run, 0, 0)
    found = {count: Validation(engine, count)(batches[:count]) for count in counts}
    return {n: loss for n, (loss, _) in found.items()}, {n: told for n, (_, told) in found.items()}


@pytest.mark.every(3)
@pytest.mark.parametrize(
    "choice",
    [
        dict(mbs=6, pp=2, vpp=2),
        dict(mbs=6, pp=4, vpp=3, group=6),
        dict(mbs=6, pp=2, vpp=2, schedule="zero_bubble_v"),
    ],
)
def test_a_validation_of_any_length_equals_that_of_one_process(choice: dict[str, Any]):
    compute = functools.partial(validated, counts=[1, 2, 3, 5])
    plain, exact = alone(run_of(MODELS["tied"], choice["mbs"]), compute)
    run = run_of(MODELS["tied"], **choice)
    for losses, tokens in run_distributed(here, run.world_size, run, compute):
        expect_alike(losses, plain[0], exact[0])
        assert tokens == plain[1]
