"""docs/quickstart.md: its commands run in their order, and print what it shows."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from app.cli.options.arguments import Typed
from app.cli.options.compose import load_typed
from scripts.plan_docs import CONSOLE, refreshed_block
from tests.pages import blocks_of, clone_in, lines_of, run_block
from tests.training import ROOT

pytestmark = pytest.mark.docs

PAGE = ROOT / "docs/quickstart.md"
INSTALL, *BLOCKS = blocks_of(PAGE)  # the environment of the tests stands for the first
TRAINING = lines_of(BLOCKS, "python train.py")
PLANS = list(CONSOLE.finditer(PAGE.read_text()))


def test_commands_are_found():
    assert "make train" in INSTALL.script
    assert len(BLOCKS) >= 10 and len(TRAINING) >= 6 and len(PLANS) == 1


@pytest.mark.parametrize(
    "line", [line for line in TRAINING if not re.search("num_layer=|my_run|resume", line)]
)
def test_training_command_composes(line: str):
    assert load_typed(Typed.parse(shlex.split(line)[2:])).train.steps > 0


@pytest.mark.parametrize("block", PLANS, ids=lambda block: block[1])
def test_plan_is_up_to_date(block: re.Match[str]):
    """scripts/plan_docs.py renews it."""
    assert refreshed_block(block).splitlines() == block[0].splitlines()


def test_typed_advice_is_the_first_shown():
    text = PAGE.read_text()
    shown = re.findall(r"^[\d.]+ +\+\d+ % +(.+)$", text, re.MULTILINE)[0]
    assert f"+experiment=qwen3_30b_a3b recompute=none {shown}\n```" in text


@pytest.mark.full
def test_page_runs_from_beginning_to_end(tmp_path: Path):
    folder = clone_in(tmp_path / "graphfold")
    shutil.copytree(ROOT / "docs", folder / "docs")
    for block in BLOCKS:
        run_block(block, folder, home=tmp_path)
