"""Training a Hugging Face model requires its own tokenizer, from its files or after conversion."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from app.cli import convert
from app.config import Run
from app.engine.files.checkpoints import CHECKPOINTS
from app.engine.start.start import check_tokenizer, find_start
from app.errors import ConfigError
from tests.hf_folders import save_byte_level, save_random
from tests.processes.init_from import run_from
from tests.processes.own_tokenizer import with_tokenizer
from tests.programs import run_forked
from tests.training import ROOT, corpus_in

WORDS = ("<|endoftext|>", "the", "of", "and")
VOCABULARY = 96  # of the models


def save_tokenizer(path: Path, *words: str, **added: int) -> Path:
    ids = {word: number for number, word in enumerate(words)} | added
    path.parent.mkdir(exist_ok=True)
    tokenizer = Tokenizer(WordLevel(ids, unk_token=words[0]))
    tokenizer.add_special_tokens([words[0]])
    tokenizer.save(str(path))
    return path


Begin = Callable[[Run, Path], object]


def start(run: Run, theirs: Path) -> object:
    return check_tokenizer(run)


def resume(run: Run, theirs: Path) -> object:
    """From a conversion of the model, whose files are no longer there."""
    folder = theirs.with_name("run")
    assert convert.main(["from-hf", str(theirs), str(folder)]) == 0
    theirs.rename(theirs.with_name("gone"))
    path = folder / CHECKPOINTS / "step-00000000"
    found = find_start(dataclasses.replace(run, resume=str(path), run_dir=str(folder)))
    assert found.checkpoint == path
    return found


def named(begin: Begin, theirs: Path) -> tuple[str, str]:
    """Return the names of the model and of its tokenizer in messages."""
    folder = theirs if begin is start else theirs.with_name("run")
    inside = "" if begin is start else "/pretrained"
    return str(folder), f"{folder}{inside}/tokenizer.json"


MISFITS: dict[str, tuple[Callable[[Path], Path | str], str]] = {
    "bytes": (lambda _: "bytes", "{} was trained with a tokenizer of its own"),
    "another order": (
        lambda folder: save_tokenizer(folder / "own.json", *WORDS[:2], *WORDS[:1:-1]),
        "{} has been trained with 2 for 'of', which is 3",
    ),
    "fewer": (
        lambda folder: save_tokenizer(folder / "own.json", *WORDS[:3]),
        "{} has been trained with 3 for 'and', which is None",
    ),
    "too many": (
        lambda folder: save_tokenizer(folder / "own.json", *WORDS, outside=VOCABULARY),
        "has 97 ids, and {} has 96",
    ),
}


@pytest.mark.parametrize("begin", [start, resume])
@pytest.mark.parametrize("misfit", MISFITS)
def test_other_tokens_are_refused(misfit: str, begin: Begin, tmp_path: Path):
    theirs = tmp_path / "theirs"
    save_random("llama", theirs)
    save_tokenizer(theirs / "tokenizer.json", *WORDS)
    make, rule = MISFITS[misfit]
    spec = make(tmp_path / "mine")
    with pytest.raises(ConfigError) as refused:
        begin(with_tokenizer(run_from(theirs, {}), spec), theirs)
    name, own = named(begin, theirs)
    expected = f"data.tokenizer={spec}: {rule.format(name)}; did you mean {own}?"
    assert str(refused.value) == expected


@pytest.mark.parametrize("begin", [start, resume])
def test_tokens_may_be_added(begin: Begin, tmp_path: Path):
    theirs = tmp_path / "theirs"
    save_random("llama", theirs)
    save_tokenizer(theirs / "tokenizer.json", *WORDS)
    spec = save_tokenizer(tmp_path / "mine/own.json", *WORDS, added=VOCABULARY - 1)
    assert begin(with_tokenizer(run_from(theirs, {}), spec), theirs)


@pytest.mark.parametrize("begin", [start, resume])
def test_unsupported_tokenizer_is_reported(begin: Begin, tmp_path: Path):
    theirs = tmp_path / "theirs"
    save_random("llama", theirs)
    (theirs / "tokenizer.model").write_bytes(b"pieces")
    run = run_from(theirs, {})
    with pytest.raises(ConfigError) as refused:
        begin(run, theirs)
    assert str(refused.value) == (
        f"data.tokenizer=bytes: {named(begin, theirs)[0]} has a tokenizer of its own, but no "
        "tokenizer.json, which is read here; AutoTokenizer of transformers saves one"
    )


def test_command_line_suggests_working_tokenizer(tmp_path: Path):
    theirs = tmp_path / "theirs"
    save_random("llama", theirs, vocab_size=264)
    save_byte_level(theirs / "tokenizer.json")
    assert convert.main(["from-hf", str(theirs), str(tmp_path / "run")]) == 0
    words = [word for word in corpus_in(tmp_path / "corpus") if not word.startswith("model")]
    words += ["model=pretrained", "model.init_from=run", "resume=run", "train.steps=1"]
    ended = run_forked(tmp_path, [sys.executable, str(ROOT / "train.py"), *words])
    assert (ended.returncode, ended.stderr) == (
        2,
        "train.py: data.tokenizer=bytes: run was trained with a tokenizer of its own; "
        "nearest that works: run/pretrained/tokenizer.json\n",
    )
