"""Output of a run on a terminal, with a live line, and into a file."""

from __future__ import annotations

import dataclasses
import io
import re

import pytest

from app.engine.report.sinks import Console
from app.engine.step.records import StepReport, ValidationReport
from tests.training import composed

STEPS = 20
CLEAR = "\r\x1b[K"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def report(step: int) -> StepReport:
    zeros = dict.fromkeys(
        ("aux_loss", "z_loss", "lr", "weight_decay", "grad_norm", "skipped", "tflops_per_gpu"), 0
    )
    rates = {
        "time": 0.0,
        "data_wait_ms": 1.0,
        "step_ms": 1000.0,
        "tokens_per_s": 5120.0,
        "tokens_per_s_per_gpu": 5120.0,
    }
    return StepReport(
        step=step, loss=3.25, tokens=step * 5120, memory_peak_gib=1.5, **zeros, **rates
    )


def told(stream: io.StringIO) -> str:
    """Return the output of all steps of a run, with a validation after half of them."""
    console = Console(composed([f"train.steps={STEPS}", "log.interval=10"], 1), 0, stream)
    for step in range(1, STEPS + 1):
        console._drawn = 0.0  # as if some time had passed
        console.step(report(step))
        if step == STEPS // 2:
            console.validation(ValidationReport(step, 3.5, 1))
    console.close()
    return stream.getvalue()


@pytest.fixture(autouse=True)
def plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")


def test_a_file_has_plain_lines(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    lines = told(io.StringIO()).splitlines()
    assert [line.split("  ")[0] for line in lines] == [
        "step 1/20",
        "step 10/20",
        "step 10/20",
        "step 20/20",
    ]
    assert lines[0] == "step 1/20  loss 3.250  5.12 k tokens/s  1.5 GiB  0:19 left"
    assert all(line.isprintable() for line in lines)


def test_a_terminal_has_a_bar_that_fills_and_keeps_validations(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "120")
    said = told(Terminal())
    drawn = [re.sub(r"\x1b\[[\d;]*m", "", part) for part in said.split(CLEAR)[1:]]
    kept = "step 10/20  validation loss 3.5000 nats per token\n"
    assert kept in drawn and said.count("\n") == 2 and said.endswith("left\n")
    bars = [part.split("  step")[0] for part in drawn if part != kept]
    assert (
        len(bars) == STEPS
        and {len(bar) for bar in bars} == {22}
        and set("".join(bars)) <= set("━╸╺")
    )
    assert "\x1b[" in said.replace("\x1b[K", ""), "the part that is done has a colour of its own"
    ends = [
        len(re.split(r"\x1b\[0m", part.split("  step")[0])[0])
        for part in said.split(CLEAR)[1:]
        if part != kept
    ]
    assert ends[0] < ends[10] < ends[-1]
    assert drawn[-1].endswith(
        "step 20/20  loss 3.250  val 3.500  5.12 k tokens/s  1.5 GiB  0:00 left\n"
    )


@pytest.mark.parametrize(
    ("columns", "bar", "text"),
    [
        (10, 0, "50%  0:10"),
        (20, 0, "50%  0:10 left"),
        (30, 18, "0:10 left"),
        (40, 16, "loss 3.250  0:10 left"),
        (60, 22, "step 10/20  loss 3.250  0:10 left"),
        (80, 18, "step 10/20  loss 3.250  5.12 k tokens/s  1.5 GiB  0:10 left"),
        (120, 22, "step 10/20  loss 3.250  5.12 k tokens/s  1.5 GiB  0:10 left"),
    ],
)
def test_narrow_terminals_keep_bar_and_time_left(
    monkeypatch: pytest.MonkeyPatch, columns: int, bar: int, text: str
):
    monkeypatch.setenv("COLUMNS", str(columns))
    drawn = told(Terminal()).split(CLEAR)[1:]
    assert "step 10/20  validation loss 3.5000 nats per token\n" in drawn
    lines = [
        re.sub(r"\x1b\[[\d;]*m", "", part).strip("\n") for part in drawn if "validation" not in part
    ]
    assert len(lines) == STEPS and all(len(line) < columns for line in lines)
    assert re.sub("[╸╺]", "━", lines[9]) == ("━" * bar + "  " if bar else "") + text


def test_a_skipped_update_outlasts_numbers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "50")
    stream = Terminal()
    skipped = dataclasses.replace(report(10), skipped=1)
    Console(composed([f"train.steps={STEPS}"], 1), 0, stream).step(skipped)
    assert stream.getvalue().endswith("\x1b[0m  0:10 left  (update skipped)")
