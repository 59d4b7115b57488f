"""Every layout trains like one process: losses, gradient norms, all gradients and all parameters after two steps, fp32.

The cases make any two choices meet that can; most of them, and others drawn at random, are behind the mark `full`.
"""

from __future__ import annotations

import random
import zlib
from typing import Any

import pytest
import torch
import torch.distributed as dist

from app.config import Run
from app.engine.build import Engine
from tests.cases import chosen
from tests.distributed import run_distributed
from tests.processes.layouts import Case, covering, legal, run_of, world
from tests.runs import engine_of, train_steps, whole_gradients, whole_parameters

STEPS = 2
CASES = covering(list(legal()))
WORLDS = sorted({world(case) for case in CASES})


def few_steps(rank: int, run: Run) -> tuple[list[tuple[float, float]], dict[str, Any], dict[str, Any]]:
    """Losses and norms of a few steps, then all gradients of the last step, and all parameters after it."""
    engine = engine_of(run, rank)
    losses = train_steps(run, engine, STEPS)
    found = whole_gradients(engine), whole_parameters(engine)
    expect_same_bits(engine)
    start_anew()
    return losses, *({name: value.numpy() for name, value in each.items()} for each in found)


def expect_same_bits(engine: Engine) -> None:
    """All ranks that hold the same part of a parameter hold the same bits of it, tied copies too."""
    specs = [spec for shards in engine.optimizer.shards for shard in shards for spec in shard.buffer.specs]
    mine = {(spec.name, spec.block): zlib.crc32(spec.param.detach().numpy().tobytes()) for spec in specs}
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    apart = {key for rank in ranks for key, bits in rank.items() if mine.get(key, bits) != bits}
    assert not apart, apart


def start_anew() -> None:
    """Give all groups back, whose threads would slow the next case down, and meet elsewhere.

    torch may give a new group the name of one that is gone, and would find its addresses in the
    store: so the next case has another part of it.
    """
    dist.barrier()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    store = dist.PrefixStore("next", dist.distributed_c10d._get_default_store())
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)


def every(rank: int, cases: list[Case]) -> list[Any]:
    """What each case comes to, one after the other in the same processes; only rank 0 brings the tensors."""
    seen = []
    for case in cases:
        losses, *found = few_steps(rank, run_of(case))
        seen.append((losses, *(found if rank == 0 else ())))
    return seen


def alone(case: Case) -> Case:
    """The case's model on one process."""
    return (case[0], 1, 1, 1, 1, 1, 1, 1, "none", "all_gather", "auto")


@pytest.fixture(scope="module")
def one_process() -> dict[str, Any]:
    cases = [alone((model,)) for model in ("dense", "moe")]
    return {case[0]: found for case, found in zip(cases, run_distributed(every, 1, cases)[0], strict=True)}


def expect_parity(cases: list[Case], one_process: dict[str, Any]) -> None:
    for rank, results in enumerate(run_distributed(every, world(cases[0]), cases, timeout_s=60 * len(cases))):
        for case, (losses, *found) in zip(cases, results, strict=True):
            wanted_losses, *wanted = one_process[case[0]]
            numbers = torch.tensor(losses), torch.tensor(wanted_losses)
            torch.testing.assert_close(*numbers, rtol=2e-5, atol=1e-6, msg=f"{case}: {numbers}")
            for values, expected in zip(found, wanted if rank == 0 else (), strict=True):
                assert values.keys() == expected.keys()
                for key, value in expected.items():
                    close = dict(rtol=1e-4, atol=2e-5, msg=f"{case}: {key}")
                    torch.testing.assert_close(torch.from_numpy(values[key]), torch.from_numpy(value), **close)


@pytest.mark.parametrize("ranks", chosen(WORLDS, (4,)))
def test_layouts_in_which_every_two_choices_meet(one_process, ranks: int):
    expect_parity([case for case in CASES if world(case) == ranks], one_process)


@pytest.mark.full
def test_layouts_nobody_wrote_down(one_process):
    """Six drawn anew every time the list of cases changes; each is a layout that the pairs do not hold."""
    drawn = random.Random(len(CASES)).sample([case for case in legal() if case not in CASES and world(case) == 4], 6)
    expect_parity(drawn, one_process)


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_many_layouts(one_process, ranks: int):
    drawn = [case for case in legal() if world(case) == ranks]
    expect_parity(random.Random(ranks).sample(drawn, 30), one_process)
