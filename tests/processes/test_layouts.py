"""Every layout trains like one process: losses, gradient norms, all gradients and all parameters
after two steps, fp32.

The cases make any two choices meet that can; most of them, and others drawn at random, are behind
the mark `full`.
"""

from __future__ import annotations

import functools
import random
import zlib
from typing import Any

import pytest
import torch.distributed as dist

from app.config import Run, TrainConfig
from app.engine.step.engine import Engine
from tests.distributed import run_distributed
from tests.parity import NUMBERS, OneProcess, Trained, results
from tests.processes.layouts import SEQ_LEN, Case, in_pairs, legal, run_of, world
from tests.runs import engine_of

STEPS = 2
SHORT = TrainConfig(steps=20, seq_len=SEQ_LEN, micro_batch=1, global_batch=2)
RANKS = [1, 2, 4, 8]
QUICK: dict[str, Case] = {
    "tp2 ep2": ("moe", 2, 1, 2, 1, 1, 1, 1, "none", "all_gather", "auto"),
    "cp4 ep2 etp2": ("moe", 1, 4, 2, 2, 1, 1, 1, "1f1b", "all_gather", "auto"),
    "tp2 pp2 vpp2": ("dense", 2, 1, 1, 1, 2, 2, 1, "interleaved", "all_gather", "auto"),
}


@functools.cache
def cases() -> list[Case]:
    """Return layouts in which every two choices meet that can."""
    return in_pairs()


def steps_of_layout(rank: int, run: Run) -> Trained:
    """Return the results of a few steps, after which all copies must be equal.

    Only rank 0 returns the tensors.
    """
    engine = engine_of(run, rank)
    found = results(engine, STEPS)
    expect_same_bits(engine)
    return {kind: values for kind, values in found.items() if rank == 0 or kind in NUMBERS}


def expect_same_bits(engine: Engine) -> None:
    """All ranks that hold the same part of a parameter hold the same bits of it, tied copies
    too.
    """
    specs = [
        spec
        for shards in engine.optimizer.shards
        for shard in shards
        for spec in shard.buffer.specs
    ]
    mine = {
        (spec.name, spec.block): zlib.crc32(spec.param.detach().numpy().tobytes()) for spec in specs
    }
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    apart = {key for rank in ranks for key, bits in rank.items() if mine.get(key, bits) != bits}
    assert not apart, apart


def alone(model: str) -> Case:
    """A model on one process."""
    return (model, 1, 1, 1, 1, 1, 1, 1, "none", "all_gather", "auto")


@pytest.fixture(scope="module")
def one_process() -> dict[str, OneProcess]:
    return {model: OneProcess.of(run_of(alone(model)), STEPS) for model in ("dense", "moe")}


@pytest.fixture(scope="module")
def shortly() -> dict[str, OneProcess]:
    return {
        model: OneProcess.of(run_of(alone(model), train=SHORT), STEPS) for model in ("dense", "moe")
    }


def expect_parity(
    cases: list[Case], one_process: dict[str, OneProcess], **sections: TrainConfig
) -> None:
    """Each case has fresh processes: gloo groups created where others were just destroyed may fail
    to connect on a busy machine.
    """
    for case in cases:
        for found in run_distributed(steps_of_layout, world(case), run_of(case, **sections)):
            one_process[case[0]].expect(found, case)


@pytest.mark.every(3)
@pytest.mark.parametrize("name", QUICK)
def test_a_layout_has_parity(shortly, name: str):
    expect_parity([QUICK[name]], shortly, train=SHORT)


@pytest.mark.full
@pytest.mark.parametrize("ranks", RANKS)
def test_layouts_in_which_every_two_choices_meet(one_process, ranks: int):
    expect_parity([case for case in cases() if world(case) == ranks], one_process)


@pytest.mark.full
def test_random_layouts_have_parity(one_process):
    """Six drawn anew every time the list of cases changes; each is a layout that the pairs do
    not hold.
    """
    drawn = random.Random(len(cases())).sample(
        [case for case in legal() if case not in cases() and world(case) == 4], 6
    )
    expect_parity(drawn, one_process)


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_many_layouts(one_process, ranks: int):
    drawn = [case for case in legal() if world(case) == ranks]
    expect_parity(random.Random(ranks).sample(drawn, 12), one_process)
