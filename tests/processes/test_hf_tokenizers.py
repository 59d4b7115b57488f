"""An exported model has the tokenizer that it was trained with, or none, and says so."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from app.cli import convert
from app.config import Run
from app.engine.start.kept_tokenizer import keep_tokenizer
from app.hf.tokenizer_files import TrainedTokenizer, with_tokenizer
from tests.hf_folders import save_byte_level, save_random, transformers
from tests.pretrained_model import MARKER
from tests.processes.hf_export import DENSE, a_checkpoint
from tests.processes.init_from import run_from
from tests.processes.own_tokenizer import with_tokenizer as with_data_tokenizer
from tests.programs import run_forked
from tests.training import ROOT, corpus_in

TEXT = "the <new> cat<|tool|>\n  sat — déjà vu 12345"
SETTINGS = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": MARKER, "auto_map": {"a": "b.C"}}

GENERATE = ("-m", "app.cli.generate", "../run", "prompt=the <new> cat", "max_new_tokens=2")


def add_tokens(path: Path, to: Path) -> Tokenizer:
    """A tokenizer with two tokens more."""
    found = Tokenizer.from_file(str(path))
    found.add_tokens(["<new>"])
    found.add_special_tokens([AddedToken("<|tool|>", special=True)])
    found.save(str(to))
    return found


def assert_alike(folder: Path, tokenizer: Tokenizer) -> None:
    """`transformers` makes the same tokens of a text as in training."""
    loaded = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.encode(TEXT, add_special_tokens=False).ids
    assert loaded(TEXT, add_special_tokens=False).input_ids == ids
    assert loaded.decode(ids) == TEXT and len(loaded) == tokenizer.get_vocab_size()
    assert loaded.eos_token == MARKER


CLASSES = {
    "qwen2": "Qwen2Tokenizer",
    "qwen3_moe": None,
    "olmoe": "GPTNeoXTokenizerFast",
    "llama": "LlamaTokenizer",
    "deepseek_v3": "LlamaTokenizerFast",
}


@pytest.mark.parametrize("kind", CLASSES)
def test_tokens_that_were_added_are_there_in_every_class(kind: str, tmp_path: Path):
    """Tokenizer classes of models drop them if given tokenizer.json alone."""
    save_byte_level(tmp_path / "tokenizer.json")
    texts = {
        "tokenizer.json": (tmp_path / "tokenizer.json").read_bytes(),
        "tokenizer_config.json": json.dumps(SETTINGS | {"tokenizer_class": CLASSES[kind]}).encode(),
        "merges.txt": b"#version: 0.2",
        "vocab.json": b"{}",
        "chat_template.jinja": b"{{ x }}",
        "generation_config.json": b"{}",
    }
    more = add_tokens(tmp_path / "tokenizer.json", tmp_path / "tokenizer.json")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    trained = TrainedTokenizer((tmp_path / "tokenizer.json").read_bytes(), MARKER, 0)
    written = with_tokenizer(texts, trained)
    for name, contents in written.items():
        (tmp_path / name).write_bytes(contents)
    kept = {"chat_template.jinja", "generation_config.json"}
    assert written.keys() == {"tokenizer.json", "tokenizer_config.json", *kept}
    assert "auto_map" not in json.loads(written["tokenizer_config.json"])
    assert_alike(tmp_path, more)
    assert with_tokenizer(texts, None).keys() == {"generation_config.json"}
    same = dataclasses.replace(trained, contents=texts["tokenizer.json"])
    assert with_tokenizer(texts, same) == texts


def test_a_run_exports_what_it_was_trained_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Tokens added to a model's own: at the end of the run, later, from elsewhere, and when the
    file has been changed; when it is lost, none rather than the model's.
    """
    theirs, own = tmp_path / "theirs", tmp_path / "own.json"
    save_random("qwen3", theirs, vocab_size=264)
    save_byte_level(theirs / "tokenizer.json")
    (theirs / "tokenizer_config.json").write_text(json.dumps(SETTINGS))
    more = add_tokens(theirs / "tokenizer.json", own)
    words = [word for word in corpus_in(tmp_path / "corpus") if not word.startswith("model")]
    words += ["model=pretrained", "model.init_from=theirs", "data.tokenizer=own.json"]
    words += ["train.steps=1", "run_dir=run", "checkpoint.export_hf=true"]
    ended = run_forked(tmp_path, [sys.executable, str(ROOT / "train.py"), *words])
    assert ended.returncode == 0, ended.stderr
    assert_alike(tmp_path / "run/hugging_face", more)
    own.write_text("{}")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert convert.main(["to-hf", "../run", "out"]) == 0
    assert_alike(tmp_path / "elsewhere/out", more)
    assert capsys.readouterr().err == ""
    asked = run_forked(Path.cwd(), [sys.executable, *GENERATE])
    assert asked.returncode == 0, asked.stderr
    (tmp_path / "run/tokenizer.json").unlink()
    asked = run_forked(Path.cwd(), [sys.executable, *GENERATE])
    assert asked.stderr.startswith("generate: data.tokenizer=../run/tokenizer.json: no such file")
    assert convert.main(["to-hf", "../run", "none"]) == 0
    assert capsys.readouterr().err == (
        "convert: no tokenizer is written: own.json, which the model was trained with, is not "
        "there; copy the original file to ../run/tokenizer.json\n"
    )
    written = {path.name for path in (tmp_path / "elsewhere/none").iterdir()}
    assert written == {"config.json", "generation_config.json", "model.safetensors"}
    shutil.copy(tmp_path / "elsewhere/out/tokenizer.json", tmp_path / "run")
    assert convert.main(["to-hf", "../run", "again"]) == 0
    assert_alike(tmp_path / "elsewhere/again", more)


def exported(run: Run, folder: Path) -> tuple[Path, dict[str, Any]]:
    a_checkpoint(folder / "run", run)
    keep_tokenizer(run, folder / "run")
    assert convert.main(["to-hf", str(folder / "run"), str(folder / "out")]) == 0
    config: dict[str, Any] = json.loads((folder / "out/config.json").read_text())
    return folder / "out", config


def test_a_model_that_began_here_has_its_tokenizer(tmp_path: Path):
    save_byte_level(tmp_path / "first.json")
    more = add_tokens(tmp_path / "first.json", tmp_path / "own.json")
    out, config = exported(with_data_tokenizer(DENSE, tmp_path / "own.json"), tmp_path)
    assert_alike(out, more)
    assert config["eos_token_id"] == more.token_to_id(MARKER)


def test_bytes_are_a_tokenizer_too(tmp_path: Path):
    out, config = exported(DENSE, tmp_path)
    loaded = transformers.AutoTokenizer.from_pretrained(out)
    assert loaded(TEXT).input_ids == list(TEXT.encode()) and loaded.eos_token_id == 256
    assert loaded.decode(loaded(TEXT).input_ids) == TEXT and config["eos_token_id"] == 256


def test_settings_that_are_no_json_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    theirs = tmp_path / "theirs"
    save_random("llama", theirs, vocab_size=264)
    save_byte_level(theirs / "tokenizer.json")
    (theirs / "tokenizer_config.json").write_text("[]")
    add_tokens(theirs / "tokenizer.json", tmp_path / "own.json")
    run = with_data_tokenizer(run_from(theirs, {}), tmp_path / "own.json")
    with pytest.raises(SystemExit):
        exported(run, tmp_path)
    assert capsys.readouterr().err == (
        f"convert: to-hf={theirs}: tokenizer_config.json cannot be read: is not a JSON object\n"
    )
    assert not (tmp_path / "out").exists() and not (tmp_path / ".out.tmp").exists()
