"""docs/from-megatron.md: what it calls our keys exists, and its command composes."""

from __future__ import annotations

import re
import shlex
from itertools import pairwise

import pytest

from app.cli.options.compose import load_overrides
from app.cli.options.keys import all_keys
from tests.integration.from_megatron import PAGE, ROWS
from tests.override_types import check_types
from tests.training import ROOT

pytestmark = pytest.mark.docs


def choices() -> list[str]:
    """Everything of ours that the tables name; a value alone belongs to the key before it."""
    found: list[str] = []
    for _, ours, _ in ROWS:
        for text in re.findall(r"`([^`]+)`", ours):
            before = found[-1] if found else ""
            alone = not re.match(r"[a-z_]+([.=]|$)", text) or text in ("all_to_all", "sequence")
            named = "." in text or "=" in text or text == "run_dir"
            found.append(text if named and not alone else f"{before.split('=')[0]}={text}")
    return found


def test_every_key_is_ours():
    keys, groups = set(all_keys()), {path.name for path in (ROOT / "conf").iterdir()}
    for choice in choices():
        name = choice.split("=")[0]
        assert name in keys or name in groups, choice
    assert len(ROWS) > 50


def test_every_value_has_the_type_of_its_key():
    check_types(choice for choice in choices() if "=" in choice)


@pytest.mark.every(6)
@pytest.mark.parametrize("choice", [each for each in choices() if "=" in each])
def test_every_value_is_accepted(choice: str):
    also = []
    if choice.startswith("data="):
        also = ["data.name=x"] if choice == "data=hub" else ["data.path=x"]
    also = ["cuda_graph=partial"] if choice.startswith("cuda_graph.") else also
    also = ["model.moe.dispatcher=static"] if choice.startswith("model.moe.static.") else also
    load_overrides([*also, choice])


def test_the_command_is_one_of_ours():
    blocks = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    (command,) = (block.replace("\\\n", " ") for block in blocks)
    program, script, *overrides = shlex.split(command)
    run = load_overrides(overrides)
    assert (program, script) == ("python", "train.py") and run.world_size == 8


def test_no_argument_is_listed_twice():
    names = sorted(name for theirs, _, _ in ROWS for name in re.findall(r"`(--[^`]+)`", theirs))
    twice = {one for one, other in pairwise(names) if one == other}
    assert twice <= {"--cuda-graph-scope", "--recompute-granularity", "--account-for-loss-…"}
