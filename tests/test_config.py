"""The option surface: what exists, that every option composes, and what a mistake is told."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import threading
import time
from itertools import pairwise

import pytest

from app.cli.options import advice
from app.cli.options.advice import Asked
from app.cli.options.arguments import Typed
from app.cli.options.compose import load_typed
from app.cli.options.keys import all_keys, is_section
from app.cli.options.messages import readable_errors
from app.config.advanced import ADVANCED, is_advanced
from app.errors import ConfigError
from tests.config import CONF, ROOT, load

GROUPS = sorted(folder.name for folder in CONF.iterdir() if folder.is_dir())
NEEDS = {
    "data=text": ["data.path=[x]"],
    "data=jsonl": ["data.path=[x]"],
    "data=chat": ["data.path=[x]"],
    "data=parquet": ["data.path=[x]"],
    "data=hub": ["data.name=x"],
    "data=megatron": ["data.path=[x]"],
    "model=pretrained": [f"model.init_from={ROOT}/tests/golden/hugging_face"],
    "experiment=finetune": [f"model.init_from={ROOT}/tests/golden/hugging_face"],
    "experiment=finetune_lora": [f"model.init_from={ROOT}/tests/golden/hugging_face"],
    "schedule=interleaved": ["parallel.pp=2", "parallel.vpp=2"],
    "schedule=zero_bubble_v": ["parallel.pp=2", "parallel.vpp=2"],
}


def test_option_surface_is_a_decision():
    """A new key changes this list in the same commit: tests/golden/options.txt."""
    assert all_keys() == (ROOT / "tests/golden/options.txt").read_text().split()


def test_few_keys_are_listed_by_default():
    keys = all_keys()
    assert set(ADVANCED) <= set(keys)
    assert sum(not (is_section(key) or is_advanced(key)) for key in keys) <= 150


@pytest.mark.every(20)
@pytest.mark.parametrize(
    "choice",
    [f"{group}={path.stem}" for group in GROUPS for path in sorted((CONF / group).glob("*.yaml"))],
)
def test_every_option_composes(choice: str):
    prefix = "+" if choice.startswith("experiment") else ""
    run = load(prefix + choice, *NEEDS.get(choice, []))
    group, option = choice.split("=")
    if group == "model":
        assert run.model.name == option


def test_defaults_are_frozen_and_typed():
    run = load()
    with pytest.raises(dataclasses.FrozenInstanceError):
        run.model.num_layers = 3  # type: ignore[misc]
    assert (run.model.name, run.dp, run.world_size) == ("moe_tiny", 1, 1)


def test_one_file_needs_no_list():
    assert load("data=text", "data.path=a.txt").data.path == ("a.txt",)


def test_yaml_and_dataclass_defaults_agree():
    """So that app/config tells the truth; the model's sizes are the option's."""
    run = load()
    for section in (
        "parallel",
        "hardware",
        "schedule",
        "recompute",
        "cuda_graph",
        "precision",
        "optim",
        "data",
        "checkpoint",
        "log",
        "loss",
        "train",
        "lora",
        "sweep",
    ):
        assert getattr(run, section) == type(getattr(run, section))(), section


def test_launcher_decides_the_world():
    assert load("parallel.ep=2", world_size=2).dp == 2
    assert load("parallel.dp=2").world_size == 2


def test_other_ranks_are_silent(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit), readable_errors("train", speak=False):
        load("train.steps=0")
    assert capsys.readouterr() == ("", "")


def test_other_ranks_let_the_one_that_speaks_finish():
    began = time.monotonic()
    with pytest.raises(SystemExit), readable_errors("train", speak=False, silent_s=0.1):
        load("train.steps=0")
    assert time.monotonic() - began >= 0.1


@pytest.mark.parametrize("speak", [True, False])
def test_ctrl_c_while_a_mistake_is_told_ends_at_once(monkeypatch: pytest.MonkeyPatch, speak: bool):
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(advice, "tried", interrupted)
    monkeypatch.setattr(time, "sleep", interrupted)
    asked = lambda: Asked(Typed(), load_typed)  # noqa: E731
    with pytest.raises(SystemExit) as ended, readable_errors("train", speak, asked=asked):
        load("parallel.ep=3")
    assert ended.value.code == 130


@pytest.mark.full
def test_a_launcher_does_not_cut_off_the_rank_that_speaks(capsys: pytest.CaptureFixture[str]):
    """Launchers send SIGTERM to all ranks once one has ended."""

    def asked() -> Asked:
        os.kill(os.getpid(), signal.SIGTERM)
        return Asked(Typed(("parallel.ep=3",)), load_typed)

    with pytest.raises(SystemExit), readable_errors("train", speak=True, asked=asked):
        load_typed(Typed(("parallel.ep=3",)))
    assert "nearest that works: parallel.ep=2 parallel.dp=2\n" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_ctrl_c_that_a_library_turned_into_an_error_is_ctrl_c(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended, readable_errors("train", speak=True):
        try:
            raise KeyboardInterrupt
        finally:
            threading.Lock().release()
    assert (ended.value.code, capsys.readouterr().err) == (130, "\ntrain.py: stopped\n")
    with pytest.raises(RuntimeError), readable_errors("train", speak=True):
        threading.Lock().release()


def test_every_key_has_its_unit_in_a_comment():
    """Behind the field, or in the line above where it is too long for that."""
    fields = []
    for path in sorted({*(ROOT / "app/config").glob("*.py")} - {ROOT / "app/config/renamed.py"}):
        lines = path.read_text().splitlines()
        for above, line in pairwise(["", *lines]):
            if re.match(r"    \w+: .* = ", line):
                fields.append((above if above.startswith("    # ") else "", line))
    assert len(fields) > 60
    sections = ("Config()", "Config)", "Enum", "self.", "getattr(")
    known = ("name: ScheduleName", "impl: GraphImpl", "normalize:", "device:")
    silent = [
        line.strip()
        for above, line in fields
        if "#" not in above + line and not any(word in line for word in sections)
    ]
    assert [line for line in silent if not line.startswith(known)] == []


def test_options_in_the_readme_exist():
    text = (ROOT / "README.md").read_text()
    for group in GROUPS:
        row = next(line for line in text.splitlines() if line.startswith(f"| `{group}` |"))
        listed = {word for word in row.split("|")[2].replace("`", " ").split()}
        assert listed == {path.stem for path in (CONF / group).glob("*.yaml")}, group


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("name", "override"),
    [
        ("MY_API_KEY", "log.project=${oc.env:MY_API_KEY}"),
        ("HF_TOKEN", "data.path=[x,https://user:${oc.env:HF_TOKEN,none}@host/*.txt]"),
        ("DB_PASSWORD", "log.group='${oc.decode:${oc.env:DB_PASSWORD}}'"),
        ("AWS_SECRET_ACCESS_KEY", "model.name=${oc.env:AWS_SECRET_ACCESS_KEY}"),
        ("WANDBKEY", "log.group=${oc.env:WANDBKEY}"),
        ("GITHUB_PAT", "log.group=${oc.env:GITHUB_PAT}"),
        ("PG_PASS", "log.group=${oc.env:PG_PASS}"),
    ],
)
def test_secrets_are_not_written(monkeypatch: pytest.MonkeyPatch, name: str, override: str):
    """Values would be written to config.yaml, plan.json and checkpoints."""
    monkeypatch.setenv(name, "12345")
    key = override.split("=")[0]
    with pytest.raises(ConfigError, match=f"what {name} holds would be written") as refused:
        load("data=text", "data.path=[x]", override)
    assert refused.value.key == key and "12345" not in str(refused.value)


def test_other_variables_are_taken(monkeypatch: pytest.MonkeyPatch):
    for name in ("HOME_DIR", "TOKENIZER_DIR", "MONKEY_BUSINESS"):
        monkeypatch.setenv(name, "there")
        words = f"data.tokenizer='${{oc.env:{name}}}/t.json'", "model.vocab_size=264"
        assert load(*words).data.tokenizer == "there/t.json"


@pytest.mark.parametrize("seed", [2**53 + 1, 10**400])
def test_seed_that_is_too_large_is_one_mistake(seed: int):
    with pytest.raises(ConfigError, match=rf"train\.seed={seed}: must be at most {2**53}"):
        load(f"train.seed={seed}")
