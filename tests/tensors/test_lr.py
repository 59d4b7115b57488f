"""Schedules of learning rate and weight decay against the values of Megatron-Core 0.16.1."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.choices import Decay, Ramp, WsdDecay
from app.config import OptimConfig, Run, TrainConfig
from app.errors import ConfigError
from app.optim.lr import learning_rate, lr_at, weight_decay, weight_decay_at
from app.rules import check

CASES = json.loads((Path(__file__).parents[1] / "golden" / "numerics.json").read_text())[
    "lr_schedule"
]
ACCEPTED = [case for case in CASES if "error" not in case]
REJECTED = [case for case in CASES if "error" in case]


def label(case: dict[str, Any]) -> str:
    keys = ("lr_decay_style", "lr_wsd_decay_style", "wd_incr_style", "init_lr", "lr_warmup_steps")
    return "-".join(str(case["args"].get(key)) for key in keys)


def config_of(args: dict[str, Any]) -> OptimConfig:
    """The optimizer section that says what these arguments say."""
    ramp = Ramp(args["wd_incr_style"])
    wsd = {}
    if args["lr_decay_style"] == "WSD":
        wsd = {
            "wsd_decay_steps": args.get("wsd_decay_steps"),
            "wsd_decay": WsdDecay(args.get("lr_wsd_decay_style")),
        }
    return OptimConfig(
        lr=args["max_lr"],
        min_lr=args["min_lr"],
        init_lr=args["init_lr"],
        warmup_steps=args["lr_warmup_steps"],
        decay=Decay(args["lr_decay_style"].lower().replace("-", "_")),
        decay_steps=args["lr_decay_steps"],
        weight_decay=args["start_wd"],
        weight_decay_ramp=ramp,
        weight_decay_end=None
        if ramp is Ramp.constant and args["end_wd"] == args["start_wd"]
        else args["end_wd"],
        **wsd,
    )


def run_of(optim: OptimConfig) -> Run:
    return Run(optim=optim)


@pytest.mark.parametrize("case", ACCEPTED, ids=label)
def test_schedule_equals_golden(case: dict[str, Any]):
    args, optim = case["args"], config_of(case["args"])
    check(run_of(optim))
    for step, *groups in case["values"]:
        for wanted, group in zip(groups, case["groups"] or [{}], strict=True):
            lr = learning_rate(
                step,
                init=optim.init_lr,
                peak=group.get("max_lr", optim.lr),
                low=group.get("min_lr", optim.min_lr),
                warmup_steps=optim.warmup_steps,
                decay_steps=args["lr_decay_steps"],
                decay=optim.decay,
                wsd_steps=optim.wsd_decay_steps or 0,
                wsd_decay=optim.wsd_decay,
            )
            decay = weight_decay_at(step, run_of(replace(optim, decay_steps=args["wd_incr_steps"])))
            ours = [lr * group.get("lr_mult", 1), decay * group.get("wd_mult", 1)]
            assert ours == pytest.approx(wanted, rel=1e-12, abs=1e-18)
            assert group or lr == lr_at(step, run_of(optim))


@pytest.mark.parametrize("case", REJECTED, ids=label)
def test_impossible_schedules_are_refused_by_the_config(case: dict[str, Any]):
    # A missing shape for the last part is refused by its type: the config always has one.
    with pytest.raises(ValueError):
        check(run_of(config_of(case["args"])))


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"init_lr": 4e-3}, "optim.init_lr"),
        ({"min_lr": 4e-3}, "optim.min_lr"),
        ({"warmup_steps": 700}, "optim.warmup_steps"),
        ({"decay_steps": 20, "warmup_steps": 20}, "optim.warmup_steps"),
        ({"decay_steps": 0}, "optim.decay_steps"),
        ({"decay": Decay.wsd}, "optim.wsd_decay_steps"),
        ({"decay": Decay.wsd, "wsd_decay_steps": 701}, "optim.wsd_decay_steps"),
        ({"weight_decay_end": 0.2}, "optim.weight_decay_ramp"),
        ({"weight_decay": -0.1}, "optim.weight_decay"),
        # 35 steps of warm-up where none are given
        ({"decay": Decay.wsd, "wsd_decay_steps": 690}, "optim.wsd_decay_steps"),
        ({"warmup_samples": -1}, "optim.warmup_samples"),
        ({"decay_samples": 0}, "optim.decay_samples"),
        ({"wsd_decay_samples": 0}, "optim.wsd_decay_samples"),
        ({"warmup_steps": 0, "warmup_samples": 0}, "optim.warmup_samples"),
        ({"decay_steps": 9, "decay_samples": 9}, "optim.decay_samples"),
        ({"wsd_decay_steps": 9, "wsd_decay_samples": 9}, "optim.wsd_decay_samples"),
        ({"warmup_samples": 700 * 16}, "optim.warmup_samples"),
        (
            {"decay": Decay.wsd, "warmup_steps": 0, "wsd_decay_samples": 700 * 16 + 1},
            "optim.wsd_decay_samples",
        ),
    ],
)
def test_refusals_name_the_key(changes: dict[str, Any], key: str):
    with pytest.raises(ConfigError) as refused:
        check(run_of(OptimConfig(**changes)))
    assert refused.value.key == key


def wsd(warmup: int, last: int) -> dict[str, Any]:
    return {"decay": Decay.wsd, "warmup_samples": warmup, "wsd_decay_samples": last}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"warmup_steps": 5, "warmup_samples": 80},
            "optim.warmup_samples=80: optim.warmup_steps=5 says the same in steps: set one "
            "of them; "
            "did you mean null or optim.warmup_steps=null?",
        ),
        (
            {"warmup_samples": 1000, "decay_samples": 1000},
            "optim.warmup_samples=1000: must be below the 1000 decay samples; did you mean 100?",
        ),
        (
            {"warmup_steps": 63, "decay_samples": 1000},
            "optim.warmup_steps=63: must be below the 62.5 decay steps; did you mean 6?",
        ),
        (
            {"decay_steps": 100, **wsd(600, 1001)},
            "optim.wsd_decay_samples=1001: with 600 samples of warm-up longer than the 1600 "
            "decay samples; did you mean 1000?",
        ),
        (
            {
                "decay": Decay.wsd,
                "decay_samples": 1000,
                "warmup_samples": 24,
                "wsd_decay_steps": 62,
            },
            "optim.wsd_decay_steps=62: with 1.5 steps of warm-up longer than the 62.5 decay "
            "steps; did you mean 61?",
        ),
    ],
)
def test_refusals_speak_in_the_unit_that_was_given(changes: dict[str, Any], message: str):
    with pytest.raises(ConfigError) as refused:
        check(run_of(OptimConfig(**changes)))
    assert str(refused.value) == message


@pytest.mark.parametrize("batch", [8, 24, 56])
@pytest.mark.parametrize("decay", Decay)
def test_samples_that_fill_steps_are_these_steps(decay: Decay, batch: int):
    lengths = {"warmup": 7, "decay": 90, "wsd_decay": 13}
    both = {"decay": decay, "weight_decay_end": 0.3, "weight_decay_ramp": Ramp.cosine}
    steps = OptimConfig(**both, **{f"{name}_steps": length for name, length in lengths.items()})
    samples = OptimConfig(
        **both, **{f"{name}_samples": length * batch for name, length in lengths.items()}
    )
    first, second = (
        check(Run(optim=optim, train=TrainConfig(steps=200, global_batch=batch)))
        for optim in (steps, samples)
    )
    assert isinstance(second.decay_steps, int) and second.decay_steps == 90
    for step in range(120):
        assert lr_at(step, first) == lr_at(step, second)
        assert weight_decay_at(step, first) == weight_decay_at(step, second)


@pytest.mark.parametrize("decay", Decay)
def test_another_batch_keeps_the_schedule_over_samples(decay: Decay):
    """100 samples of warm-up, the peak at step 6.25 of 16 samples and at step 12.5 of 8, and so
    on.
    """
    optim = OptimConfig(decay=decay, warmup_samples=100, decay_samples=1000, wsd_decay_samples=300)
    large, small = (
        check(Run(optim=optim, train=TrainConfig(global_batch=batch))) for batch in (16, 8)
    )
    assert large.warmup_steps == 6.25 and small.decay_steps == 125
    for step in range(80):
        assert lr_at(2 * step, small) == pytest.approx(lr_at(step, large), rel=1e-12)
    last = optim.lr if decay is Decay.constant else optim.min_lr
    assert lr_at(63, large) == lr_at(126, small) == last
    assert max(lr_at(step, large) for step in range(80)) <= optim.lr


def test_wsd_decay_may_fill_all_samples_after_warm_up():
    check(
        Run(
            optim=OptimConfig(decay_samples=480, **wsd(100, 380)),
            train=TrainConfig(global_batch=48),
        )
    )
    with pytest.raises(ConfigError, match="did you mean 380"):
        check(
            Run(
                optim=OptimConfig(decay_samples=480, **wsd(100, 381)),
                train=TrainConfig(global_batch=48),
            )
        )


def test_weight_decay_ends_with_the_learning_rates_decay():
    optim = OptimConfig(weight_decay_end=0.3, weight_decay_ramp=Ramp.linear, decay_samples=160)
    at = [weight_decay_at(step, Run(optim=optim)) for step in (0, 5, 10, 11)]  # of 16 samples
    assert at == pytest.approx([0.1, 0.2, 0.3, 0.3])


def lr(step: int, **changes: Any) -> float:
    numbers = {
        "init": 0.0,
        "peak": 1.0,
        "low": 0.1,
        "warmup_steps": 0,
        "decay_steps": 100,
        "decay": Decay.linear,
        "wsd_steps": 20,
        "wsd_decay": WsdDecay.linear,
    }
    return learning_rate(step, **(numbers | changes))


@pytest.mark.parametrize("decay", Decay)
def test_every_decay_goes_from_peak_to_its_last_value(decay: Decay):
    assert lr(0, decay=decay) == lr(10, decay=decay, warmup_steps=10) == 1.0
    last = 1.0 if decay is Decay.constant else 0.1
    assert lr(101, decay=decay) == lr(10**9, decay=decay) == last
    values = [lr(step, decay=decay) for step in range(100)]
    assert values == sorted(values, reverse=True)


@pytest.mark.parametrize(
    ("shape", "halfway"),
    [
        (WsdDecay.linear, 0.55),
        (WsdDecay.cosine, 0.55),
        (WsdDecay.exponential, 0.1 + 0.9 * (2**0.5 - 1)),
        (WsdDecay.minus_sqrt, 0.1 + 0.9 * (1 - 0.5**0.5)),
    ],
)
def test_last_part_of_warmup_stable_decay(shape: WsdDecay, halfway: float):
    assert [lr(s, decay=Decay.wsd, wsd_decay=shape) for s in (0, 50, 80)] == [1.0, 1.0, 1.0]
    assert lr(90, decay=Decay.wsd, wsd_decay=shape) == pytest.approx(halfway)
    assert lr(100, decay=Decay.wsd, wsd_decay=shape) == pytest.approx(0.1)


def test_inverse_square_root_follows_its_formula_to_the_minimum():
    curve = {"decay": Decay.inverse_square_root, "warmup_steps": 4, "decay_steps": 1000}
    assert lr(16, **curve) == pytest.approx(0.5)
    assert lr(999, **curve) == 0.1  # the formula alone says 0.063


@pytest.mark.parametrize(
    ("ramp", "quarter"),
    [
        (Ramp.constant, 0.3),
        (Ramp.linear, 0.15),
        (Ramp.cosine, 0.1 + 0.2 * (1 - 0.5**0.5) / 2),
    ],
)
def test_weight_decay_ramps(ramp: Ramp, quarter: float):
    at = [
        weight_decay(step, start=0.1, end=0.3, ramp_steps=100, ramp=ramp) for step in (25, 100, 101)
    ]
    assert at == pytest.approx([quarter, 0.3, 0.3])


def test_schedules_do_not_need_torch():
    code = "import sys, app.optim.lr; sys.exit('torch' in sys.modules)"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], check=False, cwd=Path(__file__).parents[2]
        ).returncode
        == 0
    )
