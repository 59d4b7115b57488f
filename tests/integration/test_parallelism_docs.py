"""docs/parallelism.md: its commands run, print and draw what it shows, and its figures and lists
are those of the code.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from app.cli.plan import main
from app.cli.plan_views.layout_picture import save_layout
from app.errors import ConfigError
from app.plan.layout import ParallelLayout
from app.plan.plan import Plan
from scripts.plan_docs import CONSOLE, PICTURE, refreshed
from tests.processes.layouts import CHOICES
from tests.test_config import load

ROOT = Path(__file__).parent.parent.parent
DOCS = (ROOT / "docs/parallelism.md").read_text()
PICTURES = {match[1]: match[0] for match in PICTURE.finditer(DOCS)}
WIDE = (
    "model=mixtral_8x7b",
    "precision=bf16",
    "train.seq_len=4096",
    "train.micro_batch=1",
    "train.global_batch=8",
)


def overrides(line: str) -> list[str]:
    return [word for word in shlex.split(line)[3:] if not word.startswith(("what=", "out="))]


def drawn(svg: str) -> tuple[list[str], list[str], list[int]]:
    """Words, colours and places of a picture, the latter in whole points."""
    words, colours = (
        re.findall(r">([^<>\n]+)</text>", svg),
        re.findall(r"(?:fill|stroke): (#\w+)", svg),
    )
    places = [
        number
        for path in re.findall(r'(?: d| x| y)="([^"]*)"', svg)
        for number in re.findall(r"-?\d[\d.]*", path)
    ]
    return words, colours, [round(float(number)) for number in places]


def volumes(*more: str) -> dict[str, int]:
    """Bytes that one rank sends in a step, by kind of group."""
    return {kind.name: kind.bytes for kind in Plan(load(*more)).traffic}


def test_every_layout_has_its_picture():
    assert list(PICTURES) == ["tp2", "tp2pp2", "cp2", "cp4", "ep4", "ep2etp2", "tp2ep4", "folded"]
    assert {path.stem for path in (ROOT / "docs/parallelism").iterdir()} == set(PICTURES)
    assert all(f"![{name}](parallelism/{name}.svg)" in DOCS for name in PICTURES)


@pytest.mark.parametrize("name", PICTURES)
def test_the_pictures_are_of_today(tmp_path: Path, name: str):
    """scripts/plan_docs.py draws them anew."""
    svg = save_layout(Plan(load(*overrides(PICTURES[name]))), tmp_path)[0].read_text()
    assert drawn(svg) == drawn((ROOT / f"docs/parallelism/{name}.svg").read_text())


def test_a_command_draws_what_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(PICTURES["tp2"])[3:]) == 0
    assert (
        capsys.readouterr().out.endswith("plan/tp2/timeline.png\n")
        and (tmp_path / "plan/tp2/layout.svg").exists()
    )


@pytest.mark.parametrize("block", list(CONSOLE.finditer(DOCS)), ids=lambda block: block[1])
def test_the_page_shows_what_comes_out(block: re.Match[str]):
    """scripts/plan_docs.py puts it in anew."""
    assert refreshed(block[0]).splitlines() == block[0].splitlines()


def test_refused_layouts_have_a_nearest_one():
    said = [
        block[0].splitlines()[2]
        for block in CONSOLE.finditer(DOCS)
        if "what=groups" not in block[1]
    ]
    assert len(said) >= 8 and all(
        line.startswith("plan: ") and "; nearest that works: " in line for line in said
    )


def test_the_examples_of_folding():
    layout = ParallelLayout(16, tp=4, pp=2, ep=4, etp=1)
    assert (
        layout.groups("dp")[:4]
        == layout.groups("edp", expert=True)[:4]
        == [[0, 4], [1, 5], [2, 6], [3, 7]]
    )
    assert layout.groups("ep", expert=True) == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 10, 11],
        [12, 13, 14, 15],
    ]
    assert ParallelLayout(8, cp=8, ep=8).dp == 1


def test_null_etp_is_tp():
    with pytest.raises(ConfigError):
        load(*(word for word in overrides(PICTURES["tp2ep4"]) if word != "parallel.etp=1"))
    assert load(
        *(
            word
            for word in overrides(PICTURES["tp2ep4"])
            if "ep=4" not in word and "etp" not in word
        ),
        "parallel.ep=2",
    )


def test_bytes_of_what_runs_where():
    """The page's table, for Mixtral's 32 layers: hidden width 4096, 32 query and 8 key/value
    heads of width 128, K = 2.
    """
    degrees = ("parallel.tp=2", "parallel.cp=2", "parallel.dp=2", "parallel.ep=2", "parallel.etp=2")
    plan = Plan(load(*WIDE, *degrees))
    h, tp, cp, ranks = 4096 // 4 * 4096 * 2, 2, 2, 4
    microbatches, busiest = plan.run.num_microbatches, min(plan.run.model.moe.planned_imbalance, 2)
    assert microbatches == 4 and "5 · (tp − 1) · h" in DOCS
    found, whole = volumes(*WIDE, *degrees), 32 * (2 * 4096 + 4096 * 8) + 4096
    sent = microbatches * (32 * 5 + 2 + 3) * (tp - 1) * h
    assert found["tp"] == sent + 2 * (tp - 1) * whole * 4 // tp
    assert found["cp"] == microbatches * 32 * 2 * (cp - 1) * h * 2 * 8 * 128 // 4096
    assert found["etp_ep"] == pytest.approx(
        microbatches * 32 * 4 * (ranks - 1) / ranks * h * 2 * 2 * busiest
    )
    traded = volumes(*WIDE, *degrees, "parallel.cp_comm_type=all_to_all")["cp"]
    assert traded == microbatches * 32 * 2 * (cp - 1) * h * 2 * (32 + 8) * 128 // 4096 // cp


def test_trading_heads_sends_less_than_gathering_keys_when_the_page_says_so():
    sends = {
        (cp, how): volumes(
            "model=llama3_8b",
            "train.seq_len=4096",
            f"parallel.cp={cp}",
            f"parallel.cp_comm_type={how}",
        )["cp"]
        for cp in (4, 8)
        for how in ("all_gather", "all_to_all")
    }
    assert (
        sends[4, "all_to_all"] > sends[4, "all_gather"]
        and sends[8, "all_to_all"] < sends[8, "all_gather"]
    )


def test_what_is_proved_are_the_choices_of_the_tests():
    rows = re.findall(r"^\| (\w+) \| ([\w, ]+) \|$", DOCS.partition("## Proved")[2], re.MULTILINE)
    table = {name: values for name, values in rows if name in CHOICES}
    assert table == {name: ", ".join(map(str, values)) for name, values in CHOICES.items()}


def test_what_the_page_points_to_exists():
    for path in re.findall(r"`((?:app|tests)/[\w/]+\.py)`", DOCS):
        assert (ROOT / path).is_file(), path
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", DOCS):
        assert (ROOT / "docs" / link).is_file(), link
    for number in (
        "1909.08053",
        "2205.05198",
        "2309.14509",
        "2407.21783",
        "2504.14960",
        "1910.02054",
        "2411.09009",
    ):
        assert f"https://arxiv.org/abs/{number}" in DOCS
    assert "docs/parallelism.md" in (ROOT / "README.md").read_text()
