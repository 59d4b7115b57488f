from __future__ import annotations

import itertools
import pickle
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from app.data import slices
from app.data.slices import TokenBuffer
from app.data.tokenizer import (
    ByteTokenizer,
    JsonTokenizer,
    bytes_as_json,
    load_tokenizer,
)
from app.errors import ConfigError

BYTES_FILE = Backend.from_str(bytes_as_json())


def write_bpe(path: Path, special: tuple[str, ...] = ("<|endoftext|>",)) -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=list(special),
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator(["the cat sat on the mat", "the hat of the cat"] * 5, trainer)
    backend.save(str(path))
    return backend


@given(st.text())
def test_bytes_there_and_back(text: str):
    tokenizer = load_tokenizer("bytes")
    ids = tokenizer.encode(text)
    assert list(ids) == list(text.encode("utf-8", errors="replace"))
    assert (
        tokenizer.decode([*ids, tokenizer.eod]) == text.encode("utf-8", errors="replace").decode()
    )


@given(st.text())
def test_bytes_in_a_file_are_the_same_bytes(text: str):
    assume("<|endoftext|>" not in text)
    text = text.encode("utf-8", errors="replace").decode()
    ids = BYTES_FILE.encode(text).ids
    assert ids == list(text.encode()) and BYTES_FILE.decode([*ids, 256]) == text


def test_bytes_numbers():
    tokenizer = load_tokenizer("bytes")
    assert (tokenizer.vocab_size, tokenizer.eod) == (257, 256)
    assert tokenizer.decode(np.array([104, 256, 105, 255])) == "hi\ufffd"
    assert [list(ids) for ids in tokenizer.encode_batch(["a", ""])] == [[97], []]
    assert list(tokenizer.encode("\ud800")) == [ord("?")]


def test_json_file(tmp_path: Path):
    backend = write_bpe(tmp_path / "bpe.json")
    tokenizer = load_tokenizer(str(tmp_path / "bpe.json"))
    text = "the cat, the mat — déjà vu"
    assert tokenizer.vocab_size == backend.get_vocab_size()
    assert tokenizer.eod == backend.token_to_id("<|endoftext|>")
    assert (
        tokenizer.encode(text) == backend.encode(text).ids == tokenizer.encode_batch(["x", text])[1]
    )
    assert tokenizer.decode([*tokenizer.encode(text), tokenizer.eod]) == text


def test_json_file_saved_with_truncation_and_padding(tmp_path: Path):
    backend = write_bpe(tmp_path / "bpe.json")
    long = "the cat sat on the mat " * 20
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    backend.save(str(tmp_path / "cut.json"))
    for text in (long, "cat"):
        assert load_tokenizer(str(tmp_path / "cut.json")).encode(text) == load_tokenizer(
            str(tmp_path / "bpe.json")
        ).encode(text)


def test_highest_id_counts_when_ids_have_gaps(tmp_path: Path):
    backend = Backend(models.WordLevel({"a": 0, "b": 40, "</s>": 7}, unk_token="a"))
    backend.add_special_tokens(["</s>"])
    backend.save(str(tmp_path / "gap.json"))
    tokenizer = load_tokenizer(str(tmp_path / "gap.json"))
    assert (tokenizer.vocab_size, tokenizer.eod) == (41, 7)


def test_no_end_of_document_names_the_special_tokens(tmp_path: Path):
    write_bpe(tmp_path / "bpe.json", special=("<stop>", "<pad>"))
    with pytest.raises(
        ConfigError, match=r"data\.tokenizer=.*bpe\.json.*special tokens: <stop>, <pad>"
    ):
        load_tokenizer(str(tmp_path / "bpe.json"))


def test_missing_and_broken_files(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"data\.tokenizer=.*no such file") as missing:
        load_tokenizer(str(tmp_path / "tokenizer.json"))
    assert missing.value.nearest is None
    (tmp_path / "tokeniser.json").write_text("{}")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"did you mean .*tokeniser\.json"):
        load_tokenizer(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match=r"has no tokenizer.json"):  # a folder
        load_tokenizer(str(tmp_path))
    with pytest.raises(ConfigError, match="not a tokenizers JSON file"):
        load_tokenizer(str(tmp_path / "config.json"))


def test_equal_tokenizers_pickle_equally(tmp_path: Path):
    """The cache is found again only if they do, in another process too."""
    write_bpe(tmp_path / "bpe.json")
    code = (
        "import pickle; from app.data.tokenizer import load_tokenizer; import sys;"
        f"tokenizer = load_tokenizer({str(tmp_path / 'bpe.json')!r});"
        "sys.stdout.buffer.write(pickle.dumps(tokenizer, protocol=4))"
    )
    other = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, cwd=Path(__file__).parents[2]
    ).stdout
    here = load_tokenizer(str(tmp_path / "bpe.json"))
    assert here.decode([*here.encode("cat"), here.eod]) == "cat", "use leaves no trace"
    assert other == pickle.dumps(here, protocol=4)
    assert pickle.loads(pickle.dumps(ByteTokenizer())) == ByteTokenizer()


# Long documents


def split_at_spaces(**options: object) -> Backend:
    """Characters and pairs of them, in words that a space begins."""
    pairs = [("a", "b"), ("b", "a"), ("ab", "a"), ("▁", "a"), ("1", "2"), ("12", "3")]
    pieces = [*"ab▁123", *("".join(pair) for pair in pairs), "</s>"]
    found = Backend(models.BPE({piece: n for n, piece in enumerate(pieces)}, pairs, **options))
    found.pre_tokenizer = pre_tokenizers.Metaspace()
    return found


def one_word() -> Backend:
    """The same without words."""
    found = split_at_spaces()
    found.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    return found


def unknown_words() -> Backend:
    found = Backend(models.WordLevel({"ab": 0, "[UNK]": 1, "</s>": 2}, unk_token="[UNK]"))
    found.pre_tokenizer = pre_tokenizers.Whitespace()
    return found


def best_pieces() -> Backend:
    """No words, and pieces that depend on all of them: there is no place to cut."""
    return Backend(models.Unigram([("<u>", 0.0), ("a", -1.0), ("ab", -1.5), ("b", -2.0)], 0, False))


MADE = {each.__name__: each for each in (split_at_spaces, one_word, unknown_words, best_pieces)}


@pytest.fixture
def small_slices(monkeypatch: pytest.MonkeyPatch):
    for name, value in (("SLICE", 200), ("OVERLAP", 60), ("AT_ONCE", 3)):
        monkeypatch.setattr(slices, name, value)


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("letters", ["ab ", "aab", "123 ", "a", "é ab"])
def test_slices_give_the_ids_of_the_whole(name: str, letters: str, small_slices: None):
    backend, draw = MADE[name](), random.Random(1)
    for length in (0, 50, 199, 260, 261, 1000, 5000):
        text = "".join(draw.choices(letters, k=length))
        ids = TokenBuffer(np.dtype(np.uint16))
        ids.add([7])
        JsonTokenizer(backend, 20, 2).encode_long(text.encode(), ids)
        assert ids.ids().tolist() == [7, *backend.encode(text).ids]


def test_slices_are_parts_where_there_are_words(small_slices: None):
    """And one of the rest where no place is found; ids that are drawn are never cut."""
    text = b"ab a " * 1000
    parts = {name: len(list(slices.Slices(made(), text))) for name, made in MADE.items()}
    assert parts["best_pieces"] == 1 and min(parts[n] for n in parts if n != "best_pieces") > 20
    with pytest.raises(slices.NoFit):
        slices.Slices(split_at_spaces(dropout=0.5), text)


def test_a_slice_with_other_ids_than_before_makes_it_one(small_slices: None, monkeypatch):
    """Then what was found so far counts no more."""
    found = slices.Slices._encoded
    calls = itertools.count()

    def otherwise(self: object, *options: object) -> list[object]:
        parts = found(self, *options)
        if next(calls) == 2:
            parts[0].ids[0] += 1
        return parts

    monkeypatch.setattr(slices.Slices, "_encoded", otherwise)
    ids, text = TokenBuffer(np.dtype(np.int32)), "ab a " * 1000
    JsonTokenizer(split_at_spaces(), 20, 2).encode_long(text.encode(), ids)
    assert next(calls) > 2 and ids.ids().tolist() == split_at_spaces().encode(text).ids
