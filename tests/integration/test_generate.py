"""`python -m app.cli.generate`: a checkpoint of any layout writes, and mistakes cost one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.cli.generate import read_prompts
from tests.distributed import run_distributed
from tests.integration.generate import generated, saved


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    run_distributed(saved, 2, folder / "checkpoints")
    return folder


def test_texts_go_to_stdout_and_facts_to_stderr(run_dir: Path):
    code, out, err = generated(run_dir, "prompt=abc", "max_new_tokens=9", "temperature=0")
    assert code == 0 and out.startswith("abc") and out.endswith("\n") and len(out) > len("abc\n")
    lines = err.splitlines()
    assert len(lines) == 3 and "step-00000003" in lines[0] and "1 process on cpu" in lines[0]
    assert "up to 9 new tokens" in lines[1]
    # 12 tokens, 2 layers, keys and values of 2 heads of 8 numbers, 4 bytes
    assert lines[1].endswith("keys and values take 1.54 kB per layer, 3.07 kB per rank")
    assert lines[2].endswith("tokens/s")
    checkpoint = run_dir / "checkpoints" / "step-00000003"
    again = generated(checkpoint, "prompt=abc", "max_new_tokens=9", "top_k=1", "seed=7")
    assert again[:2] == (0, out), "the likeliest of one"


def test_prompts_of_a_file_are_continued_as_alone(run_dir: Path):
    prompts = run_dir.parent / "prompts.txt"
    prompts.write_text("first\n\nno 2\n")
    rows = run_dir.parent / "prompts.jsonl"
    rows.write_text('{"prompt": "first"}\n{"prompt": "no 2"}\n')
    words = ("max_new_tokens=30", "temperature=0")
    code, both, err = generated(run_dir, f"file={prompts}", *words)
    assert code == 0 and both.count("== ") == 2 and ", where the context ends" in err
    assert generated(run_dir, f"file={rows}", "batch=1", *words)[1].startswith(both[:20])
    first, second = both.split("== 2 of 2 ==\n")
    assert first.startswith("== 1 of 2 ==\nfirst") and second.startswith("no 2")
    alone = generated(run_dir, "prompt=no 2", "max_new_tokens=27", "temperature=0")[1]
    assert second == alone and len(alone) > 10


MISTAKES = {
    (): "prompt=: there is nothing to continue",
    ("prompt=",): "prompt=: is empty",
    ("file=missing.txt",): "file=missing.txt: cannot be read: No such file or directory",
    ("file=empty.txt",): "file=empty.txt: contains no prompt",
    ("file=rows.jsonl",): "file=rows.jsonl: line 2 must be a JSON object",
    ("prompt=" + 32 * "a",): "has 32 tokens, and the model was trained on sequences of 32",
    ("prompt=a\udcff",): "prompt=a?: is no UTF-8: it holds half of a character",
    ("file=half.jsonl",): "file=half.jsonl: line 1 is no UTF-8",
    ("prompt=a", "temprature=1"): "did you mean temperature?",
    ("prompt=a", "top_k=0"): "top_k=0: must be a whole number from 1 on; did you mean 1?",
    ("prompt=a", "max_new_tokens=0"): "must be a whole number from 1 on; did you mean 1?",
    ("prompt=a", "temperature=-1"): "temperature=-1.0: must be at least 0; did you mean 0?",
    ("prompt=a", "foo.bar=1"): "foo.bar=1: there is no such key",
    ("prompt=" + 16 * "a\n",): "has 32 tokens, and the model was trained on sequences of 32",
    ("prompt=a", "model.num_layer=2"): "did you mean model.num_layers?",
    ("prompt=a", "parallel.tp=3"): "tp=3: must divide",
    (*16 * ["prompt=a"], f"max_new_tokens={2**30}", f"train.seq_len={2**30}"): (
        "batch=16: keys and values of 16 texts of 1,073,741,824 tokens take 4.40 TB per rank"
    ),
}


@pytest.mark.every(5)
@pytest.mark.parametrize("words", MISTAKES, ids=lambda words: " ".join(words)[:30])
def test_a_mistake_costs_one_line(run_dir: Path, words: tuple[str, ...]):
    (run_dir.parent / "empty.txt").write_text("\n \n")
    (run_dir.parent / "rows.jsonl").write_text('{"prompt": "a"}\n{"text": "a"}\n')
    (run_dir.parent / "half.jsonl").write_text('{"prompt": "\\ud800"}')
    code, out, err = generated(run_dir, *words)
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith("generate: ") and MISTAKES[words] in err


def test_what_is_no_checkpoint_is_said(run_dir: Path):
    for place, rule in ((run_dir / "nowhere", "does not exist"), (run_dir.parent, "holds no")):
        code, _, err = generated(place, "prompt=a")
        assert code == 2 and f"checkpoint={place}: {rule}" in err and err.count("\n") == 1


@pytest.mark.full
def test_it_starts_the_ranks_that_a_layout_needs(run_dir: Path):
    words = ("prompt=abc", "max_new_tokens=9", "temperature=0")
    alone = generated(run_dir, *words)
    code, out, err = generated(run_dir, *words, "parallel.pp=2")
    assert (code, out) == alone[:2] and "2 processes on cpu" in err


@pytest.mark.full
def test_replicas_share_what_is_asked(run_dir: Path):
    words = ("prompt=abc", "prompt=d", "prompt=ef", "max_new_tokens=9", "seed=3", "batch=2")
    alone = generated(run_dir, *words)
    code, out, err = generated(run_dir, *words, "parallel.dp=2")
    assert (code, out) == alone[:2] and ", 2 together on 2 replicas, " in err, err


def test_lines_of_json_end_where_files_say(tmp_path: Path):
    """Not where Unicode has ends of lines, which strings may hold; ends of Windows' lines count."""
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a\u2028b\x85c"}\r\n\n{"prompt": "d"}\r\n', newline="")
    assert read_prompts(path) == ["a\u2028b\x85c", "d"]
