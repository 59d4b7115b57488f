"""layouts.svg and layouts.png: step time of several layouts on the network and on a slower one, and
the memory each needs.
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from app.advice.layout_rows import LayoutComparison
from app.cli.plan_views.compared_layouts import OWN, hours, layout_names
from app.cli.plan_views.pictures import save_picture
from app.plan.formatting import GIB, amount, count_of

WIDTH = 12.0  # inches
USUAL, SLOWER, MEMORY, LIMIT = "#2C6FAC", "#A9C9E6", "#8A8A8A", "#C0392B"


def save_layouts(found: LayoutComparison, folder: Path) -> list[Path]:
    """Write both pictures into an existing folder. Raises OSError."""
    return save_picture(layouts_figure(found), folder, "layouts")


def layouts_figure(found: LayoutComparison) -> Figure:
    """Draw the picture."""
    figure = Figure(figsize=(WIDTH, 1.7 + 0.5 * len(found.rows)), layout="constrained")
    times, memory = figure.subplots(1, 2, sharey=True, width_ratios=(3, 1))
    places = list(range(len(found.rows)))
    slower = [row.slower.seconds * 1e3 for row in found.rows]
    usual = [row.cost.seconds * 1e3 for row in found.rows]
    times.barh(places, slower, color=SLOWER, label=f"at {found.slower_gb_s:g} GB/s", height=0.7)
    times.barh(places, usual, color=USUAL, label=f"at {found.network_gb_s:g} GB/s", height=0.7)
    for place, row in enumerate(found.rows):
        days = f" {hours(row.cost.gpu_hours)} GPU hours, slower {hours(row.slower.gpu_hours)}"
        times.text(max(slower[place], usual[place]), place, days, va="center", fontsize=7)
    held = [row.memory / GIB for row in found.rows]
    memory.barh(places, held, color=MEMORY, height=0.7)
    memory.axvline(found.gpu_memory / GIB, color=LIMIT, linewidth=1)
    memory.set(xlabel=f"GiB of {found.gpu_memory / GIB:.0f} (line)")
    names = ["\n".join(layout_names(row)) for row in found.rows]
    times.set_yticks(places, names, fontsize=7)
    for row, label in zip(found.rows, times.get_yticklabels(), strict=True):
        label.set_fontweight("bold" if row.own else "normal")
    times.invert_yaxis()
    times.xaxis.set_major_formatter("{x:,.0f}")
    times.set(xlabel="ms of a step, as planned", xlim=(0, 1.5 * max(*slower, *usual)))
    gpus, tokens = count_of(found.world_size, "GPU"), amount(found.tokens)
    figure.suptitle(f"Layouts on {gpus}; GPU hours of {tokens} tokens; bold: {OWN}", fontsize=11)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    return figure
