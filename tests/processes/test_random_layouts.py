"""Drawn layouts, schedules and recomputation train, validate and sample like one process, fp32.

A case that fails prints its command line.
"""

from __future__ import annotations

import math
from functools import partial

import pytest

from app.engine.decoding.generate import sample_tokens
from app.engine.step.engine import Engine
from app.engine.step.step import Validation
from tests.distributed import run_distributed
from tests.parity import NUMBERS, OneProcess, Trained, alone, here, results
from tests.random_runs import random_run
from tests.runs import batches_of

pytestmark = pytest.mark.full
STEPS = 2
SEEDS = [
    *((seed, 4) for seed in range(20)),
    *((seed, 8) for seed in range(40, 45)),
]  # ranks at most


def trained(engine: Engine, validated: int) -> tuple[Trained, int, list[int]]:
    """Return the results of a few steps and a validation, the latter's tokens, and a sample."""
    run, found = engine.plan.run, results(engine, STEPS)
    held_out = batches_of(run, 100, engine.groups.dp_rank)[: validated // run.dp]
    loss, tokens = Validation(engine, len(held_out))(held_out)
    facts = {"count": 4, "window": run.train.seq_len, "vocab": run.model.vocab_size, "seed": 5}
    return (
        found | {"validation": {1: loss}},
        tokens,
        list(sample_tokens(engine, [1, 2, 3], **facts)),
    )


@pytest.mark.parametrize(("seed", "ranks"), SEEDS)
def test_a_drawn_layout_equals_one_process(seed: int, ranks: int):
    drawn = random_run(seed, ranks)
    print(drawn)
    compute = partial(trained, validated=drawn.run.dp * (1 + seed % drawn.run.num_microbatches))
    (plain, *told), (exact, *_) = alone(drawn.alone(), compute)
    for found, *said in run_distributed(here, drawn.run.world_size, drawn.run, compute):
        OneProcess(plain, exact).expect(found, seed)
        assert said == told


@pytest.mark.parametrize("seed", range(50, 62))
def test_whatever_the_rules_take_trains(seed: int):
    """With capacities, noise and fewer bits too: all ranks find the same, and numbers."""
    drawn = random_run(seed, largest=8, wild=True)
    print(drawn)
    compute = partial(trained, validated=drawn.run.dp)
    first, *others = run_distributed(here, drawn.run.world_size, drawn.run, compute)
    assert all(map(math.isfinite, first[0]["losses"].values()))
    for found, *said in others:
        assert {kind: found[kind] for kind in NUMBERS} == {kind: first[0][kind] for kind in NUMBERS}
        assert said == list(first[1:])
