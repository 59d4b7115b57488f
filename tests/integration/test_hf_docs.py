"""docs/hugging-face.md: its three commands, from a model to a trained one and back."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import torch

from tests.hf_folders import save_byte_level, save_random, transformers
from tests.programs import run_forked
from tests.training import ROOT, corpus_in

PAGE = (ROOT / "docs/hugging-face.md").read_text()
SMALLER = {"train.seq_len": "32", "train.steps": "2"}
TEXT = "def plan(run):"


def commands() -> list[list[str]]:
    """The first block of the page, a list of words for each command."""
    block = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)[0]
    return [shlex.split(line) for line in block.replace("\\\n", "").splitlines()]


def smaller(words: list[str]) -> list[str]:
    """As typed on the page, but for the length of the run, and another model."""
    replaced = {"Qwen/Qwen3-0.6B": "theirs", "train.py": str(ROOT / "train.py")}
    values = (word.partition("=") for word in words)
    shorter = [f"{key}={SMALLER[key]}" if key in SMALLER else f"{key}{sign}{value}"
               for key, sign, value in values]  # fmt: skip
    return [replaced.get(word, word) for word in shorter]


def test_a_model_in_three_commands(tmp_path: Path):
    theirs = tmp_path / "theirs"
    save_random("qwen3", theirs, vocab_size=264)
    save_byte_level(theirs / "tokenizer.json")
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (theirs / "tokenizer_config.json").write_text(json.dumps(kind))
    typed = [word for word in corpus_in(tmp_path / "corpus") if word.startswith("train.")]
    there, train, back = map(smaller, commands())
    shape = [word for word in typed if not word.startswith(tuple(SMALLER))]
    for words in (there, [*train, *shape, "log=none", "data.cache_dir=cache"], back):
        ended = run_forked(tmp_path, [sys.executable, *words[1:]])
        assert ended.returncode == 0, ended.stderr
    folder = tmp_path / "qwen3-trained"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    assert model.dtype == torch.bfloat16 and model(ids).logits.isfinite().all()
    assert tokenizer.decode(ids[0]) == TEXT
    before = transformers.AutoModelForCausalLM.from_pretrained(theirs).model.norm.weight
    moved = (model.model.norm.weight - before).abs().max()
    assert 0 < moved < 0.02
