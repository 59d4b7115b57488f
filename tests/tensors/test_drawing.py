"""Sampling of a token, compared with distributions computed by hand."""

from __future__ import annotations

import pytest
import torch

from app.engine.decoding.drawing import Sampling
from app.errors import ConfigError

PROBS = torch.tensor([[0.1, 0.4, 0.2, 0.3], [0.25, 0.05, 0.65, 0.05]])
LOGITS = PROBS.log()


@pytest.mark.parametrize(
    ("sampling", "first", "second"),
    [
        (Sampling(), [0.1, 0.4, 0.2, 0.3], [0.25, 0.05, 0.65, 0.05]),
        (Sampling(top_k=2), [0, 4 / 7, 0, 3 / 7], [0.25 / 0.9, 0, 0.65 / 0.9, 0]),
        (Sampling(top_k=9), [0.1, 0.4, 0.2, 0.3], [0.25, 0.05, 0.65, 0.05]),
        (Sampling(top_p=0.6), [0, 4 / 7, 0, 3 / 7], [0, 0, 1, 0]),
        (Sampling(top_p=0.75), [0, 4 / 9, 2 / 9, 3 / 9], [0.25 / 0.9, 0, 0.65 / 0.9, 0]),
        (Sampling(top_p=1e-6), [0, 1, 0, 0], [0, 0, 1, 0]),
        (Sampling(top_k=3, top_p=0.5), [0, 4 / 7, 0, 3 / 7], [0, 0, 1, 0]),
        (Sampling(temperature=0.5), [1 / 30, 16 / 30, 4 / 30, 9 / 30], None),
    ],
    ids=str,
)
def test_probabilities(sampling: Sampling, first: list[float], second: list[float] | None):
    found = sampling.probabilities(LOGITS)
    assert found[0].tolist() == pytest.approx(first, abs=1e-6)
    assert second is None or found[1].tolist() == pytest.approx(second, abs=1e-6)


def test_draws_follow_them_and_repeat_with_the_seed():
    sampling = Sampling(top_p=0.75)
    logits = LOGITS[:1].expand(2000, 4)
    first, again, other = (
        sampling.draw(logits, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)
    )
    assert first.equal(again) and not first.equal(other)
    shares = first.bincount(minlength=4) / len(first)
    # six standard deviations
    assert shares.tolist() == pytest.approx([0, 4 / 9, 2 / 9, 3 / 9], abs=6 * 0.5 / 2000**0.5)


def test_parts_are_drawn_as_the_whole_is():
    sampling = Sampling(top_k=3)
    logits = LOGITS.repeat(50, 1)
    whole = sampling.draw(logits, torch.Generator().manual_seed(1))
    parts = [
        sampling.draw(
            logits[first : first + 25], torch.Generator().manual_seed(1), first, together=100
        )
        for first in range(0, 100, 25)
    ]
    assert torch.cat(parts).equal(whole)


def test_without_temperature_it_is_the_likeliest():
    generator = torch.Generator().manual_seed(3)
    assert Sampling(temperature=0).draw(LOGITS, generator).tolist() == [1, 2]


@pytest.mark.parametrize(
    ("key", "value"),
    [("temperature", -1.0), ("temperature", float("nan")), ("top_k", 0), ("top_p", 0.0),
     ("top_p", 1.5)],
)  # fmt: skip
def test_what_cannot_be_drawn_by_is_refused(key: str, value: float):
    with pytest.raises(ConfigError, match=f"^{key}="):
        Sampling(**{key: value})
