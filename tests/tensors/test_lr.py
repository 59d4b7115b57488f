"""Schedules of the learning rate against the values of Megatron-Core 0.16.1."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from app.choices import Decay, WsdDecay
from app.config import OptimConfig, Run
from app.errors import ConfigError
from app.optim.lr import learning_rate, lr_at
from app.rules import check
from tests.oracle import oracle

CASES = oracle("numerics")["lr_schedule"]
# warm-up begins at 0 here, and weight decay is constant
OURS = [case for case in CASES if not case["args"]["init_lr"]]
ACCEPTED = [case for case in OURS if "error" not in case]
REJECTED = [
    case for case in OURS if "error" in case and case["args"]["start_wd"] == case["args"]["end_wd"]
]


def label(case: dict[str, Any]) -> str:
    keys = ("lr_decay_style", "lr_wsd_decay_style", "wd_incr_style", "init_lr", "lr_warmup_steps")
    return "-".join(str(case["args"].get(key)) for key in keys)


def config_of(args: dict[str, Any]) -> OptimConfig:
    """The optimizer section that says what these arguments say."""
    wsd = {}
    if args["lr_decay_style"] == "WSD":
        wsd = {
            "wsd_decay_steps": args.get("wsd_decay_steps"),
            "wsd_decay": WsdDecay(args.get("lr_wsd_decay_style")),
        }
    return OptimConfig(
        lr=args["max_lr"],
        min_lr=args["min_lr"],
        warmup_steps=args["lr_warmup_steps"],
        decay=Decay(args["lr_decay_style"].lower().replace("-", "_")),
        decay_steps=args["lr_decay_steps"],
        **wsd,
    )


def run_of(optim: OptimConfig) -> Run:
    return Run(optim=optim)


@pytest.mark.parametrize("case", ACCEPTED, ids=label)
def test_schedule_equals_golden(case: dict[str, Any]):
    args, optim = case["args"], config_of(case["args"])
    check(run_of(optim))
    for step, *groups in case["values"]:
        for (wanted, _), group in zip(groups, case["groups"] or [{}], strict=True):
            lr = learning_rate(
                step,
                peak=group.get("max_lr", optim.lr),
                low=group.get("min_lr", optim.min_lr),
                warmup_steps=optim.warmup_steps,
                decay_steps=args["lr_decay_steps"],
                decay=optim.decay,
                wsd_steps=optim.wsd_decay_steps or 0,
                wsd_decay=optim.wsd_decay,
            )
            assert lr * group.get("lr_mult", 1) == pytest.approx(wanted, rel=1e-12, abs=1e-18)
            assert group or lr == lr_at(step, run_of(optim))


@pytest.mark.parametrize("case", REJECTED, ids=label)
def test_impossible_schedules_are_refused_by_the_config(case: dict[str, Any]):
    # A missing shape for the last part is refused by its type: the config always has one.
    with pytest.raises(ValueError):
        check(run_of(config_of(case["args"])))


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"min_lr": 4e-3}, "optim.min_lr"),
        ({"warmup_steps": 700}, "optim.warmup_steps"),
        ({"decay_steps": 20, "warmup_steps": 20}, "optim.warmup_steps"),
        ({"decay_steps": 0}, "optim.decay_steps"),
        ({"decay": Decay.wsd}, "optim.wsd_decay_steps"),
        ({"decay": Decay.wsd, "wsd_decay_steps": 701}, "optim.wsd_decay_steps"),
        ({"weight_decay": -0.1}, "optim.weight_decay"),
        # 35 steps of warm-up where none are given
        ({"decay": Decay.wsd, "wsd_decay_steps": 690}, "optim.wsd_decay_steps"),
        ({"warmup_steps": -1}, "optim.warmup_steps"),
    ],
)
def test_refusals_name_the_key(changes: dict[str, Any], key: str):
    with pytest.raises(ConfigError) as refused:
        check(run_of(OptimConfig(**changes)))
    assert refused.value.key == key


def lr(step: int, **changes: Any) -> float:
    numbers = {
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


def test_schedules_do_not_need_torch():
    code = "import sys, app.optim.lr; sys.exit('torch' in sys.modules)"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], check=False, cwd=Path(__file__).parents[2]
        ).returncode
        == 0
    )
