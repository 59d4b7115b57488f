"""Which known word another one is near: few slips beside its letters, and no guess otherwise."""

from __future__ import annotations

import pytest

from app.cli.options.unknown import like_key
from app.errors import near_names, nearest


@pytest.mark.parametrize(
    ("word", "known", "found"),
    [
        ("statik", ["auto", "static"], "static"),
        ("modle", ["model", "mode"], "model"),
        ("1F1B", ["1f1b", "gpipe"], "1f1b"),
        ("all-to-all", ["all_to_all"], "all_to_all"),
        ("txt", ["id", "text"], "text"),
        ("batch_micro", ["micro_batch", "global_batch"], "micro_batch"),
        ("llama", ["llama3_8b", "small"], "llama3_8b"),
        ("cuda:0", ["cpu", "cuda"], "cuda"),
        ("small", ["small", "smallmoe"], "small"),
        ("a100", ["h100", "h200"], None),
        ("gpu", ["auto", "cpu", "cuda"], None),
        ("wikitext", ["hub", "text"], None),
        ("xx", ["tp", "pp"], None),
    ],
)
def test_the_nearest_word(word: str, known: list[str], found: str | None):
    assert nearest(word, known) == found


def test_equally_near_words_are_all_found():
    assert near_names("beta3", ["beta1", "beta2", "alpha"]) == ["beta1", "beta2"]


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("train.step", "train.steps"),
        ("train.seq", "train.seq_len"),
        ("train.eval", "train.eval_interval or train.eval_sequences"),
        ("model.rope", "model.rope_theta"),
        ("modl.num_layers", "model.num_layers"),
        ("model/num_layers", "model.num_layers"),
        ("parallel.num_layers", "model.num_layers"),
        ("train.foo", None),
        ("gpu", None),
    ],
)
def test_the_key_that_is_meant(word: str, key: str | None):
    assert like_key(word) == key
