"""`python -m app.cli.evaluate`: perplexity and multiple choice of a checkpoint; mistakes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from app.choices import Source
from app.cli.evaluate import OWN, Task, read_as
from app.cli.options.request import Words
from app.engine.decoding.scoring import ScoredWindow
from app.engine.decoding.trained import weights_at
from app.errors import ConfigError
from tests.distributed import run_distributed
from tests.integration.evaluate import evaluated
from tests.integration.generate import saved

QUESTIONS = [
    {"prompt": "a b", "choices": [" c", " d", "xyz"], "answer": 0},
    {"prompt": "1 2 ", "choices": ["3", "x"], "answer": 1},
]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    run_distributed(saved, 2, folder / "checkpoints")
    (folder.parent / "text.txt").write_text("A text of more than one window, which has 50 bytes")
    (folder.parent / "rows.jsonl").write_text(
        '{"text": "A text of more than one window, which has 50 bytes"}\n{"text": "x"}\n'
    )
    row = (folder.parent / "rows.jsonl").read_text()
    for name in ("held.json", "HELD.JSONL", "lined.text"):
        (folder.parent / name).write_text(row)
    lines = [json.dumps(question) + "\n" for question in QUESTIONS]
    (folder.parent / "questions.jsonl").write_text("".join(lines))
    (folder.parent / "empty.jsonl").write_text("\n")
    (folder.parent / "letter.txt").write_text("a")
    (folder.parent / "no_answer.jsonl").write_text(lines[0] + '{"prompt": "a", "choices": ["b"]}')
    (folder.parent / "far.jsonl").write_text(json.dumps({**QUESTIONS[0], "answer": 3}))
    (folder.parent / "yes.jsonl").write_text(json.dumps({**QUESTIONS[0], "answer": True}))
    (folder.parent / "half.jsonl").write_text(json.dumps({**QUESTIONS[0], "prompt": "\ud800"}))
    (folder.parent / "nothing_in_it.txt").write_text("")
    (folder.parent / "long.jsonl").write_text(json.dumps({**QUESTIONS[0], "prompt": "a" * 40}))
    return folder


def test_perplexity_of_files(run_dir: Path):
    code, out, err = evaluated(run_dir, "data.path=text.txt", "stride=8")
    pattern = r"perplexity ([\d.]+), [\d.]+ nats per token, of 49 tokens; context 32, stride 8\n"
    assert code == 0 and re.fullmatch(pattern, out) and "1 process on cpu" in err, err
    rows = evaluated(run_dir, "data.path=rows.jsonl", "stride=8", "batch=3")
    assert rows[:2] == (0, out), "a document of one token has none that counts"
    listed = evaluated(run_dir, "data.path=[te*.txt]", "data.tokenizer=bytes", "stride=8")
    assert listed[:2] == (0, out), "lists and globs as in training"
    other = evaluated(run_dir, "data.path=text.txt", "stride=31")[1]
    assert other.endswith("stride 31\n") and other.split(",")[0] != out.split(",")[0]


TURNS = [("user", "a question of some length"), ("assistant", "yes"), ("user", "b"),
         ("assistant", "no, never")]  # fmt: skip
CHAT = ("data.source=chat", "data.chat_template=chatml", "stride=8")
ANSWERS = b"yes<|im_end|>no, never<|im_end|>"


def chat_file(run_dir: Path) -> str:
    row = {"messages": [{"role": role, "content": text} for role, text in TURNS]}
    (run_dir.parent / "chat.jsonl").write_text(json.dumps(row))
    return f"{run_dir.parent}/chat.jsonl"


def test_conversations_are_scored_by_their_answers(run_dir: Path):
    data = [f"data.path={chat_file(run_dir)}", f"data.cache_dir={run_dir.parent}/cache"]
    task = Task.of(Words.parse([str(run_dir), *data, *CHAT], OWN), weights_at(run_dir), None)
    scored = [
        bytes(
            token for token, each in zip(window.tokens[window.first :], mask, strict=True) if each
        )
        for window in task.documents()
        if (mask := (window.trained or ())[window.first :])
    ]
    assert b"".join(scored) == ANSWERS and min(map(len, scored)) > 0
    assert task.counted() == len(ANSWERS)


@pytest.mark.full
def test_perplexity_of_answers(run_dir: Path):
    code, out, err = evaluated(run_dir, f"data.path={chat_file(run_dir)}", *CHAT)
    assert code == 0 and f"of {len(ANSWERS)} tokens; context 32, stride 8" in out, err


def test_windows_sum_scored_tokens_alone():
    nats = torch.arange(8.0)
    assert ScoredWindow((0,) * 5, 2).sum(nats) == 2 + 3 + 4
    trained = (True, True, True, False, True)
    assert ScoredWindow((0,) * 5, 2, trained).sum(nats) == 2 + 4


def test_progress_is_of_all_tokens_that_count(run_dir: Path):
    data = [f"data.path=[{run_dir.parent}/*.txt]", f"data.cache_dir={run_dir.parent}/cache"]
    words = Words.parse([str(run_dir), *data], OWN)
    task = Task.of(words, weights_at(run_dir), None)
    assert task.counted() == sum(window.counted for window in task.documents()) == 49


def test_multiple_choice(run_dir: Path):
    code, out, _ = evaluated(run_dir, "choices=questions.jsonl")
    assert code == 0
    assert re.fullmatch(r"accuracy [01]\.\d+, length-normalised [01]\.\d+, of 2 questions\n", out)
    many = evaluated(run_dir, "choices=questions.jsonl", "batch=1000000000000")
    assert many[:2] == (0, out), "no more windows are computed together than there are"


@pytest.mark.full
def test_files_are_read_as_typed_or_as_the_run_was(run_dir: Path):
    """By their names only where the run's corpus was none of files."""
    named = evaluated(run_dir, "data.path=held.json", "stride=8")
    assert named[0] == 0 and "49 tokens" in named[1], named[2]
    for words in (["data.path=HELD.JSONL"], ["data.path=lined.text", "data.source=jsonl"]):
        assert evaluated(run_dir, *words, "stride=8")[:2] == named[:2]
    as_text = evaluated(run_dir, "data.path=held.json", "data.source=text", "stride=8")
    assert as_text[0] == 0 and "49 tokens" not in as_text[1]


def source_of(own: Source, *typed: str) -> list[str]:
    return read_as(Words.parse(["run", *typed], OWN), own)


def test_the_source_of_the_run_counts():
    for own in (Source.jsonl, Source.parquet):
        for name in ("held", "held.txt", "HELD.JSON"):
            assert source_of(own, f"data.path={name}")[0] == f"data.source={own.value}"
    assert source_of(Source.text, "data.path=[a.txt,b]")[0] == "data.source=text"
    assert source_of(Source.hub, "data.path=a.jsonl.gz")[0] == "data.source=jsonl"
    assert source_of(Source.text, "data.path=a.json", "data.source=text") == [
        "data.streaming=false",
        "data.sources=[]",
        "data.validation=[]",
        "data.name=null",
        "data.chat_template=null",
        "data.truncate=right",
    ]
    assert not [word for word in source_of(Source.chat, "data.path=a") if "template" in word]
    with pytest.raises(ConfigError, match=r"held\.json: is jsonl by its name.*data\.source=text"):
        source_of(Source.text, "data.path=held.json")
    with pytest.raises(ConfigError, match="has files of several kinds"):
        source_of(Source.stdlib, "data.path=[a.txt,b.jsonl]")


MISTAKES = {
    (): "a call scores either documents or questions",
    (
        "choices=questions.jsonl",
        "data.path=text.txt",
    ): "a call scores either documents or questions",
    ("data.path=nothing.txt",): "data.path=nothing.txt: matches no file",
    ("data.path=letter.txt",): "no document has more than one token",
    ("choices=nothing.jsonl",): "choices=nothing.jsonl: cannot be read",
    ("choices=empty.jsonl",): "choices=empty.jsonl: contains no question",
    ("choices=no_answer.jsonl",): "line 2 must be a JSON object with",
    ("choices=far.jsonl",): "line 1 must be a JSON object with",
    ("choices=yes.jsonl",): "line 1 must be a JSON object with",
    ("choices=half.jsonl",): "choices=half.jsonl: line 1 is no UTF-8",
    ("data.path=nothing_in_it.txt",): "data.path=nothing_in_it.txt: no text in any of its",
    ("choices=long.jsonl",): "line 1 has 42 tokens with a choice",
    ("data.path=text.txt", "stride=32"): "stride=32: must be below the context",
    ("data.path=text.txt", "strid=3"): "did you mean stride?",
}


@pytest.mark.every(5)
@pytest.mark.parametrize("words", MISTAKES, ids=lambda words: " ".join(words)[:40])
def test_a_mistake_costs_one_line(run_dir: Path, words: tuple[str, ...]):
    code, out, err = evaluated(run_dir, *words)
    said = [line for line in err.splitlines() if "context 32" not in line]
    assert code == 2 and out == "" and len(said) == 1, err
    assert said[0].startswith("evaluate: ") and MISTAKES[words] in said[0]
    read = "context 32" in err
    assert read == (words == ("data.path=letter.txt",)), "the model is not read before"


@pytest.mark.full
def test_replicas_share_windows(run_dir: Path):
    words = ("data.path=text.txt", "stride=8", "batch=3")
    alone = evaluated(run_dir, *words)
    assert evaluated(run_dir, *words, "parallel.dp=2")[:2] == alone[:2]
