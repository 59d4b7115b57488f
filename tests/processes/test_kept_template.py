"""A run on conversations keeps its chat template, for talking to it and for its export."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.cli.options.compose import load_overrides
from app.data.chat import CHATML_SOURCE, chat_template
from app.data.chat_template import ChatTemplate
from app.data.tokenizer import bytes_as_json
from app.engine.export.export import export_checkpoint
from app.engine.export.texts import ExportTexts
from app.engine.start.kept_tokenizer import keep_tokenizer
from app.hf.families import family_of
from app.hf.tokenizer_files import TrainedTokenizer
from tests.hf_folders import transformers
from tests.processes.hf_export import DENSE, a_checkpoint

TALK = [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b."}]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
)


def folder_of(path: Path) -> Path:
    path.mkdir()
    (path / "tokenizer.json").write_text(bytes_as_json())
    settings = {"eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>"}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


def test_template_of_training_is_kept(tmp_path: Path):
    theirs = folder_of(tmp_path / "theirs")
    (tmp_path / "other.jinja").write_text(TEMPLATE)
    (tmp_path / "run").mkdir()
    words = ["data=chat", "data.path=x.jsonl", f"data.tokenizer={theirs}"]
    run = load_overrides([*words, f"data.chat_template={tmp_path}/other.jinja"])
    keep_tokenizer(run, tmp_path / "run")
    found = ChatTemplate.find(tmp_path / "run")
    assert found is not None
    assert found.text(TALK) == chat_template(run.data).text(TALK)
    assert found.text(TALK) == "<|endoftext|>user: a?<|endoftext|>assistant: b.<|endoftext|>"


def test_runs_of_bytes_keep_a_template(tmp_path: Path):
    run = load_overrides(["data=chat", "data.path=x.jsonl"])
    (tmp_path / "run").mkdir()
    keep_tokenizer(run, tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["chat_template.jinja"]
    found = ChatTemplate.find(tmp_path / "run")
    assert found is not None
    assert found.text(TALK, answers=False) == "\x02user\na?\x03\n\x02assistant\nb.\x03\n"


@pytest.mark.full
def test_exports_of_bytes_end_with_turns(tmp_path: Path):
    (tmp_path / "run").mkdir()
    keep_tokenizer(load_overrides(["data=chat", "data.path=x.jsonl"]), tmp_path / "run")
    path = a_checkpoint(tmp_path / "run", DENSE)
    export_checkpoint(path, tmp_path / "out", "to-hf")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = theirs.apply_chat_template(TALK, return_dict=False)
    assert bytes(ids).decode() == "\x02user\na?\x03\n\x02assistant\nb.\x03\n"
    assert json.loads((tmp_path / "out/config.json").read_text())["eos_token_id"] == [256, 3]


def test_exports_end_with_a_token_that_ends_turns(tmp_path: Path):
    names = ((0, "<e>", True), (5, "<|im_end|>", True), (6, "<", False))
    added = [{"id": number, "content": name, "special": special} for number, name, special in names]
    tokenizer = TrainedTokenizer(json.dumps({"added_tokens": added}).encode(), "<e>", 0)
    manifest = {"config": {"data": {"tokenizer": "theirs"}}}
    texts = ExportTexts(tmp_path, manifest, DENSE.model, family_of(DENSE.model, "resume", ""),
                        dtype="float32", key="resume", say=print)  # fmt: skip
    assert texts._ends(tokenizer) == (0,)
    (tmp_path / "chat_template.jinja").write_text(CHATML_SOURCE)
    assert texts._ends(tokenizer) == (0, 5)


def test_other_runs_keep_no_template(tmp_path: Path):
    theirs = folder_of(tmp_path / "theirs")
    (theirs / "chat_template.jinja").write_text(TEMPLATE)
    (tmp_path / "run").mkdir()
    run = load_overrides(["data=text", "data.path=x.txt", f"data.tokenizer={theirs}"])
    keep_tokenizer(run, tmp_path / "run")
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names == {"tokenizer.json", "tokenizer_config.json"}
