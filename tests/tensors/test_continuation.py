"""Text as it comes: what is shown, and where it ends."""

from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from app.data.tokenizer import ByteTokenizer, JsonTokenizer, bytes_as_json
from app.engine.decoding import texts
from app.engine.decoding.texts import Continuation
from tests.tensors.continuation import spaced, words_with_spaces

BYTES = ByteTokenizer()


def shown(tokens: list[int], *stop: str) -> tuple[list[str], Continuation]:
    """Return the text that each token adds, and that the end adds."""
    text = Continuation(BYTES, stop)
    parts = []
    for token in tokens:
        text.add(token)
        parts.append(text.fresh())
    return [*parts, text.fresh(last=True)], text


def test_characters_are_shown_when_they_are_complete():
    parts, text = shown(list("aß€".encode()))
    assert parts == ["a", "", "ß", "", "", "€", ""] and not text.ended


def test_what_is_broken_at_the_end_is_shown_then():
    parts, _ = shown([*b"a", 0xC3])
    assert parts == ["a", "", "�"]


def test_the_end_of_a_document_ends_a_text():
    parts, text = shown([*b"ab", BYTES.eod, *b"cd"])
    assert "".join(parts) == "ab" == text.text and text.ended and text.tokens == [*b"ab"]


def test_a_stop_text_is_never_shown_in_part():
    parts, text = shown(list(b"one<two</x>four"), "</x>", "zzz")
    assert "".join(parts) == "one<two" == text.text and text.ended
    assert parts[3] == "" and parts[4] == "<t", "held back until it is none"


@pytest.mark.parametrize("seed", range(20))
def test_what_is_shown_is_the_text(seed: int):
    draw = random.Random(seed)
    letters = "aab€ß"
    text = "".join(draw.choices(letters, k=30))
    stop = ["".join(draw.choices(letters, k=draw.randint(1, 4))) for _ in range(2)]
    parts, found = shown(list(text.encode()), *stop)
    # two stops may overlap: the one that is complete first ends the text
    ends = [(at + len(each), at) for each in stop if (at := text.find(each)) >= 0]
    wanted = text[: min(ends)[1]] if ends else text
    assert "".join(parts) == found.text == wanted


PROSE = "the cat sat — déjà vu, ‘so’ 12345\n\n  the    dog €€ 日本語 ran; the cat ran "


def byte_level() -> Tokenizer:
    """Tokenizer like GPT-2's, Llama 3's and Qwen's: tokens may be parts of characters."""
    found = Tokenizer.from_str(bytes_as_json())
    found.train_from_iterator(
        [PROSE],
        trainers.BpeTrainer(
            vocab_size=300,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=["<|endoftext|>"],
            show_progress=False,
        ),
    )
    return found


def parts_of_words() -> Tokenizer:
    """Tokenizer like BERT's: a space depends on the token after it."""
    words = ["[UNK]", "[SEP]", "the", "cat", "##s", "##at", "dog", ",", "déjà", "##日"]
    found = Tokenizer(
        models.WordPiece({word: at for at, word in enumerate(words)}, unk_token="[UNK]")
    )
    found.pre_tokenizer = pre_tokenizers.Whitespace()
    found.decoder = decoders.WordPiece(cleanup=True)
    return found


def continued(tokenizer: JsonTokenizer, prompt: str, ids: list[int], *stop: str) -> Continuation:
    """The text of a prompt with so many tokens behind it; what was shown is that text."""
    text = Continuation(tokenizer, stop, tokenizer.encode(prompt))
    parts = []
    for token in ids:
        text.add(token)
        parts.append(text.fresh())
    assert "".join([*parts, text.fresh(last=True)]) == text.text
    return text


@pytest.mark.parametrize("length", [1, 3, 50])
def test_blank_before_the_first_new_word_is_kept(length: int):
    tokenizer = spaced()
    prompt = " ".join(["dog the cat"] * length)
    new = tokenizer.encode("so ran")
    assert tokenizer.decode(new) == "so ran", "by themselves they lose it"
    assert continued(tokenizer, prompt, new).text == " so ran"
    assert continued(tokenizer, prompt, new, " ran").text == " so"
    assert continued(tokenizer, prompt, new, " so").text == ""


def test_stop_text_is_looked_for_behind_the_prompt():
    tokenizer = spaced()
    prompt = "the cat"
    new = tokenizer.encode("sat the cat")
    assert continued(tokenizer, prompt, new, "cat sat").text == " sat the cat", "spans both"
    assert continued(tokenizer, prompt, new, "the cat").text == " sat "


@pytest.mark.parametrize("length", [1, 12, 40])
def test_bytes_as_tokens_complete_characters_behind_a_prompt(length: int):
    """Decoders drop a run of bytes whose end is incomplete, including the prompt's."""
    tokenizer = spaced()
    prompt = "日" * length
    new = tokenizer.encode(prompt + "本語")[len(tokenizer.encode(prompt)) :]
    assert len(new) == 6
    whole = [continued(tokenizer, prompt, new[:count]).text for count in range(7)]
    assert whole == ["", "�", "�", "本", "本�", "本�", "本語"]


def test_incomplete_bytes_at_the_end_take_nothing_back():
    tokenizer = spaced()
    text, parts = Continuation(tokenizer), []
    for token in tokenizer.encode("日本語")[:-1]:
        text.add(token)
        parts.append(text.fresh())
    assert "".join([*parts, text.fresh(last=True)]) == "日本�"


def test_tokens_of_the_model_end_a_text():
    tokenizer = spaced()
    ids = tokenizer.encode("cat sat ran")
    text = Continuation(tokenizer, ends={ids[-1]})
    for token in ids:
        text.add(token)
    assert text.ended and text.tokens == ids[:-1] and text.text == tokenizer.decode(ids[:-1])


TOKENIZERS = {
    "byte level": (byte_level, "<|endoftext|>"),
    "words with spaces": (words_with_spaces, "</s>"),
    "parts of words": (parts_of_words, "[SEP]"),
}


@pytest.mark.every(3)
@pytest.mark.parametrize("real", [True, False], ids=["text", "any tokens"])
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_long_text_is_read_in_short_parts(kind: str, real: bool, monkeypatch: pytest.MonkeyPatch):
    build, end = TOKENIZERS[kind]
    backend = build()
    tokenizer = JsonTokenizer(backend, backend.get_vocab_size(), backend.token_to_id(end))
    draw = random.Random(3)
    anything = [draw.randrange(tokenizer.vocab_size) for _ in range(600)]
    tokens = (tokenizer.encode(PROSE * 20) if real else anything)[:600]
    tokens = [token for token in tokens if token != tokenizer.eod]
    at_once = []
    decode = JsonTokenizer.decode

    def counted(self: JsonTokenizer, ids: list[int]) -> str:
        at_once.append(len(ids))
        return decode(self, ids)

    monkeypatch.setattr(JsonTokenizer, "decode", counted)
    text, parts = Continuation(tokenizer), []
    for nth, token in enumerate(tokens):
        text.add(token)
        assert text.text == decode(tokenizer, tokens[: nth + 1])
        parts.append(text.fresh())
    if kind != "parts of words":  # these take back a space that has been shown
        assert "".join([*parts, text.fresh(last=True)]) == text.text
    assert len(tokens) > 300 and max(at_once) <= 2.5 * texts.CONTEXT
