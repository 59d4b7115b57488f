"""Hugging Face models are asked as checkpoints are: the same texts, the same numbers; and
lm-evaluation-harness finds these numbers too.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from app.cli import convert
from app.cli.options.saved import saved_run
from app.engine.run.run_folder import plain
from app.errors import ConfigError
from tests.integration.test_evaluate import evaluated
from tests.integration.test_generate import generated
from tests.pretrained_model import CONTEXT, TEXT, save_pretrained
from tests.runs import make_run, with_model

QUESTIONS = [
    {"prompt": "the cat sat on", "choices": [" the mat", " a hat", " that"], "answer": 0},
    {"prompt": "and the dog ", "choices": ["ate", "sat on the mat"], "answer": 1},
    {"prompt": "that", "choices": [" hat", " dog", " cat and the dog", "s"], "answer": 2},
    {"prompt": "a mat: ", "choices": ["on", "off, I would say"], "answer": 0},
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same model as others give it, as a checkpoint that no run has trained, and exported."""
    home = tmp_path_factory.mktemp("models")
    found = {name: home / name for name in ("theirs", "run", "out")}
    save_pretrained(found["theirs"], experts=4)
    for words in (["from-hf", "theirs", "run"], ["to-hf", "run", "out"]):
        assert convert.main([words[0], *(str(home / name) for name in words[1:])]) == 0
    (home / "text.txt").write_text(TEXT)
    lines = [json.dumps(question) + "\n" for question in QUESTIONS]
    (home / "questions.jsonl").write_text("".join(lines))
    return found


def test_a_model_s_folder_is_asked_as_a_run_is(folders: dict[str, Path]):
    words = ("prompt=the cat", "max_new_tokens=12", "temperature=0")
    texts = {name: generated(folder, *words) for name, folder in folders.items()}
    codes, said, told = zip(*texts.values(), strict=True)
    assert codes == (0, 0, 0), told
    assert len(set(said)) == 1 and said[0].startswith("the cat") and len(said[0]) > 10
    assert all(f"float32, 1 process on cpu, context {CONTEXT}" in err for err in told)
    known = {name: evaluated(folder, "data.path=text.txt") for name, folder in folders.items()}
    numbers = {each[:2] for each in known.values()}
    assert len(numbers) == 1, known
    assert known["out"][1].startswith("perplexity ") and f"context {CONTEXT}" in known["out"][1]


def test_where_training_began_need_not_be_there():
    config = plain(asdict(with_model(make_run(), init_from="/nowhere/model")))
    run = saved_run(config, ["train.seq_len=24"], None)
    assert (run.model.init_from, run.train.seq_len) == (None, 24)


@pytest.mark.parametrize("word", ["num_layers=2", "moe.num_experts=2", "vocab_size=256"])
def test_weights_are_of_one_model(word: str):
    config = plain(asdict(make_run()))
    key, _, value = f"model.{word}".partition("=")
    with pytest.raises(ConfigError, match="the weights are of a model with") as refused:
        saved_run(config, ["model.rope_theta=5", f"{key}={value}"], None)
    assert str(refused.value).startswith(f"{key}={value}: ")


@pytest.mark.full
def test_a_model_s_folder_is_cut_as_a_checkpoint_is(folders: dict[str, Path]):
    alone = evaluated(folders["out"], "choices=questions.jsonl")
    for layout in ("parallel.tp=2", "parallel.pp=2"):
        assert evaluated(folders["out"], "choices=questions.jsonl", layout)[:2] == alone[:2]
