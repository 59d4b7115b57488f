"""The plan command as a person and a script use it: tables, JSON, files, exit codes, mistakes,
and what docs/planning.md shows.
"""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from app.advice import layouts
from app.cli import commands
from app.cli.plan import main, parse
from app.cli.plan_views.pictures import shortened
from app.cli.plan_views.rows import MOST_ROWS
from app.cli.plan_views.tables import WIDTH, print_plan
from app.cli.processes.output import table_width
from app.errors import ConfigError
from app.plan.formatting import (
    amount,
    byte_count,
    compact,
    count_of,
    cut,
    figures,
    ranges,
    short_list,
    signed_percent,
)
from app.plan.schedule import build_schedule
from app.planner.export import SECTIONS, WHAT
from app.planner.plan import Plan
from app.planner.suggestion import Suggestion
from app.planner.summary import summary_lines
from app.version import VERSION, Version
from scripts.plan_docs import CONSOLE, refreshed
from tests.cases import chosen
from tests.config import load

ROOT = Path(__file__).parent.parent.parent
DOCS = (ROOT / "docs/planning.md").read_text()
SMALL = ("model=dense_tiny", "parallel.pp=2", "parallel.dp=2", "train.global_batch=64")
LARGE = ("+experiment=deepseek_v3_2048", "train.global_batch=1024")

HUGE = ("+experiment=deepseek_v3_2048", "train.global_batch=4096", "parallel.world_size=8192")


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """(exit code, stdout) of the command; nothing may go to stderr."""
    code = main(arguments)
    out, err = capsys.readouterr()
    assert err == ""
    return code, out


def mistake(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that a mistake is told."""
    with pytest.raises(SystemExit) as exit_code:
        main(arguments)
    out, err = capsys.readouterr()
    assert exit_code.value.code == 2 and out == "" and err.count("\n") == 1
    return err.strip()


def tables(plan: Plan, what: str, *suggestions: Suggestion) -> str:
    stream = io.StringIO()
    print_plan(plan, what, suggestions, stream=stream)
    return stream.getvalue()


def test_everything_is_shown_and_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    code, out = shown(capsys, *SMALL)
    assert code == 0
    for heading in ("Groups", "Stages", "Schedule", "CUDA graphs", "Memory", "Fits"):
        assert re.search(rf"^{heading}", out, re.MULTILINE), heading
    files = "plan.json", "timeline.svg", "timeline.png"
    assert out.endswith(f"written: {', '.join(f'plan/{name}' for name in files)}\n")
    assert {path.name for path in (tmp_path / "plan").iterdir()} == {*files}
    written = json.loads((tmp_path / "plan/plan.json").read_text())
    assert set(written) == {VERSION, "layout", *SECTIONS, "verdict"}
    assert written[VERSION] == Version.of().record()
    assert (tmp_path / "plan/timeline.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.full
def test_empty_stages_are_shown_and_drawn(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    layout = ("model.num_layers=4", "parallel.pp=4", "parallel.layout='Ett||tt|L'")
    large = ("train.seq_len=4096", "train.micro_batch=8", "train.global_batch=32")
    graphs = ("cuda_graph=layer", "hardware.gpu_memory_gib=8")
    code, out = shown(capsys, "model=moe_tiny", *layout, *large, *graphs)
    assert code == 1 and "What makes it fit" in out
    rank_stage_layers_parameters_times = r"^ +1 +1 +0 +0 +0 +0 *$"
    assert re.search(rank_stage_layers_parameters_times, out, re.MULTILINE)
    files = "timeline.svg", "plan.json"
    assert all((tmp_path / "plan" / name).stat().st_size for name in files)


@pytest.mark.parametrize("what", chosen(["all", "groups", "memory"], ["memory"]))
def test_json_is_all_there_is_on_stdout(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
):
    monkeypatch.chdir(tmp_path)
    code, out = shown(capsys, "--json", f"what={what}", *SMALL)
    found = json.loads(out)
    assert code == 0 and set(found) >= ({what} if what in SECTIONS else set(SECTIONS))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.every(5)
@pytest.mark.parametrize("what", SECTIONS)
def test_a_section_alone(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
):
    monkeypatch.chdir(tmp_path)
    _, out = shown(capsys, f"what={what}", *SMALL)
    headings = re.findall(r"^(Groups|Stages|Schedule|CUDA graphs|Memory)\b", out, re.MULTILINE)
    assert [heading.split()[-1].lower() for heading in headings] == [what]
    assert list(tmp_path.iterdir()) == []  # files only where they are asked for
    assert ("Fits" in out) == (what == "memory")


TOO_SMALL = "gpu_memory_gib=0.1"


@pytest.mark.full
def test_json_and_exit_code_say_that_it_does_not_fit(capsys: pytest.CaptureFixture[str]):
    code, out = shown(capsys, "what=memory", "--json", *SMALL, TOO_SMALL)
    assert code == 1 and json.loads(out)["verdict"]["fits"] is False


def test_exit_code_says_whether_it_fits(capsys: pytest.CaptureFixture[str]):
    code, out = shown(capsys, "what=memory", *SMALL, TOO_SMALL)
    assert code == 1 and re.search(
        r"^Does not fit: \d+\.\d\d of 0\.10 GiB on pipeline rank \d, \d+\.\d\d GiB too much\.$",
        out,
        re.M,
    )
    code, out = shown(capsys, "what=stages", *SMALL, TOO_SMALL)  # does not ask for the memory
    assert code == 0


@pytest.mark.parametrize("small", [False, True])
def test_memory_of_texts_that_are_continued(capsys: pytest.CaptureFixture[str], small: bool):
    memory = ["gpu_memory_gib=0.5"] if small else []
    code, out = shown(capsys, "what=decoding", *SMALL, *memory)
    assert code == int(small)
    assert re.search(r"^Decoding: texts of \d+ tokens \(train\.seq_len\)", out, re.M)
    fits = (
        r"^Does not fit: 0 texts"
        if small
        else r"^Fits: [\d,]+ texts at a time per replica \(batch="
    )
    assert re.search(fits, out, re.M)
    code, out = shown(capsys, "what=decoding", "--json", *SMALL, *memory)
    assert code == int(small) and (json.loads(out)["decoding"]["together"] == 0) is small


FEW = (
    "what=layouts", "+experiment=small", "model=llama3_8b", "hardware=h200", "model.num_layers=4",
    "parallel.world_size=4", "train.global_batch=16", "train.micro_batch=1", "train.seq_len=2048",
)  # fmt: skip


@pytest.mark.full
def test_layouts_are_compared(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(layouts, "MOST_TRIALS", 60)
    code, out = shown(capsys, *FEW, "tokens=2e12", "slower=20", f"out={tmp_path}")
    lines = [line for line in out.splitlines()[:-1] if "=" not in line]  # overrides are one line
    assert code == 0 and max(map(len, lines)) <= WIDTH
    assert "Layouts: on 4 GPUs, fastest first; GPU hours of 2.00 T tokens" in out
    assert len(re.findall(r"^→ +\d+ ", out, re.M)) == 2  # in both tables
    assert re.search(
        r"^(No layout was found that is faster|The run as typed takes [\d.]+ times)", out, re.M
    )
    assert "beside it 20 GB/s" in " ".join(out.split()) and "ms at 20" in out
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]
    found = json.loads((tmp_path / "plan.json").read_text())
    rows = found["layouts"]["rows"]
    assert set(found) == {VERSION, "layout", "layouts"} and found["layouts"]["slower_gb_s"] == 20
    assert sum(row["own"] for row in rows) == 1 and rows[0]["cost"]["gpu_hours"] > 0
    assert len(re.findall(r"^(?:→| ) *\d+ ", out, re.M)) == 2 * len(rows)
    code, out = shown(capsys, *FEW, "tokens=2e12", "slower=20", "--json")
    assert code == 0 and json.loads(out)["layouts"] == found["layouts"]


def test_no_layout_fits(capsys: pytest.CaptureFixture[str]):
    code, out = shown(capsys, *FEW, "gpu_memory_gib=3")
    assert code == 1 and "No layout of these GPUs fits: " in out
    assert re.search(r"^→ – .* \d+\.\d\d! ", out, re.M) and not re.search(r"^→? *1 ", out, re.M)


def test_search_for_layouts_is_announced_first(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """Before the imports, which take seconds on a busy host."""
    said = []

    def slow(name: str) -> SimpleNamespace:
        said.append(capsys.readouterr().err)
        return SimpleNamespace(main=lambda arguments: 0)

    monkeypatch.setattr(commands, "import_module", slow)
    for what in ("layouts", "memory"):
        monkeypatch.setattr(sys, "argv", ["graphfold-plan", f"what={what}"])
        with pytest.raises(SystemExit):
            commands.plan()
    assert said == ["searching layouts: starting\n", ""]


def test_suggestions_are_shown_with_their_price():
    plan = Plan(load(*SMALL, "hardware.gpu_memory_gib=0.1"))
    out = tables(
        plan,
        "memory",
        Suggestion(
            ("recompute.full=true", "train.micro_batch=4"),
            3 * 2**28,
            1.331,
            cost="every forward twice",
        ),
    )
    assert re.search(
        r"^ *0\.75  \+33 %  recompute\.full=true train\.micro_batch=4 *\n +every forward twice *$",
        out,
        re.MULTILINE,
    )
    assert "Nothing was found" in tables(plan, "memory")


@pytest.mark.every(15)
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("what=stage",),
            "plan: what=stage: must be one of groups, stages, schedule, graphs, memory, "
            "decoding, layouts, rehearse, all; did you mean stages?",
        ),
        (
            ("--jsno",),
            "did you mean --json?",
        ),
        (("model=llama3_8c",), "did you mean llama3_8b?"),
        (
            ("parallel.pp=3",),
            "plan: model.num_layers=4: 4 layers do not divide over pp × vpp = 3 × 1 = 3 stages",
        ),
        (("gpu_memory_gib=much",), "plan: hardware.gpu_memory_gib=much: must be a number"),
        (("gpu_memory_gib=-1",), "plan: hardware.gpu_memory_gib=-1.0: must be above 0"),
        (("what=all", "gpus=3"), "plan: gpus=3: is parallel.world_size here"),
        (("what=layout",), "did you mean layouts?"),
        (
            ("what=layouts", "tokens=some"),
            "plan: tokens=some: must be a number above 0, like 25",
        ),
        (("what=layouts", "slower=-3"), "plan: slower=-3: must be a number above 0"),
        (("what=layouts", "slower=45"), "slower=45: must be below hardware.network_gb_s=45"),
        (("what=layouts", "slower=inf"), "plan: slower=inf: must be a number above 0"),
        (("what=memory", "tokens=1e9"), "plan: tokens=1e9: only works with what=layouts"),
        (("modle",), "plan: option=modle: the options are --json, --help, -h, --config-dir"),
    ],
)
def test_mistakes_cost_a_line(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str
):
    assert said in mistake(capsys, *arguments)


def test_a_folder_that_cannot_be_written(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as exit_code:
        main([*SMALL, f"out={tmp_path}/file"])
    assert exit_code.value.code == 2
    assert f"plan: out={tmp_path}/file: cannot be written: " in capsys.readouterr().err


def test_where_files_go():
    assert parse(["what=groups"]).out is None and parse(["out=x", "--json"]).out is None
    assert parse(["out=null"]).out is None and parse(["out="]).out is None
    assert parse([]).out == Path("plan") and parse(["what=groups", "out=x"]).out == Path("x")
    assert parse(["gpu_memory_gib=3", "a=b"]).typed.overrides == (
        "hardware.gpu_memory_gib=3",
        "a=b",
    )
    with pytest.raises(ConfigError):
        parse(["--cfg", "job"])


def test_help_names_every_choice(capsys: pytest.CaptureFixture[str]):
    code, out = shown(capsys, "--help")
    assert code == 0 and all(f"what={what}" in out for what in WHAT)
    assert max(map(len, out.splitlines())) <= 110


TABLES: list[tuple[str, ...]] = [
    SMALL,
    ("model=moe_tiny",),
    (
        "model=mixtral_8x7b",
        "parallel.world_size=16",
        "parallel.tp=4",
        "parallel.pp=2",
        "parallel.etp=1",
        "parallel.ep=4",
    ),
    (*LARGE, "cuda_graph=partial"),
    (*HUGE, "parallel.layout=null", "model.num_layers=64", "parallel.vpp=4"),
]


@pytest.mark.every(2)
@pytest.mark.parametrize(
    "overrides", chosen([(each,) for each in TABLES], [(TABLES[1],), (TABLES[4],)])
)
def test_tables_keep_to_their_width_without_colour(overrides: tuple[str, ...]):
    plan = Plan(load(*overrides))
    out = tables(
        plan,
        "all",
        Suggestion(
            ("parallel.tp=2", "recompute.phases=[norm,mlp_act]"), 2**36, 0.98, cost="a, b; c" * 12
        ),
    )
    assert "\x1b" not in out
    assert max(map(len, out.splitlines())) <= WIDTH
    assert not re.search(r"\w…", out)  # nothing is cut inside a word
    assert max(map(len, tables(plan, "groups").splitlines())) <= WIDTH


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("columns", "most"), [("60", 60), ("150", 150), ("wide", WIDTH), ("", WIDTH)]
)
def test_piped_tables_follow_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: str, most: int
):
    monkeypatch.setattr(sys, "__stdout__", sys.stdout)  # what is captured is what a program has
    monkeypatch.setenv("COLUMNS", columns)
    _, out = shown(capsys, "what=schedule", "parallel.pp=4", "train.global_batch=512")
    table = out.partition("Schedule: ")[2].partition("Estimate: ")[0]
    assert most - 12 <= max(map(len, table.splitlines())) <= most


def test_texts_for_files_keep_their_width(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "150")
    assert table_width(io.StringIO(), 77) == 77


def test_the_header_counts_in_natural_units():
    def header(*overrides: str) -> dict[str, str]:
        return dict(summary_lines(Plan(load(*overrides))))

    large = header("+experiment=deepseek_v3_2048")
    small = header("model=dense_tiny", "train.steps=1")
    assert large["run"].startswith("700 steps, 44.04 B tokens, ")
    assert large["step"].startswith("62,914,560 tokens: 15,360 sequences of 4,096, 480 micro")
    assert small["run"].startswith("1 step, 2.05 k tokens, ")


@pytest.mark.full
def test_the_largest_experiment_fits():
    """However many microbatches: no more are in flight than fill the pipeline."""
    plan = Plan(load(*LARGE, "train.global_batch=4096"))
    assert plan.fits and max(rank.total for rank in plan.memory) < 0.9 * plan.gpu_memory


def test_long_tables_show_their_ends():
    plan = Plan(
        load(
            *LARGE,
            "parallel.pp=32",
            "parallel.ep=64",
            "parallel.layout=null",
            "model.num_layers=64",
        )
    )
    out = tables(plan, "schedule")
    rows = re.findall(r"^ +(\d+|…) .*(?:F|…)", out, re.MULTILINE)
    assert rows == [
        *map(str, range(MOST_ROWS // 2)),
        "…",
        *map(str, range(32 - MOST_ROWS // 2, 32)),
    ]


def test_warning_where_another_order_helps():
    out = tables(
        Plan(
            load(
                "model=llama3_8b",
                "parallel.world_size=16",
                "parallel.tp=8",
                "parallel.order=dp-tp-cp-ep-pp",
            )
        ),
        "groups",
    )
    (line,) = [line for line in out.splitlines() if line.startswith("warning")]
    assert re.search(
        r"tp groups span 2 nodes, but one with parallel.order=tp\S+: [\d.,]+ ms less per step$",
        line.rstrip(),
    )
    out = tables(Plan(load("model=llama3_8b", "parallel.world_size=16", "parallel.tp=8")), "groups")
    assert "warning" not in out


def test_graphs_of_every_kind():
    def graphs(*overrides: str) -> str:
        return tables(Plan(load(*SMALL, *overrides)), "graphs").partition("CUDA graphs")[2]

    assert "none captured" in graphs()
    assert "one per rank" in graphs("cuda_graph=full_iteration")
    partial = graphs("cuda_graph=attn")
    assert "attn, by local, a set per microbatch" in partial
    assert len(re.findall(r"^ +[01] +\d+ +\d+ +\d+ *$", partial, re.MULTILINE)) == 2


def test_the_command_needs_no_torch_and_no_working_directory(tmp_path: Path):
    line = [sys.executable, "-X", "importtime", "-m", "app.cli.plan", "what=stages", *SMALL]
    done = subprocess.run(
        line, cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "FORCE_COLOR": ""}
    )
    lines = done.stderr.splitlines()
    assert done.returncode == 0 and all(each.startswith("import time:") for each in lines)
    loaded = {each.split("|")[-1].strip() for each in lines}
    assert "app.planner.plan" in loaded and not {"torch", "matplotlib"} & loaded
    assert "\x1b" not in done.stdout and "Stages" in done.stdout


@pytest.mark.full
def test_as_a_module(tmp_path: Path):
    line = [sys.executable, "-m", "app.cli.plan", "what=memory", "gpu_memory_gib=0.1", *SMALL]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and "Does not fit" in done.stdout and done.stderr == ""


COMMANDS = [
    line.removeprefix("$ ")
    for block in re.findall(r"```(?:bash|console)\n(.*?)```", DOCS, re.DOTALL)
    for line in block.splitlines()
    if "python -m app.cli.plan" in line
]


# tests/plan/test_compared_layouts.py plans the rows of the other block again: a search takes long
BLOCKS = [block for block in CONSOLE.finditer(DOCS) if "what=layouts" not in block[1]]


def test_the_docs_have_commands():
    assert len(COMMANDS) >= 8 and len(CONSOLE.findall(DOCS)) >= 4
    told = set(re.findall(r"^\| `what=(\w+)` \|", DOCS, re.MULTILINE))
    assert told == {*WHAT, "layouts", "rehearse"}


@pytest.mark.full  # tests/integration/test_commands.py has a few of every page
@pytest.mark.parametrize("line", [line for line in COMMANDS if f"$ {line}" not in DOCS])
def test_a_command_of_the_docs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
):
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(line)[3:]) in (0, 1)
    assert capsys.readouterr().out


@pytest.mark.every(4)
@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block[1])
def test_the_docs_show_what_comes_out(block: re.Match[str]):
    """scripts/plan_docs.py puts it in anew."""
    assert refreshed(block[0]).splitlines() == block[0].splitlines()


def test_figures():
    assert [figures(value) for value in (0, 0.01234, 1.234, 12.34, 99.96, 123.4, 12345.6)] == [
        "0", "0.0123", "1.23", "12.3", "100", "123", "12,346"
    ]  # fmt: skip
    counts = (0, 999.4, 999.6, 1_500, 999_995, 8_030_000_000, 93_952_400_000, 1.5e13)
    assert [amount(value) for value in counts] == [
        "0", "999", "1.00 k", "1.50 k", "1.00 M", "8.03 B", "93.95 B", "15.00 T"
    ]  # fmt: skip
    sizes = {0: "0 B", 999: "999 B", 1_440_000: "1.44 MB", 12e9: "12.00 GB"}
    assert {size: byte_count(size) for size in sizes} == sizes
    assert (signed_percent(0.125), signed_percent(-0.004)) == ("+12 %", "+0 %")
    assert (count_of(1, "rank"), count_of(2048, "rank"), count_of(2, "x", "xs")) == (
        "1 rank",
        "2,048 ranks",
        "2 xs",
    )
    assert (ranges([0, 1, 2, 5, 7, 8]), ranges([])) == ("0–2, 5, 7–8", "")
    assert short_list([0, 4]) == "[0, 4]" and short_list(range(0, 72, 8)) == "[0, 8, …, 64]"
    assert list(compact(build_schedule("1f1b", 4, 4)[1])) == ["F0–2.0", "B0.0", "F3.0", "B1–3.0"]


@pytest.mark.parametrize("width", range(5, 20))
def test_cut_keeps_whole_words_within_the_width(width: int):
    words = ["aa", "bbb", "c", "dddd"]
    line = cut(words, width, "…")
    assert len(line) <= width
    assert line == "aa bbb c dddd" or (
        line.endswith(" …") and "aa bbb c dddd".startswith(line[:-1])
    )
    assert cut(words, 13, "…") == "aa bbb c dddd"


def test_lines_of_pictures_along_an_axis_are_short():
    svg = '<path d="M 1.25 2L 1.25 4L 3 4L 5.55 2z"/><path d="M 0 0C 1 2 3 4 5 6"/>'
    assert shortened(svg) == '<path d="M1.2 2V4H3L5.5 2z"/><path d="M 0 0C 1 2 3 4 5 6"/>\n'
