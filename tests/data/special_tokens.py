"""Shared by test_special_tokens.py and other tests."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers

LETTERS = sorted(set("▁abcdefghijklmnopqrstuvwxyz.,<>/[]|_0123456789EOSUNKPAD"))


def saved(folder: Path, special: list[str], ordinary: list[str], **settings: object) -> Path:
    """A tokenizer whose ordinary words are built from letters; files beside it by name, where `_`
    stands for a file's `.json`.
    """
    vocab = {token: number for number, token in enumerate([*special, *LETTERS, *ordinary])}
    merges = []
    for word in ordinary:
        for size in range(2, len(word) + 1):
            vocab.setdefault(word[:size], len(vocab))
            if (pair := (word[: size - 1], word[size - 1])) not in merges:
                merges.append(pair)
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    tokenizer.add_special_tokens(special)
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, contents in settings.items():
        (folder / f"{name}.json").write_text(json.dumps(contents))
    return folder / "tokenizer.json"


GEMMA = ["<pad>", "<eos>", "<bos>", "<unk>"]


QWEN = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


TWO = ["<unk>", "</s>", "<|endoftext|>"]
