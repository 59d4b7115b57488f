"""`app.cli.data inspect` says what training reads."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from app.cli import data
from app.cli.options.compose import load_overrides
from app.data.feed import IGNORED, Cursor, TrainFeed
from app.data.load import load_data
from app.data.tokenizer import load_tokenizer
from tests.data.conftest import write_jsonl

DOCUMENTS = ["one little document", "two", "three", "a fourth document of more words", "five"]


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    write_jsonl(tmp_path / "d.jsonl", DOCUMENTS * 8)
    return [
        "data=jsonl", f"data.path={tmp_path}/d.jsonl", f"data.cache_dir={tmp_path}/cache",
        "train.seq_len=32", "data.document_mask=true", "data.max_documents=2",
    ]  # fmt: skip


def printed(capsys: pytest.CaptureFixture, *arguments: str) -> list[str]:
    assert data.main(["inspect", *arguments]) == 0
    return capsys.readouterr().out.splitlines()


@pytest.mark.full
def test_losses_and_padding_are_those_of_training(words: list[str], capsys):
    run = load_overrides(words)
    train, _ = load_data(run.data, 32, run.train.seed, tokenizer=load_tokenizer("bytes"))
    feed = TrainFeed(train, 0, 1, micro_batch=1, num_microbatches=1, cursor=Cursor())
    losses, padding = 0, 0
    for index in range(12):
        (batch,) = feed.next_step()
        found = printed(capsys, *words, "--over=12", f"--sequence={index}")
        table = [re.match(r" +(\d+)-(\d+) +(\d+) +(yes)? +(.*)", line) for line in found[2:-5]]
        assert all(table)
        here = sum(int(row[3]) for row in table)
        assert here == int((batch.labels_BS != IGNORED).sum())
        losses += here
        padding += sum(int(row[2]) - int(row[1]) + 1 for row in table if row[5] == "(padding)")
        ended = [row[5] for row in table if row[4]]
        assert set(ended[1:]) <= set(DOCUMENTS), "whole documents but for the first"
    assert padding and found[-3:-1] == [
        f"{padding / (12 * 32):8.1%}  padding",
        f"{losses / (12 * 32):8.1%}  tokens with a loss",
    ]


@pytest.mark.full
def test_sequences_of_a_blend_name_their_source(tmp_path: Path, capsys):
    for name, text in (("one", "one "), ("two", "two ")):
        write_jsonl(tmp_path / f"{name}.jsonl", [text * 20] * 20)
    listed = ", ".join(f"{{path: {tmp_path}/{name}.jsonl}}" for name in ("one", "two"))
    words = [f"data.sources=[{listed}]", f"data.cache_dir={tmp_path}/cache", "train.seq_len=32"]
    seen = set()
    for index in range(4):
        found = printed(capsys, *words, f"--sequence={index}", "--over=2")
        source = re.search(r"\(source (.*)\)", found[0])
        assert source
        name = source[1].removesuffix(".jsonl")
        assert name in found[2]
        seen.add(name)
    assert seen == {"one", "two"}


def test_lines_fit_narrow_terminals():
    parts = [data.SequencePart(0, 99, 98, ends=True, ids=list(b"many words " * 9))]
    for width in (40, 60):
        lines = list(data.lines_of(parts, load_tokenizer("bytes"), width))
        assert max(map(len, lines)) == width and lines[-1].endswith("…")


def test_conversations_are_shown_with_marks(tmp_path: Path, capsys):
    said = {"prompt": "how are you today, little fox", "completion": "fine"}
    (tmp_path / "c.jsonl").write_text((json.dumps(said) + "\n") * 8)
    words = ["data=chat", f"data.path={tmp_path}/c.jsonl", "data.chat_template=chatml"]
    words += [f"data.cache_dir={tmp_path}/cache", "train.seq_len=128"]
    found = printed(capsys, *words, "--over=7")
    assert [line.split() for line in found[2:5]] == [
        ["0-93", "14", "yes", "<|im_start|>user"],
        ["how", "are", "you", "today,", "little", "fox<|im_end|>"],
        ["<|im_start|>assistant"],
    ]
    assert found[5].strip() == "«fine<|im_end|>»"
    assert found[6].split() == ["94-127", "0", "(padding)"]
    assert found[-2] == f"{14 / 128:8.1%}  tokens with a loss"


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        (["show"], "command=show: must be inspect"),
        (["inspect", "--sequence", "-1"], "--sequence=-1: must be a whole number from 0 on"),
        (["inspect", "--over=0"], "--over=0: must be a whole number from 1 on"),
        (["inspect", "data.max_documents=2"], "data.max_documents=2: is read with"),
    ],
)
def test_mistakes_are_one_line(typed: list[str], told: str, capsys):
    with pytest.raises(SystemExit) as ended:
        data.main(typed)
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.startswith(f"data: {told}") and said.count("\n") == 1
