"""The report's page in a browser: runs are chosen, and table, curves and bars follow."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.cli.report import main
from tests.browser import CHROMIUM, WITHOUT, Page, opened
from tests.integration.report import write_run

pytestmark = [pytest.mark.full, pytest.mark.skipif(CHROMIUM is None, reason=WITHOUT)]
CURVES = "[...document.querySelectorAll('#losses path')].map(each => each.dataset.run)"
ROWS = "[...document.querySelectorAll('tbody tr')].filter(each => !each.hidden)"
ABOVE = f"{ROWS}.map(each => each.querySelector('.above').textContent)"
LOSSES = "[...document.querySelectorAll('#losses text[text-anchor=end]')].map(t => +t.textContent)"
LENGTHS = "[...document.querySelectorAll('#rates .bar')].map(each => each.textContent)"
WIDTHS = "[...document.querySelectorAll('#rates .bar span')].map(each => each.style.width)"
PROBLEMS = "window.problems = []; onerror = said => { problems.push(said) }"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Runs b, a and c, best first, and one without a step; a has a plan; losses of c are high."""
    folder = tmp_path / "runs"
    for name, loss, layers in (("a", 3.5, 2), ("b", 3.25, 4), ("c", 40.0, 1)):
        write_run(folder / name, loss=loss, layers=layers)
    write_run(folder / "d", loss=1.0, layers=8, taken=0)
    estimate = {"tokens_per_second_per_gpu": 1503, "profile": "H200"}
    plan: dict[str, Any] = {"layout": {"world_size": 2}, "schedule": {"estimate": estimate}}
    plan["memory"] = [{"allocated": 1.25 * 2**30}]
    (folder / "a/plan.json").write_text(json.dumps(plan))
    assert main([str(folder)]) == 0
    return folder


@pytest.fixture
def page(runs: Path, tmp_path: Path) -> Iterator[Page]:
    with opened((runs / "report.html").as_uri(), tmp_path) as page:
        page.value(PROBLEMS)
        yield page
        assert page.value("problems") == []


def tick(page: Page, name: str) -> None:
    page.click(f'input[value="{name}"]')


def test_all_runs_are_drawn_at_first_best_on_top(page: Page):
    assert page.value(CURVES) == ["c", "a", "b"]
    assert page.value(ABOVE) == ["best", "+0.2500", "+36.7500", ""]
    assert page.value(LENGTHS) == ["4,005", "2,005", "3,006", "1,005"]
    assert page.value(WIDTHS)[0] == "80%"
    assert page.value("document.querySelectorAll('#memory .planned').length") == 1
    assert max(page.value(LOSSES)) == 40


def test_run_left_out_leaves_table_curves_and_bars(page: Page):
    tick(page, "c")
    assert page.value(CURVES) == ["a", "b"] and page.value(LENGTHS) == ["4,005", "2,005", "3,006"]
    losses = page.value(LOSSES)
    assert len(losses) > 2 and max(losses) < 10, "the axis follows the curves that are left"
    tick(page, "b")
    assert page.value(ABOVE) == ["", "best", "", ""] and page.value(WIDTHS)[1] == "80%"
    assert page.value("document.querySelectorAll('tr.left').length") == 2
    assert page.value("document.querySelector('#all').indeterminate") is True
    page.click("#only")
    assert page.value(f"{ROWS}.length") == 1
    page.click("#all")
    assert page.value(CURVES) == ["c", "a", "b"] and page.value(f"{ROWS}.length") == 3
    page.click("#all")
    assert page.value(CURVES) == [] and page.value(LENGTHS) == [] and page.value(f"{ROWS}") == []


def test_choice_is_in_the_address(page: Page):
    tick(page, "a")
    assert page.value("location.hash") == "#runs=b,c"
    page.send("Page.reload")
    page.until(f"document.readyState === 'complete' && {CURVES}.join() === 'c,b'")
    page.value(PROBLEMS)
    page.value("location.hash = 'runs=a'")
    page.until(f"{CURVES}.join() === 'a'")
    page.click("#all")
    assert page.value("location.hash") == "" and len(page.value(CURVES)) == 3


def test_pointer_tells_the_nearest_step(page: Page):
    tick(page, "c")
    page.value("at('losses').scrollIntoView()")
    point = "document.querySelector('path[data-run=b]').getBoundingClientRect().toJSON()"
    box = page.value(point)
    x, y = box["x"] + box["width"], box["y"] + box["height"]  # where the curve ends, at its lowest
    page.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    page.until("at('near').textContent === 'model.num_layers=4: step 6, loss 3.2500'")


def test_narrow_page_does_not_scroll_sideways(page: Page):
    page.resize(400, 700)
    page.until("at('losses').viewBox.baseVal.width < 400")  # drawn anew, with letters as large
    assert page.value("document.documentElement.scrollWidth") <= 400


def test_page_may_not_load_anything(page: Page):
    asked = "fetch('https://example.org/').then(() => 'loaded', () => 'refused')"
    asked += ".then(said => { window.said = said })"
    page.value(f"void {asked}")
    page.until("window.said")
    assert page.value("said") == "refused"
