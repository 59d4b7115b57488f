"""Scales of earlier steps by hand: what a step notes, what it leaves, and what is saved of it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from app.choices import Fp8Recipe
from app.config import Fp8Config
from app.errors import ConfigError
from app.fp8.delayed import GRAD, INPUT, WEIGHT, DelayedScales
from app.fp8.reference import E4M3, E5M2, TensorScaled

LIMITS = (448.0, 448.0, 57344.0)
TAKEN, SKIPPED = torch.tensor(0.0), torch.tensor(1.0)


def scales_of(history: int = 3, margin: int = 0) -> DelayedScales:
    return DelayedScales(
        ("a", "b"), LIMITS, margin=margin, history=history, group=None, device=torch.device("cpu")
    )


def step(scales: DelayedScales, *largest: float, skipped: Tensor = TAKEN) -> None:
    """One in which the matrices of layer `a` have these largest entries, and `b` is not used."""
    scales.begin_step()
    for which, value in enumerate(largest):
        scales.of["a"].note(which, torch.tensor(value / 2))
        scales.of["a"].note(which, torch.tensor(value))
        scales.of["a"].note(which, torch.tensor(math.nan))
    scales.finish_step(skipped)


@pytest.mark.parametrize("margin", [0, 2])
def test_a_scale_is_that_of_the_largest_entry_of_the_last_steps(margin: int):
    scales = scales_of(margin=margin)
    for largest, of_last_three in ((8.0, 8.0), (2.0, 8.0), (4.0, 8.0), (1.0, 4.0), (1.0, 4.0)):
        step(scales, largest, 1.0, 2.0**-20)
        assert scales.scales_M[INPUT] == 448 / of_last_three / 2**margin
        assert scales.scales_M[WEIGHT] == 448 / 2**margin
        assert scales.scales_M[GRAD] == 57344 * 2**20 / 2**margin
    assert torch.equal(scales.scales_M[3:], torch.ones(3))  # nothing is known of it
    step(scales, 0.0, math.inf, 1e-45)
    assert scales.scales_M[INPUT] == 448 / 2**margin  # two steps ago
    assert scales.scales_M[WEIGHT] == 448 / 2**margin  # an infinite entry says nothing


# margin -> overflows by kind after two steps, times the largest number, overflows of one more
MOST = torch.finfo(torch.float32).max  # what an infinite one counts as
OVERFLOWS = {0: ([1, 1, 1], [4, 3, MOST], [0, 0, 1]), 1: ([1, 0, 1], [2, 1, MOST], [0, 0, 0])}


@pytest.mark.parametrize("margin", OVERFLOWS)
def test_entries_beyond_the_largest_number_are_counted(margin: int):
    """By kind of matrix, once there are scales of earlier steps, and only of steps that count."""
    scales = scales_of(history=1, margin=margin)
    step(scales, 1.0, 1.0, 1.0)  # each matrix looks at itself
    scales.stepped()
    counts_23, most_3 = scales.overflows.take()
    assert not counts_23.any() and not most_3.any()
    step(scales, 4.0, 2.0**margin, 0.5)  # weights: the largest number itself
    step(scales, 99.0, 99.0, 99.0, skipped=SKIPPED)
    step(scales, 4.0, 3.0, math.inf)
    two, most, one_more = OVERFLOWS[margin]
    counts_23, most_3 = scales.overflows.take()
    assert counts_23.tolist() == [two, [4, 4, 4]] and most_3.tolist() == most
    step(scales, 4.0, 3.0, 1.0)
    counts_23, _ = scales.overflows.take()
    assert counts_23.tolist() == [one_more, [2, 2, 2]]


def test_a_skipped_step_leaves_no_trace():
    scales, other = scales_of(), scales_of()
    for each in (scales, other):
        step(each, 8.0, 4.0, 2.0)
    step(other, 1e6, 1e6, 1e6, skipped=SKIPPED)
    for each in (scales, other):
        step(each, 1.0, 2.0, 3.0)
    assert torch.equal(scales.scales_M, other.scales_M)
    assert torch.equal(scales.history_HM, other.history_HM)


def test_before_the_first_step_a_matrix_looks_at_itself():
    """And later does not: what has outgrown its scale becomes the type's largest number."""
    scales = scales_of()
    own = scales.of["a"]
    arithmetic = TensorScaled(own)
    x = torch.linspace(-3, 3, 16 * 32).view(16, 32)
    now = TensorScaled()
    for make, plain in ((arithmetic.input, now.input), (arithmetic.grad, now.grad)):
        mine, theirs = make(x * 1e-6), plain(x * 1e-6)
        assert mine.by_rows is not None and theirs.by_rows is not None
        assert torch.equal(mine.by_rows.float(), theirs.by_rows.float())
    assert torch.equal(own.largest_3, torch.tensor([3e-6, 0.0, 3e-6]))
    step(scales, 1.0, 1.0, 1.0)
    scales.stepped()
    assert scales.known
    for made, dtype in ((arithmetic.input(x), E4M3), (arithmetic.grad(x), E5M2)):
        assert made.by_rows is not None and made.by_rows.dtype == dtype
        wide = arithmetic.rows(made)
        assert wide.abs().max() == 1.0
        inside = x.abs() < 1
        half_step = 2**-4 if dtype == E4M3 else 2**-3
        assert ((wide - x)[inside].abs() <= x[inside].abs() * half_step + 1e-6).all()


def test_what_is_saved_is_what_resumes():
    scales = scales_of()
    assert dict(scales.state()) == {}
    for largest in (8.0, 4.0, 2.0):
        step(scales, largest, 1.0, 1.0)
    scales.stepped()
    saved = {name: value.clone() for name, value in scales.state()}
    assert {name: value.shape for name, value in saved.items()} == {"a": (3, 4), "b": (3, 4)}
    for history in (2, 3, 5):
        other = scales_of(history)
        step(other, 7.0, 7.0, 7.0)
        other.load("b", saved["b"])
        other.load("a", saved["a"])
        assert other.known and torch.equal(other.scales_M, scales.scales_M)
        kept = min(3, history)
        assert torch.equal(other.history_HM[:kept], scales.history_HM[:kept])
        assert not other.history_HM[kept:].any()
        other.forget()
        assert not other.known and dict(other.state()) == {}


def test_room_to_grow_in_is_for_scales_of_earlier_steps():
    assert Fp8Config(Fp8Recipe.delayed, margin=1).margin == 1
    with pytest.raises(ConfigError) as refused:
        Fp8Config(Fp8Recipe.current, margin=1)
    assert str(refused.value) == (
        "precision.fp8.margin=1: is not read: recipe=current keeps no history of largest entries; "
        "did you mean 0 or precision.fp8.recipe=delayed?"
    )
