"""Which token ends a document: by the tokenizer's files, never a word spelt like a marker."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, normalizers

from app.data.special_tokens import ids_with, named_token
from app.data.tokenizer import EarlierEnd, load_tokenizer
from app.errors import ConfigError
from app.hf.tokenizer_files import TrainedTokenizer, with_tokenizer
from tests.data.special_tokens import GEMMA, QWEN, TWO, saved

ENDS: dict[str, tuple[list[str], list[str], dict[str, object], str]] = {
    "HTML tags in the vocabulary": (GEMMA, ["<s>", "</s>"], {}, "<eos>"),
    "two special markers of other uses": (["[UNK]", "[SEP]", "[EOS]"], ["<eos>"], {}, "[EOS]"),
    "end of a turn beside it": (QWEN, ["</s>"], {}, "<|endoftext|>"),
    "end of a turn alone": (QWEN[1:], ["<eos>"], {}, "<|im_end|>"),
    "settings": (QWEN, [], {"tokenizer_config": {"eos_token": "<|im_end|>"}}, "<|im_end|>"),
    "settings, as an object": (
        TWO,
        [],
        {"tokenizer_config": {"eos_token": {"content": "</s>", "lstrip": False}}},
        "</s>",
    ),
    "settings, of a name nobody knows": (
        ["<a>", "<over>"],
        ["</s>"],
        {"tokenizer_config": {"eos_token": "<over>"}},
        "<over>",
    ),
    "settings that leave it open": (GEMMA, [], {"tokenizer_config": {"eos_token": None}}, "<eos>"),
    "older settings": (TWO, [], {"special_tokens_map": {"eos_token": "</s>"}}, "</s>"),
    "the model's one of two": (TWO, [], {"config": {"eos_token_id": 2}}, "<|endoftext|>"),
    "the generation's before the model's": (
        TWO,
        [],
        {"config": {"eos_token_id": 2}, "generation_config": {"eos_token_id": [0, 1]}},
        "</s>",
    ),
    "the model's, of a name nobody knows": (
        ["<a>", "<over>"],
        ["</s>"],
        {"config": {"eos_token_id": 1}},
        "<over>",
    ),
    "a default of the model's that is a letter": (
        ["<eos>"],
        [],
        {"config": {"eos_token_id": 2}},
        "<eos>",
    ),
}


@pytest.mark.parametrize("case", ENDS)
def test_end_is_the_marked_token(case: str, tmp_path: Path):
    special, ordinary, settings, end = ENDS[case]
    path = saved(tmp_path, special, ordinary, **settings)
    found = load_tokenizer(str(path))
    assert (found.end, found.eod) == (end, special.index(end))
    if end != "</s>":
        assert found.eod not in found.encode("struck <s>out</s> here")
    assert found.decode([*found.encode("struck <s>out"), found.eod]) == "struck <s>out"
    files = with_tokenizer({}, TrainedTokenizer(path.read_bytes(), found.end, found.eod))
    assert json.loads(files["tokenizer_config.json"])["eos_token"] == end


REFUSED: dict[str, tuple[list[str], list[str], str]] = {
    "two": (TWO, [], "'<|endoftext|>', '</s>' are special tokens that may end a document"),
    "none known": (["<stop>", "<pad>"], [], "its special tokens: <stop>, <pad>; put"),
    "an ordinary one": (["<stop>"], ["</s>"], "<stop>, and '</s>' is an ordinary one; put"),
    "no special ones": ([], ["</s>"], "its special tokens: none, and '</s>' is an ordinary one"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_open_end_is_refused_with_advice_that_works(case: str, tmp_path: Path):
    special, ordinary, rule = REFUSED[case]
    path = saved(tmp_path, special, ordinary)
    with pytest.raises(ConfigError) as refused:
        load_tokenizer(str(path))
    assert rule in str(refused.value)
    place, example = str(refused.value).split("put the token that does into ")[1].split(": ", 1)
    token = [*special, *ordinary][-1]
    Path(place).write_text(json.dumps(json.loads(example) | {"eos_token": token}))
    assert load_tokenizer(str(path)).end == token


FAULTS: dict[str, tuple[str, str]] = {
    "no JSON": ("tokenizer_config.json: cannot be read: Expecting", "{"),
    "no object": ("tokenizer_config.json: cannot be read: no JSON object", "[]"),
    "a number": ("tokenizer_config.json: eos_token=3 is no token", '{"eos_token": 3}'),
    "not there": (
        "tokenizer_config.json beside it says eos_token='<x>', which is not in its vocabulary",
        '{"eos_token": "<x>"}',
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_broken_settings_are_refused(fault: str, tmp_path: Path):
    rule, contents = FAULTS[fault]
    path = saved(tmp_path, GEMMA, [])
    (tmp_path / "tokenizer_config.json").write_text(contents)
    with pytest.raises(ConfigError, match=r"data\.tokenizer=") as refused:
        load_tokenizer(str(path))
    assert rule in str(refused.value)


@pytest.mark.parametrize("value", ['"2"', "[1, true]", "{}"])
def test_ids_that_are_none_are_refused(value: str, tmp_path: Path):
    path = saved(tmp_path, TWO, [])
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": {value}}}')
    with pytest.raises(ConfigError, match=r"generation_config.json: eos_token_id=.* is no id"):
        load_tokenizer(str(path))


def test_unmarked_end_is_not_decoded(tmp_path: Path):
    """Settings may name a token that the vocabulary has as an ordinary one."""
    path = saved(tmp_path, ["<a>"], ["</s>"], tokenizer_config={"eos_token": "</s>"})
    found = load_tokenizer(str(path))
    assert found.decode([*found.encode("ab"), found.eod]) == "ab"


def test_end_survives_normalizers_of_added_tokens(tmp_path: Path):
    path = saved(tmp_path, ["<a>"], [])
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.add_special_tokens([AddedToken("[EOS]", normalized=True)])
    tokenizer.save(str(path))
    found = load_tokenizer(str(path))
    assert found.end == "[EOS]" and found.eod == tokenizer.token_to_id("[EOS]")
    assert found.decode([*found.encode("ab"), found.eod]) == "ab"


EARLIER: dict[str, tuple[list[str], list[str], str | None, str | None]] = {
    "special": (QWEN, [], "<|endoftext|>", "<|endoftext|>"),
    "special, one of two": (TWO, [], "<|endoftext|>", "<|endoftext|>"),
    "ordinary, beside a special one": (GEMMA, ["</s>"], "</s>", None),
    "ordinary, and nothing else": (["<stop>"], ["</s>"], "</s>", "</s>"),
    "none": (["<stop>"], [], None, None),
}


@pytest.mark.parametrize("case", EARLIER)
def test_earlier_ends_stay_where_they_were_right(case: str, tmp_path: Path):
    special, ordinary, was, stays = EARLIER[case]
    path = saved(tmp_path, special, ordinary)
    assert EarlierEnd.of(path) == EarlierEnd(was, stays)
    if stays is not None:
        assert load_tokenizer(str(path), stays).end == stays


def test_other_exports_are_given_the_end(tmp_path: Path):
    """All files that name one, where the tokenizer is the model's own."""
    path = saved(tmp_path, QWEN, [])
    texts = {
        "tokenizer.json": path.read_bytes(),
        "tokenizer_config.json": b'{"eos_token": {"content": "<|im_end|>"}, "bos_token": null}',
        "special_tokens_map.json": b'{"eos_token": "<|im_end|>"}',
    }
    same = TrainedTokenizer(path.read_bytes(), "<|im_end|>", 2)
    assert with_tokenizer(texts, same) == texts
    written = with_tokenizer(texts, TrainedTokenizer(path.read_bytes(), "<|endoftext|>", 0))
    assert json.loads(written["tokenizer_config.json"]) == {
        "eos_token": "<|endoftext|>",
        "bos_token": None,
    }
    assert json.loads(written["special_tokens_map.json"]) == {"eos_token": "<|endoftext|>"}


def test_ids_with_an_end_more():
    assert [ids_with(1, named) for named in (None, 1, 2, [2], [2, 1], [])] == [
        1, 1, [2, 1], [2, 1], [2, 1], [1]
    ]  # fmt: skip


def test_folder_without_files_names_no_token(tmp_path: Path):
    assert named_token(tmp_path / "nowhere", "bos_token") is None
