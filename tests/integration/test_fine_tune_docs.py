"""docs/fine-tune.md: its commands, from a model to a trained one and back."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.hf_folders import save_byte_level, save_random, transformers
from tests.programs import run_forked
from tests.training import ROOT, corpus_in

pytestmark = pytest.mark.docs

PAGE = (ROOT / "docs/fine-tune.md").read_text()
SMALLER = {"train.seq_len": "32", "train.steps": "2", "parallel.dp": "1"}
TEXT = "def plan(run):"


def commands(number: int) -> list[list[str]]:
    """A block of the page, a list of words for each command."""
    block = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)[number]
    return [shlex.split(line) for line in block.replace("\\\n", "").splitlines()]


def smaller(words: list[str]) -> list[str]:
    """As typed on the page, but for the length of the run, and another model."""
    replaced = {"Qwen/Qwen3-0.6B": "theirs", "train.py": str(ROOT / "train.py")}
    values = (word.partition("=") for word in words)
    shorter = [f"{key}={SMALLER[key]}" if key in SMALLER else f"{key}{sign}{value}"
               for key, sign, value in values]  # fmt: skip
    return [replaced.get(word, word) for word in shorter]


def save_model(folder: Path) -> None:
    """A random model whose heads two ranks can share, with a tokenizer of its own."""
    save_random("llama", folder, vocab_size=264)
    save_byte_level(folder / "tokenizer.json")
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(kind))


def run_words(folder: Path, words: list[str]) -> None:
    """A command of the page; a training on a small corpus."""
    if words[1].endswith("train.py"):
        typed = [word for word in corpus_in(folder / "corpus") if word.startswith("train.")]
        shape = [word for word in typed if not word.startswith(tuple(SMALLER))]
        words = [*words, *shape, "log=none", "data.cache_dir=cache"]
    ended = run_forked(folder, [sys.executable, *words[1:]], tree=True)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.full
def test_a_model_in_three_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    theirs = tmp_path / "theirs"
    save_model(theirs)
    for words in map(smaller, commands(1)):
        run_words(tmp_path, words)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec("".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)), names)
    model, tokenizer = names["model"], names["tokenizer"]
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    assert model.dtype == torch.bfloat16 and model(ids).logits.isfinite().all()
    assert tokenizer.decode(ids[0]) == TEXT
    before = transformers.AutoModelForCausalLM.from_pretrained(theirs).model.norm.weight
    moved = (model.model.norm.weight - before).abs().max()
    assert 0 < moved < 0.02


@pytest.mark.full
def test_without_a_conversion(tmp_path: Path):
    """From the files themselves to an export at the end; two ranks instead of eight."""
    download, *others = commands(0)
    *_, brought = download
    assert download == ["hf", "download", "Qwen/Qwen3-0.6B", "--local-dir", brought]
    save_model(tmp_path / brought)
    for words in map(smaller, others):
        run_words(tmp_path, words)
    (exported,) = tmp_path.glob("runs/qwen3-tuned/hugging_face")
    model = transformers.AutoModelForCausalLM.from_pretrained(exported)
    assert model.dtype == torch.bfloat16 and (exported / "tokenizer_config.json").exists()
