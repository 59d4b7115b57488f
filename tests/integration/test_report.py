"""The report on a folder of runs: the figures against what the runs wrote, the order, the files,
the mistakes.
"""

from __future__ import annotations

import csv
import json
import re
import statistics
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from app.cli.report import main
from app.cli.run_report.facts import clock, run_facts
from app.cli.run_report.page import POINTS, shown, thinned
from app.cli.run_report.sweep_record import Job, JobState, Sweep
from app.cli.run_report.table import read_report
from tests.integration.report import write_run


def write_plan(folder: Path, *gib: float) -> None:
    """What a run writes before it starts: bytes of tensors of each pipeline rank."""
    ranks = [{"allocated": each * 2**30, "total": 99} for each in gib]
    (folder / "plan.json").write_text(json.dumps({"memory": ranks}))


def table(folder: Path) -> list[dict[str, str]]:
    with (folder / "report.csv").open(newline="") as file:
        return list(csv.DictReader(file))


class Page(HTMLParser):
    """Cells and addresses of a page; fails on what does not nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.cells: list[str] = []
        self.addresses: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [
            value or ""
            for name, value in attrs
            if name in ("src", "href", "srcset", "data", "action")
        ]
        if tag not in ("meta", "input"):
            self.open.append(tag)
        if tag == "td":
            self.cells.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "td" in self.open:
            self.cells[-1] += data


def drawn(folder: Path) -> list[dict[str, Any]]:
    """What the script of a folder's page draws: the runs that can be chosen."""
    text = (folder / "report.html").read_text()
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text)
    runs: list[dict[str, Any]] = json.loads(found[1]) if found else []
    return runs


def headings(folder: Path) -> list[str]:
    return re.findall(r"<th[^>]*>([^<]+)</th>", (folder / "report.html").read_text())


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Three plain runs: one ended, a better one of another size, one that has not come to its
    end.
    """
    write_run(tmp_path / "runs/a", loss=3.5)
    write_run(tmp_path / "runs/b", loss=3.25, layers=4)
    write_run(tmp_path / "runs/c", loss=1.0, layers=8, taken=4)
    (tmp_path / "runs/notes").mkdir()
    return tmp_path / "runs"


def test_figures_are_those_of_the_second_half(runs: Path):
    facts = run_facts(runs / "b")
    assert facts.tokens_per_s == statistics.median(
        [4004, 4005, 4006]
    ) and facts.tflops_per_gpu == pytest.approx(0.4005)
    assert (facts.step, facts.steps, facts.tokens, facts.memory_peak_gib) == (6, 6, 384, 1.5)
    assert (facts.loss, facts.val_loss, facts.final_loss, facts.finished) == (
        3.25,
        3.25,
        3.25,
        True,
    )
    assert facts.curve[0] == (1, 8.25) and facts.validations == ((0, 9.5), (6, 3.25))


def test_plain_runs_by_what_sets_them_apart(runs: Path, capsys: pytest.CaptureFixture[str]):
    assert main([str(runs)]) == 0
    rows = table(runs)
    assert [row["run"] for row in rows] == ["b", "a", "c"]  # ended ones by loss, then the others
    assert [row["overrides"] for row in rows] == [
        "model.num_layers=4",
        "model.num_layers=2",
        "model.num_layers=8",
    ]
    assert [row["state"] for row in rows] == ["done", "done", "unfinished"]
    assert [float(row["tokens_per_s"]) for row in rows] == [4005, 2005, 8003.5]
    assert [row["val_loss"] for row in rows] == ["3.25", "3.5", "9.5"]
    out = capsys.readouterr().out
    assert (runs / "report.txt").read_text() in out and out.count("\n") == 6
    assert re.search(r"model.num_layers=4 +4,005 +0\.401 +1\.50 +3\.2500 +done", out)
    assert re.search(
        r"model.num_layers=8 +8,004 +0\.800 +1\.50 +9\.5000 +unfinished at step 4/6", out
    )


def test_one_run_and_runs_that_do_not_differ(runs: Path):
    assert main([str(runs / "a")]) == 0 and table(runs / "a")[0]["overrides"] == "a"
    write_run(runs / "again/a", loss=3.5)
    write_run(runs / "again/b", loss=3.5)
    assert [row.label for row in read_report(runs / "again").rows] == ["a", "b"]


def test_before_its_first_validation_a_run_shows_its_last_step(tmp_path: Path):
    write_run(tmp_path / "a", loss=2.0, taken=3)
    lines = (tmp_path / "a/metrics.jsonl").read_text().splitlines()
    (tmp_path / "a/metrics.jsonl").write_text("\n".join(lines[1:]) + '\n{"step": 4, "lo')
    assert main([str(tmp_path)]) == 0
    assert re.search(r" 5\.0000\* +unfinished at step 3/6", (tmp_path / "report.txt").read_text())


def test_rerun_steps_are_counted(tmp_path: Path):
    lines = (write_run(tmp_path / "a", loss=2.0) / "metrics.jsonl").read_text().splitlines()
    counted = [lines[0], *(f'{row[:-1]}, "reruns": {n % 2}}}' for n, row in enumerate(lines[1:]))]
    (tmp_path / "a/metrics.jsonl").write_text("\n".join(counted) + "\n")
    assert main([str(tmp_path)]) == 0 and table(tmp_path)[0]["reruns"] == "3"
    assert "done, 3 steps rerun" in (tmp_path / "report.txt").read_text()


def test_a_run_without_its_last_checkpoint_has_not_ended(tmp_path: Path):
    run_dir = write_run(tmp_path / "a", loss=2.0, saves=3)
    assert not run_facts(run_dir).finished
    for step in (3, 6):
        (run_dir / f"checkpoints/step-{step:08d}").mkdir(parents=True)
        (run_dir / "checkpoints/latest").write_text(f"step-{step:08d}")
        assert run_facts(run_dir).finished == (step == 6)


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """A sweep with a job of every kind; one was submitted, so that nobody noted its end."""
    folder = tmp_path / "s"
    kinds = [
        ("done", 3.0, None, 0),
        ("done", 2.0, None, 0),
        ("failed", None, "boom <b>&amp;", 1),
        ("skipped", None, "too big", None),
        ("interrupted", None, None, -15),
        ("running", 2.5, None, None),
        ("done", float("nan"), None, 0),
    ]
    jobs = []
    for number, (state, loss, reason, code) in enumerate(kinds):
        jobs.append(
            Job(
                number,
                f"{number}_x",
                (f"x={number}", "y=1"),
                swept=(f"x={number}",),
                state=JobState(state),
                reason=reason,
                exit_code=code,
                seconds=65.2,
            )
        )
        if loss is not None:
            write_run(folder / f"{number}_x", loss=loss)
    write_run(folder / "4_x", loss=2.0, taken=2)
    Sweep(
        folder, "python train.py -m x=0,1 'y=<1>'", "2026-01-02T03:04:05", jobs=tuple(jobs)
    ).save()
    return folder


def test_a_sweep_with_all_that_became_of_its_jobs(sweep: Path):
    rows = read_report(sweep).rows
    assert [row.label for row in rows] == ["x=1", "x=5", "x=0", "x=2", "x=3", "x=4", "x=6"]
    assert [row.state.value for row in rows] == [
        "done",
        "done",
        "done",
        "failed",
        "skipped",
        "interrupted",
        "done",
    ]
    assert main([str(sweep)]) == 0
    text = (sweep / "report.txt").read_text()
    assert (
        "failed: boom <b>&amp;" in text
        and "skipped: too big" in text
        and "interrupted at step 2/6" in text
    )
    assert [row["seconds"] for row in table(sweep)] == ["65.2"] * 7 and clock(65.2) == "0:01:05"


def test_a_piped_table_follows_columns_and_the_file_does_not(
    sweep: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "__stdout__", sys.stdout)  # what is captured is what a program has
    monkeypatch.setenv("COLUMNS", "50")
    assert main([str(sweep)]) == 0
    table = capsys.readouterr().out.partition("written: ")[0]
    assert max(map(len, table.splitlines())) <= 50
    assert max(map(len, (sweep / "report.txt").read_text().splitlines())) > 50


def test_the_page_is_whole_and_needs_no_network(sweep: Path):
    assert main([str(sweep)]) == 0
    text = (sweep / "report.html").read_text()
    page = Page(text)
    assert len(page.cells) == 7 * 7
    assert page.cells[:7] == ["x=1", "2,005", "0.201", "1.50", "2.0000", "best", "done"]
    assert page.cells[14:21] == ["x=0", "2,005", "0.201", "1.50", "3.0000", "+1.0000", "done"]
    assert page.cells[-2:] == ["", "done"]  # its loss is not a number
    assert "failed: boom <b>&amp;" in page.cells  # as it was told, not as markup
    assert "7 runs: 4 done, 1 failed, 1 skipped, 1 interrupted" in text
    assert (
        "Begun 2026-01-02 03:04:05 by <code>python train.py -m x=0,1 &#x27;y=&lt;1&gt;&#x27;</code>"
        in text
    )
    assert page.addresses == []
    assert not re.search(r"https?:|url\((?!#)|@import|<link|<img|fetch\(|import\(", text)
    assert "content=\"default-src 'none'; " in text  # so that a browser refuses what is missed here
    colours = re.findall(r'background:(#\w+|transparent)"></span>(x=\d)', text)
    assert [name for colour, name in colours if colour == "transparent"] == ["x=2", "x=3"]
    with_curves = [pair for pair in colours if pair[0] != "transparent"]
    assert len({colour for colour, _ in with_curves}) == 5
    assert [(run["colour"], run["label"]) for run in drawn(sweep)] == with_curves
    assert text.count('<input type="checkbox" value="') == 5


def test_without_a_step_there_is_nothing_to_choose(tmp_path: Path):
    write_run(tmp_path / "a", loss=2.0, taken=0)
    assert main([str(tmp_path)]) == 0
    text = (tmp_path / "report.html").read_text()
    assert "<script" not in text and "checkbox" not in text and Page(text).cells[0] == "a"


def test_texts_of_runs_stay_within_the_data(tmp_path: Path):
    write_run(tmp_path / "a<!--<script><b>$x$", loss=2.0)
    write_run(tmp_path / "b", loss=3.0)
    assert main([str(tmp_path)]) == 0
    Page((tmp_path / "report.html").read_text())
    assert [run["label"] for run in drawn(tmp_path)] == ["a<!--<script><b>$x$", "b"]


@pytest.mark.full
def test_many_runs_have_colours_of_their_own(tmp_path: Path):
    for number in range(12):
        write_run(tmp_path / f"{number:02}", loss=3 + number / 10, layers=number + 1)
    assert main([str(tmp_path)]) == 0
    assert len(set(re.findall(r"background:(#\w+)", (tmp_path / "report.html").read_text()))) == 12


def test_long_curves_are_thinned_to_their_last_point():
    points = [(n, float(n)) for n in range(10 * POINTS + 3)]
    kept = thinned(points)
    assert len(kept) <= POINTS + 1 and (kept[0], kept[-1]) == (points[0], points[-1])
    assert thinned(points[:POINTS]) == points[:POINTS]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "report: folder=nowhere: does not exist"),
        (["rus"], "report: folder=rus: does not exist; did you mean runs?"),
        (
            ["empty"],
            "report: folder=empty: contains no run; "
            "name the folder of a run, of runs or of a sweep: for example runs\n",
        ),
        ([], "report: arguments=: must be exactly one folder"),
        (["a", "b"], "report: arguments=a b: must be exactly one folder"),
        (["--json"], "report: arguments=--json: must be exactly one folder"),
    ],
)
def test_mistakes(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    (tmp_path / "empty").mkdir()
    write_run(tmp_path / "runs/a", loss=1.0)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit_code:
        main(arguments)
    out, err = capsys.readouterr()
    assert (exit_code.value.code, out) == (2, "") and err.startswith(said) and err.count("\n") == 1


def test_help(capsys: pytest.CaptureFixture[str]):
    assert main(["--help"]) == 0 and "report.html" in capsys.readouterr().out


# Memory and curves.


def test_memory_stands_beside_what_was_planned(runs: Path):
    write_plan(runs / "a", 0.25, 1.375, 1.0)
    for broken in ("{", "[]", '{"memory": []}', '{"memory": [{"total": 1}]}', '{"memory": 3}'):
        (runs / "b/plan.json").write_text(broken)
        assert run_facts(runs / "b").memory_planned_gib is None
    assert run_facts(runs / "a").memory_planned_gib == 1.375  # of the rank that needs most
    assert main([str(runs)]) == 0
    told = {row["run"]: (row["memory_peak_gib"], row["memory_planned_gib"]) for row in table(runs)}
    assert told == {"a": ("1.5", "1.375"), "b": ("1.5", ""), "c": ("1.5", "")}
    memory = {run["name"]: run["memory"] for run in drawn(runs)}
    assert memory["a"] == [[1.5, "1.50"], [1.375, "1.38"]] and memory["b"] == [[1.5, "1.50"], None]
    names = headings(runs)
    assert names[names.index("peak") :][:2] == ["peak", "planned"] and "of plan" not in names


def test_speed_stands_beside_what_measured_speeds_planned(runs: Path):
    """Plans by the data sheet are assumptions: nothing stands beside them."""
    for name, profile in (("a", "H200"), ("b", None)):
        estimate = {"tokens_per_second_per_gpu": 750.5, "profile": profile}
        plan = {"layout": {"world_size": 4}, "schedule": {"estimate": estimate}}
        (runs / name / "plan.json").write_text(json.dumps(plan))
    assert main([str(runs)]) == 0
    told = {row["run"]: row["tokens_per_s_planned"] for row in table(runs)}
    assert told == {"a": "3002.0", "b": "", "c": ""}
    assert (runs / "report.txt").read_text().count("planned 3,002") == 1
    rates = {run["name"]: run["rates"][1] for run in drawn(runs)}
    assert rates == {"a": [3002.0, "3,002"], "b": None, "c": None}
    cells = Page((runs / "report.html").read_text()).cells
    place = cells.index("model.num_layers=2")
    assert cells[place : place + 4] == ["model.num_layers=2", "2,005", "3,002", "67%"]
    assert [name for name in headings(runs)[1:] if "plan" in name] == ["planned", "of plan"]


def on_gpu(run_dir: Path) -> None:
    """Have a run measured on a GPU: 1.75 GiB held by the allocator, 0.5 J per token."""
    metrics = run_dir / "metrics.jsonl"
    measured = '"memory_reserved_gib": 1.75, "joules_per_token": 0.5, "memory_peak_gib"'
    metrics.write_text(metrics.read_text().replace('"memory_peak_gib"', measured))


def test_memory_of_gpus_is_compared_with_the_plan(tmp_path: Path):
    write_plan(write_run(tmp_path / "a", loss=2.0), 1.25)
    told = "On the CPU it is all memory of the process, but the plan counts tensors only."
    assert main([str(tmp_path)]) == 0
    assert told in (tmp_path / "report.html").read_text() and "of plan" not in headings(tmp_path)
    on_gpu(tmp_path / "a")
    assert main([str(tmp_path)]) == 0
    text = (tmp_path / "report.html").read_text()
    assert told not in text
    memory = ["peak", "planned", "of plan", "reserved", "J/token"]
    names = headings(tmp_path)
    assert names[names.index("peak") :][:5] == memory
    place = (cells := Page(text).cells).index("1.50")
    assert cells[place : place + 5] == ["1.50", "1.25", "120%", "1.75", "0.500"]
    (row,) = table(tmp_path)
    assert (row["memory_reserved_gib"], row["joules_per_token"]) == ("1.75", "0.5")


def test_without_measured_memory_there_is_no_picture_of_it(tmp_path: Path):
    metrics = write_run(tmp_path / "a", loss=2.0) / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace("memory_peak_gib", "x"))
    assert main([str(tmp_path)]) == 0
    assert "peak" not in headings(tmp_path)
    assert 'id="memory"' not in (tmp_path / "report.html").read_text()


def test_the_fall_of_the_first_steps_is_not_all_that_is_shown():
    fall = [(step, 100.0 / step) for step in range(1, 101)]
    assert shown([fall, [(1, 7.0), (100, 9.5)]]) == (1.0, 9.5)
    assert shown([[(1, float("nan")), (2, 3.0)], [(5, 4.0)]]) == (3.0, 4.0)
    assert shown([[], [(0, 5.0)]]) is None


@pytest.mark.every(3)
@pytest.mark.parametrize("loss", ['null, "not_finite": {"loss": "NaN"}', "NaN", "Infinity"])
def test_losses_that_are_not_finite_are_reported(tmp_path: Path, loss: str):
    """As earlier versions and this one write them; a second run has numbers."""
    metrics = write_run(tmp_path / "a", loss=2.0) / "metrics.jsonl"
    lines = metrics.read_text().splitlines()
    for number, name in ((-2, "loss"), (-1, "val_loss")):
        odd = loss.replace("loss", name)
        lines[number] = re.sub(rf'"{name}": [0-9.]+', f'"{name}": {odd}', lines[number])
    metrics.write_text("\n".join(lines) + "\n")
    write_run(tmp_path / "b", loss=3.0)
    assert main([str(tmp_path)]) == 0
    told = {row["run"]: row["val_loss"] for row in table(tmp_path)}
    assert told == {"a": "inf" if loss == "Infinity" else "nan", "b": "3.0"}
    assert run_facts(tmp_path / "a").best_loss == 9.5
    (odd_run,) = (run for run in drawn(tmp_path) if run["name"] == "a")
    assert odd_run["curve"][-1] == [6, None] and odd_run["loss"] is None


def test_odd_lines_are_left_out_of_a_report(tmp_path: Path):
    metrics = write_run(tmp_path / "a", loss=2.0) / "metrics.jsonl"
    odd = ['{"step": "7", "loss": 1}', "[" * 100_000, '{"step": 5, "loss": 3.0}', '{"step": 1e400}']
    metrics.write_text(metrics.read_text() + "\n".join(odd) + "\n")
    assert main([str(tmp_path)]) == 0
    assert [(row["step"], row["val_loss"]) for row in table(tmp_path)] == [("6", "2.0")]
