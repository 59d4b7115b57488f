"""Tokenizers trained on the texts of a run, and what finds them again."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from app.cli import tokenizer as command
from app.cli.options.compose import load_overrides
from app.data.tokenizer import load_tokenizer
from app.data.tokenizer_files import tokenizer_file
from app.data.train_tokenizer import Wanted, trained
from app.engine.start.start import check_tokenizer
from app.errors import ConfigError
from tests.training import ROOT

DOCS = ["data=text", f"data.path='{ROOT}/docs/[a-m]*.md'"]
TEXT = "Hello wörld, 12345 日本\n\n\tx  ＝ e\u0301 \U0001f600"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer") / "tok"
    wanted = Wanted(700, ("<|im_start|>", "<|im_end|>"))
    trained(load_overrides(DOCS).data, wanted).write(folder)
    return folder


def test_trained_tokenizer_reads_all_text(made: Path):
    ours = load_tokenizer(str(made))
    assert ours.vocab_size == 700
    assert ours.decode(ours.encode(TEXT)) == TEXT
    assert ours.special == {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}
    assert ours.eod == 0 and ours.encode("<|im_end|>") == [2]
    theirs = AutoTokenizer.from_pretrained(made)
    assert theirs.encode(TEXT) == ours.encode(TEXT) and theirs.eos_token_id == ours.eod
    assert theirs.decode(theirs.encode(TEXT)) == TEXT


def test_no_merge_crosses_words(made: Path):
    tokens = json.loads((made / "tokenizer.json").read_text())["model"]["vocab"]
    letters = [token.replace("Ġ", " ") for token in tokens if not token.startswith("<|")]
    assert not [each for each in letters if " " in each.strip() and each.strip(" ") != each.strip()]
    assert not [each for each in letters if each.isdigit() and len(each) > 3]
    assert any(len(each) > 6 for each in letters)


def test_equal_texts_make_equal_files(made: Path, tmp_path: Path):
    wanted = Wanted(700, ("<|im_start|>", "<|im_end|>"))
    trained(load_overrides(DOCS).data, wanted).write(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (made / name).read_bytes()


def test_sources_have_their_shares(tmp_path: Path):
    lines = [
        json.dumps({"text": f"{word} {number} " * 20}) for number in range(200) for word in "ab"
    ]
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    sources = f"[{{path: {tmp_path}/a.jsonl, weight: 3}}, {{path: {tmp_path}/b.jsonl}}]"
    found = trained(load_overrides([f"data.sources={sources}"]).data, Wanted(270, (), 8000))
    assert 6000 <= found.shares["a"].size < 6200 and 2000 <= found.shares["b"].size < 2200
    assert found.bytes_per_token is not None and 1 < found.bytes_per_token < 20


@pytest.mark.every(4)
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--size", "90000"], "the texts make [0-9,]+ tokens at most; did you mean"),
        (["--size", "256"], "must be at least 257"),
        (["--size", "many"], "--size=many: must be a number; did you mean 8192"),
        (["--special", "<a>,<a>"], "is given twice"),
        (["--special", "<|endoftext|>"], "ends documents already"),
        (["data.path=none/*.md"], "data.path"),
        (["data=megatron", "data.path=x.bin"], "trained on text"),
        (["--size", "0.5"], "must be a whole number from 1 on"),
        (["--otu=x"], r"option=--otu=x: .* python -m app.cli.tokenizer --help; did you mean --out"),
        (["--vocab-size", "300"], "did you mean --size"),
        (["--size", "--bytes=9"], "--size=: must be followed by its value"),
    ],
)
def test_wrong_wishes_are_refused(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "a.txt").write_text("a few words " * 9)
    (tmp_path / "x.bin").touch()
    words = [word.replace("x.bin", f"{tmp_path}/x.bin") for word in words]
    given = ["--out", f"{tmp_path}/out", "data=text", f"data.path={tmp_path}/a.txt", *words]
    with pytest.raises(SystemExit):
        command.main(given)
    assert re.search(said, capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


def test_command_names_the_next_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "tok"
    assert command.main(["--out", str(out), "--size=300", *DOCS]) == 0
    told = capsys.readouterr().out.splitlines()
    assert "documents" in told[0] and told[1].startswith(f"{out}: 300 ids")
    assert "bytes per token" in told[2]
    run = load_overrides(shlex.split(told[-1].removeprefix("next: python train.py")))
    assert run.model.vocab_size == 304, "as many rows as the tokenizer has ids"
    assert check_tokenizer(run).vocab_size == 300


def test_vocabulary_follows_the_tokenizer_unless_given(made: Path):
    size = lambda *words: load_overrides(words).model.vocab_size  # noqa: E731
    assert size() == size("model=dense_tiny") == 264
    assert size(f"data.tokenizer={made}") == 704
    assert size(f"data.tokenizer={made}", "model.vocab_size=1000") == 1000
    assert size(f"data.tokenizer={made}", "model.vocab_size=${ids_of_tokenizer:128}") == 768
    assert size("model=small", f"data.tokenizer={made}") == 50304
    with pytest.raises(ConfigError, match="has 700 ids"):
        check_tokenizer(load_overrides([f"data.tokenizer={made}", "model.vocab_size=512"]))


def test_files_folders_and_runs_have_tokenizers(made: Path, tmp_path: Path):
    file = made / "tokenizer.json"
    assert tokenizer_file(str(file)) == tokenizer_file(str(made)) == file
    (tmp_path / "run/pretrained").mkdir(parents=True)
    kept = tmp_path / "run/pretrained/tokenizer.json"
    kept.write_bytes(file.read_bytes())
    assert tokenizer_file(str(tmp_path / "run")) == kept
    (tmp_path / "old").mkdir()
    (tmp_path / "old/tokenizer.model").touch()
    with pytest.raises(ConfigError, match="AutoTokenizer of transformers saves one"):
        tokenizer_file(str(tmp_path / "old"))
    with pytest.raises(ConfigError, match=r"did you mean .*tokenizer\.json"):
        tokenizer_file(str(made / "tokeniser.json"))
    with pytest.raises(ConfigError, match="a name on the hub"):
        tokenizer_file("byte")
