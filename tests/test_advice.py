"""Advice is called one that works only once the whole configuration has passed with it."""

from __future__ import annotations

import pickle
import random
from collections.abc import Sequence

import pytest

from app.cli.options.advice import MOST_TRIALS, MOST_TRIED, Asked, tried
from app.cli.options.arguments import Typed, key_of
from app.cli.options.compose import load_typed
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


def test_guesses_stay_where_nothing_is_wrong_by_the_rules():
    """What was refused lies outside of the configuration; a guess that breaks it is left out."""
    assert str(tried(WRONG, lambda overrides: None)) == str(WRONG)
    broken = ConfigError("b", 16, "is too small")
    faults = {("a.b=1",): broken, ("a.b=2",): broken, ("a.b=4",): broken, ("a.b=5",): None}
    found = tried(WRONG, lambda overrides: faults.get(tuple(overrides)))
    assert str(found) == "a.b=3: is odd; did you mean 5 or c=1 d=2?"


def test_another_mistake_leaves_no_advice():
    other = ConfigError("x", 1, "comes first")
    assert str(tried(WRONG, lambda overrides: other)) == "a.b=3: is odd"


def test_few_candidates_are_tried():
    asked: list[Sequence[str]] = []
    other = ConfigError("x", 1, "comes first")
    endless = ConfigError("a", 0, "no", nearest=FirstOf(range(1, 1000)))
    tried(endless, lambda overrides: asked.append(overrides) or (other if overrides else endless))
    assert len(set(map(tuple, asked))) == MOST_TRIED + 1 and len(asked) <= MOST_TRIALS + 1


def test_all_trials_of_a_message_are_counted():
    asked: list[Sequence[str]] = []
    many = ConfigError("a", 0, "no", nearest=tuple(range(1, 1000)))
    found = tried(many, lambda overrides: asked.append(overrides) or many)
    assert len(asked) == MOST_TRIALS + 1 and str(found) == "a=0: no"


def test_what_was_typed_beside_the_mistake_stays():
    found = tried(WRONG, trial_that_takes(("a.b=2",), ("c=1", "d=2")), ["a.b=3", "c=2"])
    assert str(found) == "a.b=3: is odd; nearest that works: 2"


@pytest.mark.parametrize(
    ("given", "override", "may_change"),
    [
        ("", "model.num_layers=3", True),
        ("parallel.tp=2", "parallel.tp=1", False),
        ("parallel.tp=2", "parallel.pp=1", True),
        ("schedule=1f1b", "schedule.name=gpipe", False),
        ("model=llama3_8b", "model.num_layers=3", False),
        ("model=dense_tiny", "model.num_layers=3", True),
        ("+experiment=smallmoe", "model.moe.num_experts=8", False),
        ("+experiment=smallmoe", "train.steps=8", True),
        ("+experiment=smoke", "model.num_layers=3", True),
    ],
)
def test_what_a_command_line_fixes(given: str, override: str, may_change: bool):
    wrong = ConfigError("a.b", 3, "is odd", nearest=Instead(override))
    found = tried(wrong, lambda words: None if words else wrong, [given] * bool(given))
    assert (override in str(found)) == may_change


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
    "seed", [pytest.param(n, marks=[pytest.mark.full] * (n > 0)) for n in range(40)]
)
def test_what_is_said_to_work_passes(seed: int):
    """Drawn configurations: whatever a refusal offers is typed in the place of what was refused,
    and changes one typed key at most.
    """
    draw = random.Random(seed)
    chosen = draw.sample(sorted(POOL), 4)
    typed = Typed(tuple(f"{key}={draw.choice(POOL[key])}" for key in chosen))
    try:
        load_typed(typed)
        return
    except ConfigError as error:
        found = Asked(typed, load_typed).advised(error)
    for alternative in found.alternatives:
        (candidate,) = alternative.candidates
        overrides = found.override(candidate)
        load_typed(typed.with_overrides(overrides))
        assert len({key_of(word) for word in overrides} & set(chosen)) <= 1
    assert ("nearest that works" in str(found)) == bool(found.alternatives)
    assert "did you mean" not in str(found)
