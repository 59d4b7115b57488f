"""Shared by test_continuation.py and other tests."""

from __future__ import annotations

import json

from tokenizers import Tokenizer, decoders, models, normalizers, trainers

from app.data.tokenizer import JsonTokenizer


def words_with_spaces() -> Tokenizer:
    """Tokenizer like Llama 2's and Mixtral's: it drops a space before the text, and encodes unknown
    text as bytes.
    """
    pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    found = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    found.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    found.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    found.train_from_iterator(
        ["the cat sat ran so dog, ; 12345"],
        trainers.BpeTrainer(
            vocab_size=320, special_tokens=["<unk>", "</s>", *pieces], show_progress=False
        ),
    )
    return found


def spaced() -> JsonTokenizer:
    """With bytes that are no special tokens, which decoders would leave out."""
    contents = json.loads(words_with_spaces().to_str())
    added = contents["added_tokens"]
    contents["added_tokens"] = [each for each in added if not each["content"].startswith("<0x")]
    backend = Tokenizer.from_str(json.dumps(contents))
    return JsonTokenizer(backend, backend.get_vocab_size(), backend.token_to_id("</s>"))
