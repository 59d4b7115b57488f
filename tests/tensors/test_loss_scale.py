"""The dynamic loss scale against the traces of Megatron-Core."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from app.choices import Dtype
from app.config import PrecisionConfig
from app.errors import ConfigError
from app.optim.scale import LossScale
from tests.oracle import oracle

GOLDEN = oracle("optim")["grad_scaler"]
CPU = torch.device("cpu")


def start(args: dict[str, Any]) -> LossScale:
    assert (args["growth_factor"], args["backoff_factor"]) == (2.0, 0.5), (
        "the only ones that keep numbers exact"
    )
    precision = PrecisionConfig(
        Dtype.float16,
        initial_loss_scale=args["initial_scale"],
        min_loss_scale=args["min_scale"],
        loss_scale_window=args["growth_interval"],
        loss_scale_hysteresis=args["hysteresis"],
    )
    scale = LossScale.start(precision, CPU)
    assert scale is not None
    return scale


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: str(case["args"]))
def test_every_step_equals_golden(case: dict[str, Any]):
    scale, seen = start(case["args"]), []
    for overflow in case["found_inf"]:
        scale.update(bool(overflow))
        seen.append([scale.scale, scale.clean, scale.tolerated])
        assert scale.value == scale.scale
    assert seen == case["scale_growth_hysteresis"]


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: str(case["args"]))
def test_it_resumes_from_its_state(case: dict[str, Any]):
    whole, before = start(case["args"]), start(case["args"])
    for number, overflow in enumerate(case["found_inf"]):
        if number == 7:
            after = start(case["args"])
            after.load(before.state())
            before = after
        for scale in (whole, before):
            scale.update(bool(overflow))
    assert before.state() == whole.state() and before.value == whole.value


def test_who_has_one():
    assert (
        LossScale.start(PrecisionConfig(Dtype.bfloat16), CPU) is None
        and LossScale.start(PrecisionConfig(), CPU) is None
    )
    constant = LossScale.start(PrecisionConfig(loss_scale=128.0), CPU)
    for overflow in (True, True, True, False):
        constant.update(overflow)
    assert constant.value == 128.0


def resumed(before: PrecisionConfig, now: PrecisionConfig, overflows: Sequence[bool]) -> LossScale:
    """Return a scale that has run some steps with one configuration and resumes with another."""
    first, second = (LossScale.start(config, CPU) for config in (before, now))
    for overflow in overflows:
        first.update(overflow)
    second.load(first.state())
    return second


def test_a_shorter_window_counts_from_where_it_is():
    """Its steps have passed already, so that the scale rises with the next one."""
    long, short = (dynamic(loss_scale_window=window) for window in (10, 3))
    scale = resumed(long, short, [False] * 5)
    scale.update(overflow=False)
    assert scale.value == 2 * long.initial_loss_scale and scale.clean == 0


def test_other_bounds_hold_from_the_first_step():
    scale = resumed(dynamic(loss_scale_hysteresis=4), dynamic(), [])
    assert scale.tolerated == dynamic().loss_scale_hysteresis
    fallen = resumed(dynamic(loss_scale_hysteresis=1), dynamic(min_loss_scale=2.0**15), [True] * 4)
    assert fallen.value == fallen.scale == 2.0**15


def test_a_constant_scale_is_that_of_the_configuration():
    """Whatever the checkpoint had; and a dynamic one starts from a constant one."""
    constant = PrecisionConfig(loss_scale=128.0)
    assert resumed(dynamic(), constant, [True] * 3).value == 128.0
    assert resumed(PrecisionConfig(loss_scale=64.0), constant, []).value == 128.0
    assert resumed(constant, dynamic(), []).state() == {"scale": 128.0, "clean": 0, "tolerated": 2}


def dynamic(**fields: Any) -> PrecisionConfig:
    return PrecisionConfig(Dtype.float16, **fields)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (dict(loss_scale=0.0), "precision.loss_scale=0.0: must be above 0"),
        (
            dict(initial_loss_scale=0.5),
            "precision.min_loss_scale=1.0: must be at most precision.initial_loss_scale=0.5",
        ),
        (dict(loss_scale_window=0), "precision.loss_scale_window=0: must be at least 1"),
        (
            dict(params=Dtype.bfloat16, grads=Dtype.float16),
            "precision.grads=float16: must be float32 or",
        ),
    ],
)
def test_mistakes(wrong: dict[str, Any], said: str):
    with pytest.raises(ConfigError) as error:
        PrecisionConfig(**wrong)
    assert str(error.value).startswith(said)
