"""What the pictures of a plan have in common: how they are saved, and which ink is legible on a
colour.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

Colour = tuple[float, float, float]  # red, green, blue; 0 to 1

LUMA = (0.299, 0.587, 0.114)  # how bright red, green and blue look
DARK = 0.55  # words on darker colours are white
DPI = 110  # pixels per inch


def save_picture(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write name.svg and name.png into an existing folder. Raises OSError."""
    paths = [folder / f"{name}.svg", folder / f"{name}.png"]
    # Text stays text, and equal plans make equal files.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(paths[0], dpi=DPI, metadata={"Date": None})
    figure.savefig(paths[1], dpi=DPI)
    return paths


def whitened(colour: str | Colour, white: float) -> Colour:
    """The colour with a share of white in it, 0 to 1."""
    red, green, blue = (part + (1 - part) * white for part in to_rgb(colour))
    return red, green, blue


def ink(fill: str | Colour) -> str:
    """Black or white, for words on a colour."""
    light = sum(part * share for part, share in zip(to_rgb(fill), LUMA, strict=True))
    return "white" if light < DARK else "black"
