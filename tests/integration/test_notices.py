"""A published model at the learning rate of random weights is noticed by starts and plans."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from app.cli import plan
from app.cli.options.arguments import Typed
from app.cli.options.compose import load_typed
from app.cli.start.usual_rate import usual_rate
from tests.pretrained_model import save_pretrained
from tests.programs import run_forked
from tests.training import ROOT, corpus_in

SIZES = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 280,
    "rms_norm_eps": 1e-6, "max_position_embeddings": 64,
}  # fmt: skip
SAID = (
    "optim.lr=0.003 is the default, for random weights, and far too high for those of "
    "model.init_from: type optim.lr and optim.min_lr, or begin with +experiment=finetune or "
    "+experiment=finetune_lora"
)


@pytest.fixture
def words(tmp_path: Path) -> tuple[str, ...]:
    (tmp_path / "config.json").write_text(json.dumps(SIZES))
    return "model=pretrained", f"model.init_from={tmp_path}"


def said(*words: str) -> list[str]:
    typed = Typed(words)
    return [*usual_rate(load_typed(typed), typed)]


def test_default_rate_of_pretrained_models_is_told(words: tuple[str, ...]):
    assert said(*words) == [SAID]
    assert said(*words, "++optim.lr=0.003") == []
    for name in ("finetune", "finetune_lora"):
        assert said(words[1], f"+experiment={name}") == []
    assert said("model=dense_tiny") == []


def test_plans_tell_the_default_rate(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]):
    assert plan.main(["what=groups", *words, "out=null"]) == 0
    assert capsys.readouterr().err == f"plan: {SAID}\n"
    assert plan.main(["what=groups", *words, "out=null", "optim.lr=1e-5", "optim.min_lr=0"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.full
def test_starts_tell_the_default_rate_once(tmp_path: Path):
    save_pretrained(tmp_path / "theirs", experts=0)
    kept = [word for word in corpus_in(tmp_path / "corpus") if not word.startswith("model")]
    words = [*kept, "model=pretrained", "model.init_from=theirs", "train.steps=1",
             "data.tokenizer=theirs"]  # fmt: skip
    line = [sys.executable, str(ROOT / "train.py"), *words, "run_dir=run", "parallel.dp=2"]
    done = run_forked(tmp_path, line)
    assert done.returncode == 0 and done.stderr.count(f"train.py: {SAID}\n") == 1, done.stderr
