"""Entries that FP8 lose, counted by hand and by the kernel, on a GPU where there is one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from app.choices import Fp8Recipe
from app.config import Fp8Config
from app.errors import ConfigError
from app.fp8.delayed import GRAD, INPUT, WEIGHT, DelayedScales
from app.fp8.lost import LARGEST, LostEntries
from app.fp8.reference import BlockScaled, Reference, TensorScaled
from app.kernels.fp8.lost_entries import count_lost

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KINDS = {"input": INPUT, "weight": WEIGHT, "grad": GRAD}
# smaller entries become zero, where the largest one is 1: half of the smallest number that is not
LEAST = {"input": 2**-10 / 448, "weight": 2**-10 / 448, "grad": 2**-17 / 57344}


def wide(rows: int, columns: int, seed: int = 0) -> Tensor:
    """Entries of very different sizes, the largest 1, some of them zero."""
    generator = torch.Generator().manual_seed(seed)
    powers = torch.rand(rows, columns, generator=generator) * -50
    signs = torch.randint(-1, 2, (rows, columns), generator=generator)
    x = signs * 2**powers
    x[0, 0] = 1.0
    return x.bfloat16().to(DEVICE)


def counted(
    arithmetic: Reference, kind: str, x: Tensor, scales: DelayedScales | None = None
) -> list[int]:
    lost = LostEntries(x.device)
    of_layer = None if scales is None else scales.of["one"]
    made = getattr(arithmetic, kind)(x)
    lost.count(of_layer, KINDS[kind], x, made)
    assert not lost.counts_33.any(), "nobody has asked"
    lost.wanted.fill_(1)
    lost.count(of_layer, KINDS[kind], x, made)
    found = lost.counts_33.clone()
    lost.count(of_layer, KINDS[kind], x, made)
    assert torch.equal(lost.counts_33, 2 * found)
    lost.begin_step()
    assert not lost.counts_33.any()
    rest = [which for which in KINDS.values() if which != KINDS[kind]]
    assert not found[rest].any()
    return found[KINDS[kind]].tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_entries_far_below_their_matrix_amax_become_zero(kind: str):
    x = wide(48, 160)
    small = (x != 0) & (x.double().abs() <= LEAST[kind])  # a tie goes to zero, which is even
    assert 0 < small.sum() < x.numel() / 2
    found = counted(TensorScaled(), kind, x)
    assert found == [int((x != 0).sum()), int(small.sum()), 0]


def test_with_a_scale_per_block_the_largest_of_the_block_counts():
    x = wide(48, 256)
    x[:, 128:] *= 2.0**-40  # of two blocks in each row the second is as good as the first
    by_matrix, by_block = (counted(each, "input", x) for each in (TensorScaled(), BlockScaled()))
    assert by_matrix[1] > by_matrix[0] / 2 + by_block[1] / 3 and by_block[1] > 0
    halves = [counted(BlockScaled(), "input", part.contiguous()) for part in x.chunk(2, dim=1)]
    assert by_block == [sum(both) for both in zip(*halves, strict=True)]


@pytest.mark.parametrize("kind", KINDS)
def test_entries_beyond_the_largest_number_are_clipped(kind: str):
    scales = DelayedScales(
        ["one"], LARGEST, margin=1, history=2, group=None, device=torch.device(DEVICE)
    )
    x = wide(48, 160)
    arithmetic = TensorScaled(scales.of["one"])
    assert counted(arithmetic, kind, x * 8, scales)[2] == 0  # by its own largest entry
    scales.begin_step()
    for which in KINDS.values():
        scales.of["one"].note(which, torch.tensor(1.0, device=DEVICE))
    scales.finish_step(torch.zeros((), device=DEVICE))
    scales.stepped()
    for factor in (1.0, 2.0, 8.0):  # there is room for twice as large ones
        beyond = int((x.double().abs() * factor > 2).sum())
        assert counted(arithmetic, kind, x * factor, scales)[2] == beyond, factor
        assert (beyond > 0) == (factor > 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("numel", [1, 4095, 3 * 4096 + 17])
@pytest.mark.parametrize("room", [None, 0.25])
def test_the_kernel_counts_what_torch_counts(numel: int, dtype: torch.dtype, room: float | None):
    pytest.importorskip("triton")
    x = wide(1, numel, seed=1).flatten().to(dtype)
    scale = None if room is None else torch.full((1,), 448.0 / room, device=DEVICE)
    data = TensorScaled().input(x[None]).by_rows.view(torch.uint8).flatten()
    counts = torch.full((3,), 5, dtype=torch.int64, device=DEVICE)
    for wanted in (0, 1):
        flag = torch.full((1,), wanted, dtype=torch.int32, device=DEVICE)
        count_lost(x, data, counts, wanted=flag, scale=scale, largest=448.0)
        zeroed = int(((x != 0) & (data & 127 == 0)).sum())
        beyond = 0 if room is None else int((x.abs() > room).sum())
        expected = [int((x != 0).sum()), zeroed, beyond]
        assert counts.tolist() == [5 + wanted * count for count in expected]
    assert numel == 1 or min(expected[:2]) > 0
    assert room is None or expected[2] > 0


def test_counting_is_for_runs_with_something_in_fp8():
    assert Fp8Config(Fp8Recipe.current, count_entries=True).count_entries
    with pytest.raises(ConfigError) as refused:
        Fp8Config(count_entries=True)
    assert str(refused.value) == (
        "precision.fp8.count_entries=true: is not read: recipe=null turns FP8 off; "
        "did you mean false or precision.fp8.recipe=current?"
    )
