"""Host memory for tensors of any size is bounded by what is in use at once."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch

from app.model.host_memory import ALIGNED, SMALLEST, HostMemory, Part

MIB = 1 << 20
CPU = torch.device("cpu")


def step(memory: HostMemory, draw: random.Random, largest: int) -> None:
    """Take and give what 8 microbatches do, up to 3 in flight, with tensors of experts' tokens."""
    flying: list[list[Part]] = []
    for _ in range(8):
        if len(flying) == 3:
            for part in reversed(flying.pop(0)):
                memory.give(part)
        loads = [draw.uniform(0.5, 2) for _ in range(6)]
        sizes = [round(load * largest / each) for load in loads for each in (2, 3)]
        flying.append([memory.take(size) for size in [largest // 4] * 6 + sizes])
        taken = sorted(part for parts in flying for part in parts)
        assert all(part[2] <= after[1] for part, after in pairwise(taken) if part[0] == after[0])
        assert memory.used == sum(end - start for _, start, end in taken) <= memory.pinned
    memory.clear()


@pytest.mark.parametrize("largest", [1, 20, 134, 600, 1100])  # MiB
def test_varying_sizes_need_no_more_memory_with_every_step(largest: int):
    memory, draw = HostMemory(CPU), random.Random(0)
    for _ in range(100):
        step(memory, draw, largest * MIB)
    assert memory.most <= memory.pinned <= max(SMALLEST, 2 * memory.most)
    assert memory.pinned == sum(map(len, memory.blocks))


def test_remainders_are_used_and_neighbors_joined():
    memory = HostMemory(CPU)
    parts = [memory.take(SMALLEST // 4 - 1) for _ in range(4)]
    assert memory.pinned == SMALLEST == parts[-1][2] and not memory.free
    for place in (0, 2, 1):
        memory.give(parts[place])
    assert memory.free == [(0, 0, SMALLEST * 3 // 4)]
    small = memory.take(3)
    assert small == (0, 0, ALIGNED)
    assert memory.take(SMALLEST // 2) == (0, ALIGNED, ALIGNED + SMALLEST // 2)
    memory.give(parts[3])
    with pytest.raises(AssertionError, match="in use"):
        memory.give(parts[3])


def test_the_smallest_free_part_is_taken():
    memory = HostMemory(CPU)
    wide, _, narrow, _ = (memory.take(size * ALIGNED) for size in (4, 1, 2, 1))
    memory.give(narrow)
    memory.give(wide)
    assert memory.take(ALIGNED)[1] == narrow[1]
    assert memory.take(3 * ALIGNED)[1] == wide[1]
