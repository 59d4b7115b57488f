"""scripts/run_picture.py: what a terminal shows of a run becomes a picture."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.errors import CLEAR
from scripts.run_picture import COLUMNS, draw, shown

pytestmark = pytest.mark.docs

BAR = "\x1b[38;5;237m━━━\x1b[0m  step {}/4  loss 1.0"
WRITTEN = "\r\n".join(
    [
        "       model  tiny",
        f"{CLEAR}step 0/4  validation loss 3.0",
        f"{CLEAR}{BAR.format(1)}{CLEAR}{BAR.format(2)}{CLEAR}step 2/4  validation loss 2.0",
        f"{CLEAR}{BAR.format(3)}{CLEAR}{BAR.format(4)}{CLEAR}step 4/4  validation loss 1.0",
        "sampling: done in 2 s",
        "",
        "Sample (the model continues after ▶):",
        "x" * (COLUMNS + 1),
        "",
        "Result, nats per token on the validation data:",
        "  this model    1.000   perplexity 2.718, 1.443 bits per byte",
        "  bigram        2.485   perplexity 12.00, 3.585 bits per byte",
        "",
        "Written:",
        "  runs/x/config.yaml",
        "",
    ]
)
ROWS = [{"step": step, "loss": 1 / step} for step in range(1, 5)] + [{"step": 4, "val_loss": 1.0}]


def test_the_live_line_stands_as_it_did_in_the_second_half():
    assert [line.plain.rstrip() for line in shown(WRITTEN)] == [
        "       model  tiny",
        "step 0/4  validation loss 3.0",
        "step 2/4  validation loss 2.0",
        "━━━  step 4/4  loss 1.0",
        "…",
        "Sample (the model continues after ▶):",
        "x" * COLUMNS,
        "x",
        "",
        "Result, nats per token on the validation data:",
        "  this model    1.000   perplexity 2.718, 1.443 bits per byte",
        "  bigram        2.485   perplexity 12.00, 3.585 bits per byte",
    ]


def test_the_picture_has_the_terminal_and_the_loss(tmp_path: Path):
    figure = draw("python train.py", WRITTEN, ROWS)
    terminal, loss = figure.axes
    words = [text.get_text() for text in terminal.texts]
    assert words[0] == "$ python train.py" and "━━━" in words
    assert [line.get_label() for line in loss.lines] == [
        "training",
        "validation",
        "bigram model 2.48",
    ]
    figure.savefig(tmp_path / "run.png")
    assert (tmp_path / "run.png").stat().st_size > 1000
