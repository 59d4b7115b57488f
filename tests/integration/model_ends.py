"""Shared by test_model_ends.py and other tests."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, normalizers

WORDS = ["▁the", "▁quick", "▁brown", "▁fox", "▁jumps"]


SPECIAL = ["<unk>", "<s>", "</s>", "<turn>"]


SIZE = 96


def tokenizer_of_words() -> Tokenizer:
    """As Llama 2's: words are tokens, a blank is the "▁" in front of them."""
    letters = {letter: None for letter in "▁".join(["", *map(chr, range(97, 123))])}
    vocab = {token: number for number, token in enumerate([*SPECIAL, *letters])}
    merges = []
    for word in WORDS:
        for size in range(2, len(word) + 1):
            vocab.setdefault(word[:size], len(vocab))
            if (pair := (word[: size - 1], word[size - 1])) not in merges:
                merges.append(pair)
    found = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>"))
    found.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    found.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    found.add_special_tokens(SPECIAL)
    return found
