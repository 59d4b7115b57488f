"""Draw docs/run.png: what a run shows on a terminal, and below that its loss.

    python scripts/run_picture.py [overrides of train.py …]

trains in a temporary folder, in a terminal of its own: its first lines up to the live line as it
stood in the second half, then sample and result, as printed. `…` stands for what is left out.
"""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from rich.console import Console
from rich.text import Text

from app.errors import CLEAR

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs/run.png"
COLUMNS = 100  # of the terminal
WIDTH, LINE, CURVE, MARGIN = (
    10.0,
    0.2,
    2.4,
    0.3,
)  # inches: all of it, a line, the loss, around the text
DPI = 130  # pixels per inch
POINTS = 11.2  # size of the terminal's letters, of which COLUMNS fill a line
LEFT_OUT = "…"
PAPER, INK, DIM, PROMPT = "#0d1117", "#e6edf3", "#8b949e", "#7ee787"  # colours of the terminal
BASELINES = re.compile(r"^  (bigram|trigram) +([\d.]+)\b", re.MULTILINE)


def trained(overrides: Sequence[str], folder: Path) -> str:
    """All that a run writes to its terminal. Raises CalledProcessError."""
    ours, its = pty.openpty()
    line = [sys.executable, str(ROOT / "train.py"), *overrides]
    env = {**os.environ, "COLUMNS": str(COLUMNS), "TERM": "xterm-256color"}
    run = subprocess.Popen(line, cwd=folder, env=env, stdin=its, stdout=its, stderr=its)
    os.close(its)
    written = b"".join(_read(ours))
    if code := run.wait():
        raise subprocess.CalledProcessError(code, line, written.decode())
    return written.decode()


def _read(terminal: int) -> Iterator[bytes]:
    while True:
        try:
            part = os.read(terminal, 1 << 16)
        except OSError:  # how Linux says that the program has closed it
            return
        if not part:
            return
        yield part


def shown(written: str) -> list[Text]:
    """What the terminal shows in the second half of the run, and at its end, with colours."""
    lines = [line.split(CLEAR) for line in written.replace("\r\n", "\n").split("\n")]
    kept = [Text.from_ansi(line[-1]) for line in lines]
    drawn = [row for row, line in enumerate(lines) if len(line) > 2]  # a live line has given way
    now = drawn[len(drawn) // 2]
    sample, files = (_row_of(kept, start) for start in ("Sample ", "Written:"))
    live, dots = Text.from_ansi(lines[now][-2]), Text(LEFT_OUT)
    picked = [*kept[:now], live, dots, *kept[sample : files - 1]]
    return [part for text in picked for part in _wrapped(text)]


def _row_of(lines: Sequence[Text], start: str) -> int:
    return next(row for row, line in enumerate(lines) if line.plain.startswith(start))


def _wrapped(text: Text) -> list[Text]:
    """As a terminal breaks a line that is too long."""
    cuts = range(COLUMNS, len(text), COLUMNS)
    return list(text.divide(cuts))


def draw(typed: str, written: str, rows: Sequence[dict[str, Any]]) -> Figure:
    """The terminal with a command and what it wrote above, the loss of its metrics.jsonl below."""
    lines = [Text(f"$ {typed}"), *shown(written)]
    terminal = 2 * MARGIN + LINE * len(lines)
    height = terminal + CURVE
    figure = Figure(figsize=(WIDTH, height))
    _draw_terminal(figure.add_axes((0, CURVE / height, 1, terminal / height)), lines, terminal)
    baselines = {name: float(loss) for name, loss in BASELINES.findall(written.replace("\r", ""))}
    below = 0.07, 0.5 / height, 0.91, (CURVE - 0.6) / height
    _draw_loss(figure.add_axes(below), rows, baselines)
    return figure


def _draw_terminal(axes: Any, lines: Sequence[Text], height: float) -> None:
    axes.set(xlim=(0, WIDTH), ylim=(height, 0))
    axes.axis("off")
    box = FancyBboxPatch(
        (0.12, 0.12), WIDTH - 0.24, height - 0.24, boxstyle="round,pad=0,rounding_size=0.1"
    )
    box.set(facecolor=PAPER, linewidth=0)
    axes.add_patch(box)
    column = (WIDTH - 2 * MARGIN) / COLUMNS
    for row, line in enumerate(lines):
        for start, text, colour in _parts(line):
            place = MARGIN + start * column, MARGIN + LINE * (row + 0.5)
            axes.text(
                *place, text, color=colour, family="DejaVu Sans Mono", fontsize=POINTS, va="center"
            )


def _parts(line: Text) -> Iterator[tuple[int, str, str]]:
    """Column, text and colour of each part of a line."""
    console = Console()
    cuts = sorted(
        {0, len(line), *(place for span in line.spans for place in (span.start, span.end))}
    )
    for start, end in pairwise(cuts):
        style = line.get_style_at_offset(console, start)
        colour = style.color.get_truecolor().hex if style.color else INK
        if line.plain.startswith("$ "):
            colour = PROMPT
        elif line.plain == LEFT_OUT:
            colour = DIM
        yield start, line.plain[start:end], colour


def _draw_loss(axes: Any, rows: Sequence[dict[str, Any]], baselines: dict[str, float]) -> None:
    steps, validations = ([row for row in rows if key in row] for key in ("loss", "val_loss"))
    axes.plot(
        [r["step"] for r in steps],
        [r["loss"] for r in steps],
        linewidth=0.9,
        alpha=0.8,
        label="training",
    )
    places = [r["step"] for r in validations], [r["val_loss"] for r in validations]
    axes.plot(*places, "o-", markersize=4, label="validation")
    for (name, value), style in zip(baselines.items(), ("--", ":"), strict=False):
        axes.axhline(
            value, color="black", linestyle=style, linewidth=0.9, label=f"{name} model {value:.2f}"
        )
    axes.set(xlabel="step", ylabel="loss, nats per byte", xlim=(0, steps[-1]["step"]))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, ncols=4, loc="upper right")


def main(overrides: Sequence[str]) -> None:
    """Train, and draw."""
    with tempfile.TemporaryDirectory() as folder:
        written = trained(overrides, Path(folder))
        (metrics,) = Path(folder).glob("runs/*/metrics.jsonl")
        rows = [json.loads(row) for row in metrics.read_text().splitlines()]
    draw(" ".join(["python train.py", *overrides]), written, rows).savefig(PICTURE, dpi=DPI)
    print(f"written: {PICTURE}")


if __name__ == "__main__":
    main(sys.argv[1:])
