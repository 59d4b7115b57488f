"""Mistakes that people make, each as a whole program: exit code, one line, and nothing written."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from app.cli.options.request import Words
from app.engine.start.resume import checkpoint_at
from app.errors import ConfigError
from tests.cases import chosen
from tests.programs import run_forked

ROOT = Path(__file__).parent.parent.parent
TABLE = (ROOT / "tests/golden/mistakes.txt").read_text()
CASES = re.findall(r"^\$ (.*)\n(.*)$", TABLE, re.MULTILINE)
QUICK = [  # a rule, a name, a value, an option, files that are read or written, flags, a sweep
    case
    for case in CASES
    if case[0]
    in {
        "plan train.global_batch=4194304",
        "modl.num_layers=3",
        "schedule=dualpipe",
        "data=jsonl data.path='data/*.jsonl'",
        "run_dir=old",
        "resume=old",
        "--confg-dir own",
        "-m run_dir=x train.steps=2,3",
    }
]


def prepared(folder: Path) -> set[Path]:
    """Make the files that some of the commands speak of."""
    checkpoint = folder / "old/checkpoints/step-00000002"
    checkpoint.mkdir(parents=True)
    files = {
        "a_file": b"",
        "data/empty.jsonl": b"",
        "data/good.jsonl": b'{"text": "one"}\n' * 50,
        "data/bad.jsonl": b'{"text": "one"}\n{"text": \n',
        "data/latin.txt": b"caf\xe9",
        "data/good.txt": b"one two three",
        "old/config.yaml": b"{}",
        "old/checkpoints/step-00000002/rank-00000.pt": b"",
        "old/checkpoints/step-00000002/manifest.json": b"{}",
        "tokenizer.json": b"{}",
        "own/model/mine.yaml": b"num_layers: [\n",
        "own/hardware/lacks.yaml": b"profile: {format: 1}\n",
        "own/hardware/listed.yaml": b"profile: {sums_gb_s: [1, 2]}\n",
    }
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return set(folder.rglob("*"))


@pytest.mark.every(2)
@pytest.mark.parametrize(("typed", "said"), chosen(CASES, QUICK), ids=[typed for typed, _ in CASES])
def test_a_mistake(tmp_path: Path, typed: str, said: str):
    before = prepared(tmp_path)
    words = shlex.split(typed)
    plans = words[0] == "plan"
    script = ROOT / ("app/cli/plan.py" if plans else "train.py")
    line = [sys.executable, str(script), *words[plans:]]
    cache = {"HF_DATASETS_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    done = run_forked(tmp_path, line, env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **cache})
    program = "plan" if plans else "train.py"
    pattern = ".*".join(map(re.escape, f"{program}: {said}".split("…")))
    assert re.fullmatch(pattern + r"\n", done.stderr), done.stderr
    assert (done.returncode, done.stdout) == (2, "")
    assert set(tmp_path.rglob("*")) == before


OF_THE_PAGE = (  # with advice, which takes trials
    "parallel.ep=3",
    "parallel.ep=3: must divide model.moe.num_experts=8; nearest that works: 2",
)
LAUNCHED = [("schedule=dualpipe", dict(CASES)["schedule=dualpipe"]), OF_THE_PAGE]


def test_the_page_has_a_mistake_of_launched_ranks():
    assert f"\ntrain.py: {OF_THE_PAGE[1]}\n```" in (ROOT / "docs/messages.md").read_text()


@pytest.mark.every(2)
@pytest.mark.parametrize(("typed", "said"), LAUNCHED)
def test_ranks_that_a_launcher_has_started_tell_a_mistake_once(
    tmp_path: Path, typed: str, said: str
):
    """Rank 0 does, which first tries what it advises; launchers end it once another has ended."""
    launcher = [sys.executable, "-m", "app.cli.torchrun", "--nproc-per-node=2"]
    done = run_forked(
        tmp_path,
        [*launcher, str(ROOT / "train.py"), typed],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)},
        tree=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"train.py: {said}\n")


def test_the_table_has_what_people_do():
    assert len(CASES) >= 80 and len(dict(CASES)) == len(CASES) and len(QUICK) == 8


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("runs/x max_tokens=8", r"arguments=max_tokens=8: .*; did you mean max_new_tokens=\?"),
        ("runs/x promt=a", r"arguments=promt=a: .*; did you mean prompt\?"),
        ("max_tokens=8", "arguments=max_tokens=8: the first argument is the folder of a run"),
        ("", "arguments=: the first argument is the folder of a run"),
    ],
)
def test_mistake_in_an_option_of_generate(typed: str, said: str):
    with pytest.raises(ConfigError, match=said):
        Words.parse(typed.split(), ("prompt", "max_new_tokens", "top_k"))


def test_source_may_have_an_equals_sign(tmp_path: Path):
    (tmp_path / "a=b").mkdir()
    assert Words.parse([f"{tmp_path}/a=b"], ()).source == tmp_path / "a=b"


def test_texts_of_a_locale_without_utf_8(monkeypatch: pytest.MonkeyPatch):
    words = Words.parse(
        ["run", "prompt=\udcc3\udcbc", "prompt=\udcfc", "stop=\u00fc"], ("prompt", "stop")
    )
    monkeypatch.setattr(os, "fsencode", lambda text: text.encode("ascii", "surrogateescape"))
    assert words.texts("prompt") == ("\u00fc", "\udcfc"), "the second is no UTF-8"
    assert words.texts("stop") == ("\u00fc",)


def test_missing_run_is_not_taken_for_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    prepared(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "old").rename(tmp_path / "runs/2026-11-25_10-00-00-moe")
    said = "does not exist; the last run with a checkpoint is runs/2026-11-25_10-00-00-moe"
    with pytest.raises(ConfigError, match=said):
        checkpoint_at(Path("runs/nope"), "x")
