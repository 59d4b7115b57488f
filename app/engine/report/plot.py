"""Draw loss.png from metrics.jsonl: train and validation loss, and throughput."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.engine.files.run_folder import read_metrics
from app.own_files import replaced
from app.plan.formatting import drawable, literal_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure  # slow to import

LOSS = "loss.png"


def plot_run(run_dir: Path, baselines: dict[str, float]) -> Path | None:
    """Draw a run's metrics, with `baselines` (name -> nats per token); None without a step."""
    rows = read_metrics(run_dir)
    steps = [row for row in rows if "loss" in row]
    if not steps:
        return None
    with literal_text():
        figure = _picture(run_dir.name, rows, steps, baselines=baselines)
        with replaced(run_dir / LOSS) as temporary:
            figure.savefig(temporary, dpi=110)
    return run_dir / LOSS


def _picture(
    title: str,
    rows: list[dict[str, Any]],
    steps: list[dict[str, Any]],
    *,
    baselines: dict[str, float],
) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 7), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    _draw_loss(top, steps, [row for row in rows if "val_loss" in row], baselines=baselines)
    bottom.plot(
        _column(steps, "step"), _column(steps, "tokens_per_s"), color="tab:gray", linewidth=0.8
    )
    bottom.set(xlabel="step", ylabel="tokens/s", ylim=(0, None))
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
    figure.suptitle(drawable(title))
    return figure


def _draw_loss(
    axes: Any,
    steps: list[dict[str, Any]],
    validations: list[dict[str, Any]],
    baselines: dict[str, float],
) -> None:
    axes.plot(
        _column(steps, "step"), _column(steps, "loss"), label="train", linewidth=0.8, alpha=0.8
    )
    axes.plot(
        _column(validations, "step"),
        _column(validations, "val_loss"),
        "o-",
        label="validation",
        markersize=4,
    )
    for (name, value), style in zip(baselines.items(), ("--", ":", "-."), strict=False):
        axes.axhline(
            value, linestyle=style, color="black", linewidth=0.8, label=f"{name} {value:.2f}"
        )
    axes.set(ylabel="loss, nats per token")
    axes.legend()


def _column(rows: list[dict[str, Any]], key: str) -> list[float]:
    return [row[key] for row in rows]
