"""docs/cluster.md: its commands compose, and two launchers do on this host what nodes would."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from app.cli.options.arguments import Typed
from app.cli.options.compose import load_typed
from app.cli.plan import main as plan
from app.engine.files.checkpoints import newest_checkpoint
from tests.ports import free_port
from tests.training import ROOT

pytestmark = pytest.mark.docs

PAGE = (ROOT / "docs/cluster.md").read_text()
LINES = [
    line
    for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    for line in block.splitlines()
]
LAUNCHED = [line for line in LINES if "app.cli.torchrun --nnodes" in line]
SMALL = LAUNCHED[-1]


def test_the_page_has_its_commands():
    assert len(LAUNCHED) == 2 and "--nproc-per-node=1 " in SMALL and "+experiment=smoke" in SMALL


@pytest.mark.parametrize("line", LAUNCHED)
def test_what_is_launched_is_sound(line: str):
    launcher, _, overrides = line.partition(" train.py ")
    nodes, processes = (int(n) for n in re.findall(r"--n(?:nodes|proc-per-node)=(\d+)", launcher))
    typed = Typed.parse([word for word in shlex.split(overrides) if not word.startswith("resume")])
    assert load_typed(typed, nodes * processes).world_size == nodes * processes


def test_the_plan_says_how_many_nodes(capsys: pytest.CaptureFixture[str]):
    (line,) = [line for line in LINES if "app.cli.plan" in line]
    assert plan(shlex.split(line)[3:]) == 0
    out = capsys.readouterr().out
    assert "2 of 8 GPUs" in out and re.search(r"^dp_cp +2 +8 +2 ", out, re.MULTILINE)


@pytest.mark.full
@pytest.mark.parametrize("shared", [True, False])
def test_two_launchers_on_one_host(tmp_path: Path, shared: bool):
    port = free_port()
    folder = str(tmp_path) if shared else "."
    line = SMALL.replace("node1:29500", f"127.0.0.1:{port}").replace("/shared", folder)
    words = [sys.executable, *shlex.split(line)[1:]]
    words[words.index("train.py")] = str(ROOT / "train.py")
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": "",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    places = [tmp_path / name for name in ("one", "two")]
    for place in places:
        place.mkdir()
    nodes = [
        subprocess.Popen(
            words, cwd=place, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for place in places
    ]
    said = "".join("".join(node.communicate(timeout=200)) for node in nodes)
    if shared:
        assert {node.returncode for node in nodes} == {0} and said.count(
            "Result, nats per token"
        ) == 1, said
        newest = newest_checkpoint(tmp_path / "try1")
        assert newest is not None and newest.name == "step-00000010"
    else:
        (quoted,) = re.findall(r"`(step-00000005 could not be saved, rank )1(: [^`]+)`", PAGE)
        assert {node.returncode for node in nodes} == {2} and said.count("train.py: ") == 1, said
        assert re.search(
            rf"train\.py: run_dir=try1: {quoted[0]}[01]{re.escape(quoted[1])}", said
        ), said
