"""Advice is called one that works only once the whole configuration has passed with it."""

from __future__ import annotations

import pickle
import random
from collections.abc import Sequence

import pytest

from app.cli.options import trial
from app.cli.options.arguments import Typed
from app.cli.options.compose import load_typed
from app.cli.options.messages import trial_of
from app.cli.options.trial import MOST_TRIED, tried
from app.errors import ConfigError, FirstOf, Instead

WRONG = ConfigError("a.b", 3, "is odd", nearest=(FirstOf([1, 2, 4]), 5, Instead("c=1", "d=2")))


def trial_that_takes(*good: tuple[str, ...]):
    return lambda overrides: None if tuple(overrides) in good else WRONG


def test_only_what_passes_is_said_to_work():
    assert str(WRONG) == "a.b=3: is odd; did you mean 1 or 5 or c=1 d=2?"
    found = tried(WRONG, trial_that_takes(("a.b=2",), ("a.b=4",), ("c=1", "d=2")))
    assert str(found) == "a.b=3: is odd; nearest that works: 2 or c=1 d=2"
    assert str(tried(WRONG, trial_that_takes())) == "a.b=3: is odd"
    assert str(pickle.loads(pickle.dumps(found))) == str(found)


def test_what_a_candidate_breaks_is_mended_too():
    broken = ConfigError("b", 16, "is too small", nearest=FirstOf([32]))
    faults = {(): WRONG, ("a.b=5",): broken, ("a.b=5", "b=32"): None}
    found = tried(WRONG, lambda overrides: faults.get(tuple(overrides), WRONG))
    assert str(found) == "a.b=3: is odd; nearest that works: a.b=5 b=32"


def test_a_trial_without_the_mistake_proves_nothing():
    assert tried(WRONG, lambda overrides: None) is WRONG
    other = ConfigError("x", 1, "comes first")
    assert tried(WRONG, lambda overrides: other) is WRONG


def test_trying_ends_when_time_is_up(monkeypatch: pytest.MonkeyPatch):
    """Every trial takes a second of this clock."""
    asked: list[Sequence[str]] = []
    monkeypatch.setattr(trial.time, "monotonic", lambda: float(len(asked)))
    monkeypatch.setattr(trial, "TRYING_S", 1.0)
    found = tried(WRONG, lambda overrides: asked.append(overrides) or WRONG)
    assert found is WRONG and len(asked) == 2


def test_few_candidates_are_tried():
    asked: list[Sequence[str]] = []
    other = ConfigError("x", 1, "comes first")
    endless = ConfigError("a", 0, "no", nearest=FirstOf(range(1, 1000)))
    tried(endless, lambda overrides: asked.append(overrides) or (other if overrides else endless))
    assert len(asked) == MOST_TRIED + 2


POOL = {
    "parallel.dp": (1, 2, 3, 8),
    "parallel.tp": (1, 2, 3, 4),
    "parallel.pp": (1, 2, 3, 5),
    "parallel.vpp": (1, 2, 3),
    "parallel.ep": (1, 2, 3, 8, 16),
    "parallel.etp": (1, 2, 5),
    "parallel.cp": (1, 2, 3),
    "train.seq_len": (64, 100),
    "train.global_batch": (8, 12, 16, 64),
    "train.micro_batch": (1, 3, 8),
    "model.num_layers": (1, 4, 6),
    "model.num_heads": (2, 3, 4),
    "schedule.name": ("auto", "gpipe", "interleaved", "zero_bubble_v"),
    "cuda_graph.impl": ("none", "local", "full_iteration"),
    "cuda_graph.scope": ("[]", "[attn]", "[moe]"),
    "model.moe.top_k": (1, 2, 9),
    "recompute.full": ("true", "false"),
}


@pytest.mark.parametrize(
    "seed", [pytest.param(n, marks=[pytest.mark.full] * (n > 1)) for n in range(40)]
)
def test_what_is_said_to_work_passes(seed: int, monkeypatch: pytest.MonkeyPatch):
    """Drawn configurations: whatever a refusal offers is typed in the place of what was refused."""
    monkeypatch.setattr("app.cli.options.trial.TRYING_S", 300.0)  # untried, candidates are guesses
    draw = random.Random(seed)
    chosen = draw.sample(sorted(POOL), 4)
    typed = Typed(tuple(f"{key}={draw.choice(POOL[key])}" for key in chosen))
    trial = trial_of(lambda overrides: load_typed(typed.with_overrides(overrides)))
    if (error := trial(())) is None:
        return
    found = tried(error, trial)
    for alternative in found.alternatives:
        (candidate,) = alternative.candidates
        load_typed(typed.with_overrides(found.override(candidate)))
    assert ("nearest that works" in str(found)) == bool(found.alternatives)
    assert "did you mean" not in str(found) or found.guess
