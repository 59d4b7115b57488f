"""Choices that are seldom meant are noticed by starts and plans, in one line each."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from app.cli import plan
from app.cli.options.arguments import Typed
from app.cli.options.compose import load_typed
from app.cli.processes.home import CONF
from app.cli.start.notices import WHOLE_RUNS, notices
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
    return [*notices(load_typed(typed), typed)]


def test_default_rate_of_pretrained_models_is_told(words: tuple[str, ...]):
    assert said(*words) == [SAID]
    assert said(*words, "++optim.lr=0.003") == []
    for name in ("finetune", "finetune_lora"):
        assert said(words[1], f"+experiment={name}") == []
    assert said("model=dense_tiny") == []


def test_adapters_without_a_family_are_told():
    line = "lora.rank=4: nothing exports these adapters: no supported Hugging Face family computes"
    assert said("model=dense_tiny", "lora.rank=4") == []
    (found,) = said("model=dense_tiny", "model.norm=layer", "lora.rank=4")
    assert found.startswith(line)


def test_large_models_chosen_alone_are_told():
    run = load_typed(Typed(("model=llama3_8b",)))
    line = "model={} alone trains in fp32 on sequences of 128 tokens, the defaults: "
    for model, advice in (
        ("llama3_8b", "+experiment=llama3_8b sets a whole run of it"),
        ("small", "+experiment=pretrain_small sets a whole run of it"),
        ("qwen3_8b", "type precision=bf16 train.seq_len=4096, for example"),
    ):
        named = replace(run, model=replace(run.model, name=model))
        assert [*notices(named, Typed())] == [line.format(model) + advice]
    for name in ("dense_tiny", "my_own"):
        assert [*notices(replace(run, model=replace(run.model, name=name)), Typed())] == []
    for typed in ("precision=fp32", "precision.params=float32", "train.seq_len=128"):
        assert [*notices(run, Typed((typed,)))] == []
    assert said("+experiment=small") == []


@pytest.mark.full
def test_experiments_set_what_the_line_promises():
    """Models and experiments that the line names together."""
    for path in sorted((CONF / "experiment").glob("*.yaml")):
        if (CONF / "model" / path.name).is_file():
            assert load_typed(Typed((f"+experiment={path.stem}",))).model.name == path.stem
    for model, experiment in WHOLE_RUNS.items():
        assert load_typed(Typed((f"+experiment={experiment}",))).model.name == model


def test_long_runs_on_the_default_documents_are_told():
    typed = Typed(("+experiment=llama3_8b",))
    run = load_typed(typed)
    assert [*notices(run, typed)] == [
        "160 billion tokens of data=stdlib, the default, are the same few files many times over: "
        "give documents, like data=jsonl data.path=corpus.jsonl"
    ]
    assert [*notices(run, typed, trains=False)] == []
    short = replace(run, train=replace(run.train, steps=100))
    assert [*notices(short, typed)] == []
    assert said(*typed.overrides, "data=jsonl", "data.path=corpus.jsonl") == []


def test_plans_tell_the_default_rate(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]):
    assert plan.main(["what=groups", *words, "out=null"]) == 0
    assert capsys.readouterr().err == f"plan: {SAID}\n"
    assert plan.main(["what=groups", *words, "out=null", "optim.lr=1e-5", "optim.min_lr=0"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.full
def test_starts_of_several_ranks_tell_notices_once(tmp_path: Path):
    save_pretrained(tmp_path / "theirs", experts=0)
    kept = [word for word in corpus_in(tmp_path / "corpus") if not word.startswith("model")]
    words = [*kept, "model=pretrained", "model.init_from=theirs", "train.steps=1",
             "data.tokenizer=theirs"]  # fmt: skip
    line = [sys.executable, str(ROOT / "train.py"), *words, "run_dir=run", "parallel.dp=2"]
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/own.yaml").write_text("# @package _global_\noptim: {beta1: 0.8}\n")
    own = "--config-dir", str(tmp_path), "+experiment=own", "optim=adamw"
    done = run_forked(tmp_path, [*line, *own])
    assert done.returncode == 0, done.stderr
    overlaid = "train.py: optim=adamw: +experiment=own sets optim.beta1=0.8 over it;"
    for each in (f"train.py: {SAID}\n", overlaid):
        assert done.stderr.count(each) == 1, done.stderr
